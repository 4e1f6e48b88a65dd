"""The command line on checkpoints that one process has written: what it tells, what it refuses, and what it runs."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_flatten

from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.shard_directory import prepare_shards
from lightning_automodel.checkpoint.single_file import load_file as load_checkpoint
from lightning_automodel.checkpoint.single_file import save_file

MODEL = {"model.weight": torch.arange(12.0).view(3, 4), "model.bias": torch.ones(3, dtype=torch.bfloat16)}
AVERAGES = {name: value + 1 for name, value in MODEL.items()}
MISSING = "FileNotFoundError: [Errno 2] No such file or directory"
CLASS = ("--class", "tests.checkpoint.test_cli.Holds")


class Holds(pl.LightningModule):
    """Loads `MODEL`, and is no model for Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(4, 3)


class Runs:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


class Custom:
    def __init__(self) -> None:
        self.inner = {"value": 3}


SIZES = {"data_parallel_replicate": 1, "data_parallel_shard": 4, "tensor_parallel": 2}


def checkpoint(**rest: Any) -> dict[str, Any]:
    """As Lightning makes it, after seven steps."""
    moments = {name: {"step": torch.tensor(7.0), "exp_avg": value * 0.5} for name, value in MODEL.items()}
    del moments["model.bias"]["exp_avg"]
    return {
        "epoch": 2,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": dict(MODEL),
        "optimizer_states": [
            {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(MODEL)}]},
            {"state": {}, "param_groups": [{"lr": 0.3, "params": []}]},
        ],
        "callbacks": {
            "Averages": {"of/model": dict(AVERAGES), "seen": torch.arange(4)},
            "Other": {"best": 0.25},
        },
        "random": torch.arange(9, dtype=torch.uint8),
        "lightning_automodel": {"format": 1, "sizes": SIZES, "ranks": [{}] * 8},
        **rest,
    }


def save_shards(path: Path, **rest: Any) -> Path:
    prepare_shards(checkpoint(**rest), str(path))(None)
    return path


def save_whole(path: Path, **rest: Any) -> Path:
    save_file(checkpoint(**rest), str(path))
    return path


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["inspect", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], path: str) -> str:
    """The error of an inspection, in one line, without a report."""
    assert main(["inspect", path]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.startswith("error: "), printed.err.count("\n")) == ("", True, 1)
    return printed.err.encode().decode("unicode_escape")  # as it was before it was escaped


@pytest.mark.parametrize("save", [save_shards, save_whole])
def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Any) -> None:
    """Both forms tell the same."""
    path = save(tmp_path / "a.ckpt")
    assert inspected(capsys, str(path)) == {"mesh": SIZES, "epoch": 2, "global_step": 7}


@pytest.mark.parametrize("save", [save_shards, save_whole])
def test_inspect_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Any) -> None:
    """What needs code to load is named, and described with trust alone."""
    path = save(tmp_path / "a.ckpt", custom=Custom())
    assert "GLOBAL tests.checkpoint.test_cli.Custom was not an allowed global" in refused(capsys, str(path))
    report = inspected(capsys, str(path), "--trust")
    assert report["global_step"] == 7
    mark = tmp_path / "mark"
    assert "posix.mkdir" in refused(capsys, str(save(tmp_path / "b.ckpt", runs=Runs(mark))))
    assert not mark.exists()


def test_inspect_tells_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has changed; the status says so too."""
    shards = save_shards(tmp_path / "a.ckpt")
    whole = save_whole(tmp_path / "b.ckpt")
    damage_weight(shards / "__0_0.distcp"), damage_weight(whole)
    changed = "has changed since it was written"
    assert f"__0_0.distcp {changed}" in refused(capsys, str(shards))
    assert f"b.ckpt {changed}" in refused(capsys, str(whole))


def damage_weight(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(MODEL["model.weight"].numpy().tobytes()) + 7] ^= 1
    path.write_bytes(content)


def test_inspect_shards_of_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of plain torch have no rest."""
    dcp.save({"state_dict": dict(MODEL)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert f"{MISSING}: '{tmp_path}/plain/meta.pt'" in refused(capsys, str(tmp_path / "plain"))
    torch.save({"pytorch-lightning_version": "2.6.6"}, tmp_path / "plain" / "meta.pt")
    report = inspected(capsys, str(tmp_path / "plain"))
    assert report["mesh"] is None
    dcp.save({"model": dict(MODEL)}, checkpoint_id=tmp_path / "fsdp1", no_dist=True)
    torch.save({"pytorch-lightning_version": "2.6.6"}, tmp_path / "fsdp1" / "meta.pt")
    remedy = "make one file of it (python -m lightning.pytorch.utilities.consolidate_checkpoint)"
    assert remedy in refused(capsys, str(tmp_path / "fsdp1"))


def test_consolidate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is where Lightning looks for it, tensors bitwise, checksums right, without a sparse hole left."""
    path = save_shards(tmp_path / "a.ckpt")
    out = tmp_path / "out.ckpt"
    assert main(["consolidate", str(path), str(out)]) == 0
    written = torch.load(out, weights_only=True)
    tensors, structure = tree_flatten(written)
    expected, expected_structure = tree_flatten(checkpoint())
    assert structure == expected_structure
    for value, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted
    load_checkpoint(str(out), None)
    assert zipfile.ZipFile(out).testzip() is None
    assert capsys.readouterr().out == f"Wrote {out}\n"
    assert inspected(capsys, str(out))["mesh"] == SIZES
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize("optimizers", [{}, {"optimizer_states": [], "lr_schedulers": []}], ids=str)
def test_consolidate_weights_alone(tmp_path: Path, optimizers: dict[str, Any]) -> None:
    """No optimizer's state is not the state of no optimizers, with which a run would go on from fresh moments."""
    saved = {"epoch": 2, "state_dict": dict(MODEL), **optimizers}
    prepare_shards(dict(saved), str(tmp_path / "a.ckpt"))(None)
    assert main(["consolidate", str(tmp_path / "a.ckpt"), str(tmp_path / "out")]) == 0
    assert torch.load(tmp_path / "out", weights_only=True).keys() == saved.keys()


def test_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr that says what to do, status 1, no traceback, nothing written."""
    shards = save_shards(tmp_path / "a.ckpt")
    whole = save_whole(tmp_path / "b.ckpt")
    empty = tmp_path / "empty"
    empty.mkdir()
    out = str(tmp_path / "out")
    cases = {
        ("consolidate", str(whole), out): "is not a directory of shards: there is nothing to consolidate",
        ("consolidate", str(shards), str(whole)): "exists: remove it, or choose another path",
        ("consolidate", str(shards), "memory://out"): "is not local: write to a local path, and upload that",
        ("consolidate", str(empty), out): f"{MISSING}: '{tmp_path}/empty/.metadata'",
        ("export", str(whole), out, *CLASS): "the models of transformers and PEFT in Holds are: none",
        ("export", str(whole), out, "--class", "tests.none.Module"): "No module named 'tests.none'",
        ("export", f"{tmp_path}/none", out, *CLASS): MISSING,
    }
    for arguments, message in cases.items():
        assert main(list(arguments)) == 1
        report = capsys.readouterr()
        assert message in report.err
        assert report.err.startswith("error: ")
        assert report.err.count("\n") == 1
        assert report.out == ""
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt", "empty"]


def test_code_is_run_only_with_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By consolidation and export, which must load the rest."""
    path = save_shards(tmp_path / "a.ckpt", custom=Custom())
    for name, *options in (["export", *CLASS], ["consolidate"]):
        command = [name, str(path), str(tmp_path / name), *options]
        assert main(command) == 1
        assert "was not an allowed global" in capsys.readouterr().err
        assert main([*command, "--trust"]) == (name == "export")
        assert ("the models of transformers and PEFT in Holds are: none" in capsys.readouterr().err) == (
            name == "export"
        )
    assert torch.load(tmp_path / "consolidate", weights_only=False)["custom"].inner == {"value": 3}


def test_inspect_other_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of other programs that use the same names."""
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": MODEL, "epoch": torch.tensor(3), "global_step": {1}}, path)
    report = inspected(capsys, str(path))
    assert (report["epoch"], report["global_step"]) == ("tensor(3)", "{1}")
