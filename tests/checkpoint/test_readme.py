"""The README.txt of a directory of shards: its directions work, and the checkpoint does not need it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.saver import prepare_shards
from lightning_automodel.checkpoint.sharded import README


def saved(path: Path) -> nn.Module:
    """Saves a module there, by one rank."""
    module = nn.Linear(3, 2)
    prepare_shards({"state_dict": module.state_dict(), "epoch": 1}, str(path))(None)
    return module


def test_commands_are_those_of_this_package(tmp_path: Path) -> None:
    """Both are known, and one file is what `torch.load` reads."""
    module, directory = saved(tmp_path / "a.ckpt"), tmp_path / "a.ckpt"
    commands = re.findall(r"-m lightning_automodel\.checkpoint ([^#\n]+)", (directory / README).read_text())
    assert [command.split()[0] for command in commands] == ["consolidate", "export"]
    whole = tmp_path / "one.ckpt"
    command = commands[0].replace("THIS_DIRECTORY", str(directory)).replace("one.ckpt", str(whole))
    assert main(command.split()) == 0
    assert torch.equal(torch.load(whole, weights_only=True)["state_dict"]["weight"], module.weight)


@pytest.mark.parametrize("how", ["removed", "changed"])
def test_a_checkpoint_without_it_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    """Notes that somebody writes into it damage nothing."""
    saved(tmp_path / "a.ckpt")
    readme = tmp_path / "a.ckpt" / README
    readme.unlink() if how == "removed" else readme.write_text("the good one")
    assert main(["inspect", "--verify", str(tmp_path / "a.ckpt")]) == 0
    assert "damage:       null" in capsys.readouterr().out
