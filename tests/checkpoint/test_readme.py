"""The README.txt of a directory of shards: its directions work, and the checkpoint does not need it."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.saver import prepare_shards
from lightning_automodel.checkpoint.sharded import README
from tests.processes import fresh_environment


def saved(path: Path) -> nn.Module:
    """Saves a module there, by one rank."""
    module = nn.Linear(3, 2)
    prepare_shards({"state_dict": module.state_dict(), "epoch": 1}, str(path))(None)
    return module


@pytest.mark.sweep
def test_weights_load_without_this_package(tmp_path: Path) -> None:
    """As the README says, in a process that imports torch alone."""
    module, directory = saved(tmp_path / "a.ckpt"), tmp_path / "a.ckpt"
    [code] = re.findall(r"((?:    .+\n|\n)*    import torch(?:.*\n)(?:    .+\n|\n)*)", (directory / README).read_text())
    program = f"""
import sys, torch
module = torch.nn.Linear(3, 2)
{textwrap.dedent(code).replace("THIS_DIRECTORY", str(directory))}
assert "lightning_automodel" not in sys.modules
torch.save(module.state_dict(), "loaded.pt")
"""
    environment = {**fresh_environment(), "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=120)
    loaded = torch.load(tmp_path / "loaded.pt")
    assert all(torch.equal(loaded[name], value) for name, value in module.state_dict().items())


def test_commands_are_those_of_this_package(tmp_path: Path) -> None:
    """Both are known, and one file is what `torch.load` reads."""
    module, directory = saved(tmp_path / "a.ckpt"), tmp_path / "a.ckpt"
    commands = re.findall(r"-m lightning_automodel\.checkpoint (.+)", (directory / README).read_text())
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
