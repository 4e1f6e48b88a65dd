"""The command line on checkpoints that one process has written: what it tells, what it refuses, and what it runs."""

from __future__ import annotations

import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.shard_writer import prepare_shards
from lightning_automodel.checkpoint.single_file import load_file as load_checkpoint
from lightning_automodel.checkpoint.single_file import save_file

MODEL = {"model.weight": torch.arange(12.0).view(3, 4), "model.bias": torch.ones(3, dtype=torch.bfloat16)}
AVERAGES = {name: value + 1 for name, value in MODEL.items()}
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
    """No plain data, and no harm."""

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
    """A directory of this package."""
    prepare_shards(checkpoint(**rest), str(path))(None)
    return path


def save_whole(path: Path, **rest: Any) -> Path:
    """A file of this package."""
    save_file(checkpoint(**rest), str(path))
    return path


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    """What `inspect --json` prints."""
    assert main(["inspect", "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("save", "form"), [(save_shards, "directory of shards"), (save_whole, "one file")])
@pytest.mark.parametrize("verify", [False, True])
def test_inspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Any, form: str, verify: bool
) -> None:
    """Both forms tell the same."""
    path = save(tmp_path / "a.ckpt")
    (report,) = inspected(capsys, str(path), *(["--verify"] if verify else []))["checkpoints"]
    assert report["form"] == form
    assert (report["written_by"], report["damage"], report["verified"]) == (
        "lightning_automodel",
        None,
        verify,
    )
    assert report["world_size"] == 8
    assert (report["epoch"], report["global_step"], report["num_elements"]) == (2, 7, 15)
    assert report["dtypes"] == {"float32": 12, "bfloat16": 3}
    assert report["num_bytes"] == sum(
        each.stat().st_size for each in ([path] if path.is_file() else path.iterdir())
    )
    assert report["mesh"] == SIZES
    assert report["rest"] == [
        "callbacks",
        "epoch",
        "global_step",
        "lightning_automodel",
        "pytorch-lightning_version",
        "random",
    ]
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert 'dtypes:       {"float32": 12, "bfloat16": 3}' in text


@pytest.mark.parametrize("save", [save_shards, save_whole])
def test_inspect_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Any) -> None:
    """What needs code to load is named, and described with trust alone."""
    path = save(tmp_path / "a.ckpt", custom=Custom())
    (report,) = inspected(capsys, str(path))["checkpoints"]
    assert (report["not_plain"], report["damage"]) == (["tests.checkpoint.test_cli.Custom"], None)
    assert report.get("global_step") is None
    (report,) = inspected(capsys, str(path), "--trust")["checkpoints"]
    assert (report["global_step"], "custom" in report["rest"]) == (7, True)
    mark = tmp_path / "mark"
    (report,) = inspected(capsys, str(save(tmp_path / "b.ckpt", runs=Runs(mark))))["checkpoints"]
    assert report["not_plain"] == ["posix.mkdir"]
    assert not mark.exists()


def test_inspect_tells_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing or cut off at once, what has changed with `--verify`; the status says so too."""
    shards = save_shards(tmp_path / "a.ckpt")
    whole = save_whole(tmp_path / "b.ckpt")
    data = shards / "__0_0.distcp"
    both = (str(shards), str(whole))
    _flip(data), _flip(whole)
    assert [each["damage"] for each in inspected(capsys, *both)["checkpoints"]] == [None, None]
    of_shards, of_file = inspected(capsys, *both, "--verify", status=1)["checkpoints"]
    assert "__0_0.distcp has changed since it was written" in of_shards["damage"]
    assert "it has changed since it was written" in of_file["damage"]
    os.truncate(data, 50)
    os.truncate(whole, 500)
    of_shards, of_file = inspected(capsys, *both, status=1)["checkpoints"]
    assert "__0_0.distcp is cut off: it has 50 bytes" in of_shards["damage"]
    assert "b.ckpt: " in of_file["damage"]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(MODEL["model.weight"].numpy().tobytes()) + 7] ^= 1
    path.write_bytes(content)


def test_inspect_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other; the status tells whether all are whole."""
    whole = save_whole(tmp_path / "a.ckpt")
    broken = save_whole(tmp_path / "b.ckpt")
    assert main(["inspect", str(whole), str(whole)]) == 0
    os.truncate(broken, 100)
    capsys.readouterr()
    assert main(["inspect", str(whole), str(broken)]) == 1
    lines = capsys.readouterr().out.splitlines()
    first, second = (lines.index(f'path:         "{path}"') for path in (whole, broken))
    assert first < lines.index("damage:       null") < second
    assert lines[second + 2].startswith('damage:       "Cannot load ')


def test_inspect_shards_of_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of plain torch have no rest."""
    dcp.save({"state_dict": dict(MODEL)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    (report,) = inspected(capsys, str(tmp_path / "plain"), status=1)["checkpoints"]
    assert "meta.pt is missing: this is no directory of shards that Lightning or" in report["damage"]
    torch.save({"pytorch-lightning_version": "2.6.6"}, tmp_path / "plain" / "meta.pt")
    (report,) = inspected(capsys, str(tmp_path / "plain"))["checkpoints"]
    assert report["written_by"] == "Lightning 2.6.6"


def test_consolidate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is where Lightning looks for it, tensors bitwise, checksums right, without a sparse hole left."""
    path = save_shards(tmp_path / "a.ckpt")
    out = tmp_path / "out.ckpt"
    assert main(["consolidate", str(path), str(out)]) == 0
    written = torch.load(out, weights_only=True)
    expected = checkpoint()
    assert written.keys() == expected.keys()
    _assert_same(written, expected)
    load_checkpoint(str(out), None)
    assert zipfile.ZipFile(out).testzip() is None
    assert capsys.readouterr().out == f"Wrote {out}\n"
    (report,) = inspected(capsys, str(out), "--verify")["checkpoints"]
    assert (report["written_by"], report["damage"]) == ("lightning_automodel", None)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_consolidate_weights_alone(tmp_path: Path) -> None:
    """No optimizer's state is not the state of no optimizers, with which a run would go on from fresh moments."""
    weights = {"epoch": 2, "state_dict": dict(MODEL)}
    for name, saved in {
        "weights": weights,
        "none": {**weights, "optimizer_states": [], "lr_schedulers": []},
    }.items():
        path = tmp_path / f"{name}.ckpt"
        prepare_shards(dict(saved), str(path))(None)
        assert main(["consolidate", str(path), str(tmp_path / name)]) == 0
        assert torch.load(tmp_path / name, weights_only=True).keys() == saved.keys()


def _assert_same(value: Any, expected: Any) -> None:
    assert isinstance(value, type(expected))
    if isinstance(expected, dict):
        assert value.keys() == expected.keys()
        for key in expected:
            _assert_same(value[key], expected[key])
    elif isinstance(expected, list):
        assert len(value) == len(expected)
        for each, other in zip(value, expected, strict=True):
            _assert_same(each, other)
    else:
        assert torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected


def test_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr that says what to do, status 1, no traceback, nothing written."""
    shards = save_shards(tmp_path / "a.ckpt")
    whole = save_whole(tmp_path / "b.ckpt")
    empty = tmp_path / "empty"
    empty.mkdir()
    out = str(tmp_path / "out")
    cases = {
        ("inspect", f"{tmp_path}/none"): f"Cannot load {tmp_path}/none: there is no such file",
        ("consolidate", str(whole), out): "is not a directory of shards: there is nothing to consolidate",
        ("consolidate", str(shards), str(whole)): "exists: remove it, or choose another path",
        ("consolidate", str(shards), "memory://out"): "is not local: write to a local path, and upload that",
        ("consolidate", str(empty), out): ".metadata is missing: this is no directory of shards",
        ("export", str(whole), out, *CLASS): "holds no model of transformers or PEFT, and from_pretrained",
        ("export", str(whole), out, "--class", "tests.none.Module"): "No module named 'tests.none'",
        ("export", f"{tmp_path}/none", out, *CLASS): "there is no such file or directory",
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
        assert "holds more than plain data" in capsys.readouterr().err
        assert main([*command, "--trust"]) == (name == "export")
        assert ("holds no model of transformers or PEFT" in capsys.readouterr().err) == (name == "export")
    assert torch.load(tmp_path / "consolidate", weights_only=False)["custom"].inner == {"value": 3}


@pytest.mark.filterwarnings("ignore")
def test_any_damage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a damaged pickle leads to while it is read, of a directory without checksums above all."""
    shards = tmp_path / "a.ckpt"
    dcp.save({"state_dict": MODEL}, checkpoint_id=str(shards))
    metadata = shards / ".metadata"
    content = metadata.read_bytes()
    generator = random.Random(5)
    for _ in range(200):
        damaged = bytearray(content[: generator.randrange(len(content) + 200)])
        for _ in range(3):
            if damaged:
                damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        metadata.write_bytes(damaged)
        assert main(["inspect", "--json", str(shards)]) in (0, 1)
        capsys.readouterr()
        assert main(["export", str(shards), str(tmp_path / "out"), *CLASS]) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: Cannot load ")
    metadata.write_bytes(b"")
    (report,) = inspected(capsys, str(shards), status=1)["checkpoints"]
    assert "a.ckpt: .metadata is damaged (" in report["damage"]


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": [1]},
        {"state_dict": MODEL, "lightning_automodel": {"sizes": 3}},
    ],
)
def test_inspect_other_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any]
) -> None:
    """A file of another program that uses the same names."""
    torch.save(content, tmp_path / "a.ckpt")
    (report,) = inspected(capsys, str(tmp_path / "a.ckpt"), status=1)["checkpoints"]
    assert "not a checkpoint" in report["damage"]
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 1


def test_inspect_numbers_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": MODEL, "epoch": torch.tensor(3), "global_step": {1}}, tmp_path / "a.ckpt")
    (report,) = inspected(capsys, str(tmp_path / "a.ckpt"))["checkpoints"]
    assert (report["epoch"], report["global_step"]) == (None, None)


@pytest.mark.parametrize("path", ["nosuchprotocol://a.ckpt", "a::b.ckpt"])
def test_unsupported_paths(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", path]) == 1
    assert capsys.readouterr().err.startswith(f"error: {path} ")


def test_shards_without_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch.distributed.checkpoint alone writes no `meta.pt`."""
    dcp.save({"state_dict": MODEL}, checkpoint_id=str(tmp_path / "a.ckpt"))
    assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), *CLASS]) == 1
    assert "meta.pt is missing: this is no directory of shards that Lightning or" in capsys.readouterr().err
