"""Damage of any file of a checkpoint is found on every rank before anything is loaded; nothing forged is followed."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.distributed.fsdp import fully_shard

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.loading import load_any
from lightning_automodel.checkpoint.optimizers import NamedOptimizer
from lightning_automodel.checkpoint.shard_directory import MANIFEST, ShardDirectory
from tests.checkpoint.checkpoints import FORMS, AdamModule, are_equal, batches, files_of, fit, forms, save
from tests.checkpoint.test_cli import CLASS, MODEL, Custom, Runs, refused, save_shards
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, make_trainer


def damage(path: Path, how: str) -> None:
    """Delete it, or flip a bit."""
    if how == "delete":
        path.unlink()
        return
    generator = random.Random(path.name)
    content = bytearray(path.read_bytes())
    content[_place_that_matters(path, generator)] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def _place_that_matters(path: Path, generator: random.Random) -> int:
    """Any byte of a table, but of the others a byte of a record: what is between them means nothing."""
    content = path.read_bytes()
    if path.suffix not in (".distcp", ".pt", ".ckpt"):
        return generator.randrange(len(content))
    offset = 0
    length = len(content)
    if path.suffix == ".distcp":
        places = pickle.loads((path.parent / ".metadata").read_bytes()).storage_data.values()
        offset, length = generator.choice(
            [(p.offset, p.length) for p in places if p.relative_path == path.name]
        )
    reader = torch.PyTorchFileReader(io.BytesIO(content[offset : offset + length]))
    record = generator.choice([name for name in reader.get_all_records() if len(reader.get_record(name))])
    return offset + reader.get_record_offset(record) + generator.randrange(len(reader.get_record(record)))


def fill(options: dict[str, Any], path: str, module: AdamModule) -> None:
    """Load as the strategy does, without a Trainer, which takes a second to fail."""
    strategy = AutomodelStrategy(**options)
    if strategy._saver.is_sharded:
        fully_shard(module.model)
    found = module.configure_optimizers()
    optimizers = [found["optimizer"]] if isinstance(found, dict) else found
    checkpoint = strategy._loader.open(path, None, TorchCheckpointIO())
    named = [NamedOptimizer(module, optimizer, {}) for optimizer in optimizers]
    strategy._loader.fill_model(checkpoint, module, named, strict=True)


def fit_on(options: dict[str, Any], path: str, module: AdamModule) -> None:
    """Load as a fit that goes on does."""
    make_trainer(AutomodelStrategy(**options), max_epochs=2).fit(module, batches(), ckpt_path=path)


def attempt(
    options: dict[str, Any], path: str, module: AdamModule | None = None, load: Callable[..., None] = fill
) -> tuple[str, bool]:
    """What loading raises on this rank, and whether the module is as it was."""
    module = AdamModule(CASE.seed + 2) if module is None else module
    before = full_weights(module.model)
    with pytest.raises(CheckpointError) as raised:
        load(options, path, module)
    return str(raised.value), are_equal(full_weights(module.model), before)


def opened(options: dict[str, Any], path: str) -> str:
    """What loading raises on this rank, which leaves the module as it is."""
    message, is_unchanged = attempt(options, path)
    assert is_unchanged
    return message


def _damage_one_after_the_other(options: dict[str, Any], folder: str) -> list[tuple[str, str]]:
    """For each file and each way: its name and the message."""
    original = Path(folder) / "original.ckpt"
    copy = Path(folder) / "copy.ckpt"
    save(options, str(original))
    outcomes = []
    for file in files_of(original):
        for how in ("delete", "flip"):
            if dist.get_rank() == 0:
                shutil.rmtree(copy, ignore_errors=True)
                copy.unlink(missing_ok=True)
                shutil.copytree(original, copy) if original.is_dir() else shutil.copy(original, copy)
                damaged = copy / file.relative_to(original) if original.is_dir() else copy
                damage(damaged, how)
            dist.barrier()
            outcomes.append((file.name, opened(options, str(copy))))
            dist.barrier()
    assert "No such file or directory" in opened(options, f"{folder}/missing.ckpt")
    AutomodelStrategy(**options)._loader.open(original, None, TorchCheckpointIO())
    # Of the last one, through a whole fit.
    assert attempt(options, str(copy), load=fit_on) == (outcomes[-1][1], True)
    return outcomes


@pytest.mark.parametrize("form", forms("shards", "replicated", "one_file_of_shards"))
def test_damage_is_found(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Each file deleted, and one bit of it changed: the same error on every rank, and the weights are as they were."""
    outcomes = pool2.run(_damage_one_after_the_other, FORMS[form], str(tmp_path))
    assert form != "shards" or len(outcomes[0]) == 10
    for of_ranks in zip(*outcomes, strict=True):
        assert len({message for _, message in of_ranks}) == 1, "every rank tells the same"
        for name, message in of_ranks:
            assert f"{tmp_path}/copy.ckpt" in message
            assert name in message or name == "original.ckpt"
            assert "rank" in message


class OtherModule(AdamModule):
    """Has a layer that the saved one has not, and one of another shape."""

    def __init__(self, change: str) -> None:
        super().__init__(CASE.seed + 2)
        if change == "more":
            self.model.more = torch.nn.Linear(2, 2).double()
        elif change == "fewer":
            del self.model.norm
            self.model.norm = torch.nn.Identity()
        elif change == "shape":
            self.model.head = torch.nn.Linear(self.model.head.in_features, 5).double()

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers()["optimizer"]]


class OtherOptimizer(AdamModule):
    """Has other groups, fewer parameters, or a second optimizer."""

    def __init__(self, change: str) -> None:
        super().__init__(CASE.seed + 2)
        self.change = change
        self.automatic_optimization = change != "second"

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        if self.change == "groups":
            return [torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.1}])]
        if self.change == "less":
            return [torch.optim.AdamW(others)]
        return [torch.optim.AdamW([first]), torch.optim.AdamW(others)]


CHANGES: dict[str, tuple[Any, str]] = {
    "more": (OtherModule, "model.more.weight"),
    "fewer": (OtherModule, "model.norm.weight"),
    "shape": (OtherModule, "model.head.weight"),
    "groups": (OtherOptimizer, "or in other groups, than when it was saved (saved or trained alone: none"),
    "less": (
        OtherOptimizer,
        "trains other parameters, or in other groups, than when it was saved (saved or trained alone:"
        " model.embedding.weight",
    ),
    "second": (OtherOptimizer, "it holds 1 optimizers, and this run has 2"),
}


def _load_into_others(options: dict[str, Any], folder: str) -> dict[str, tuple[str, bool]]:
    """For each change: the message, and whether the module is as it was; the last one of shards through a whole fit."""
    path = f"{folder}/other.ckpt"
    outcomes = {}
    save(options, path)
    for change, (kind, _) in CHANGES.items():
        load = fit_on if options == FORMS["shards"] and change in ("shape", "second") else fill
        outcomes[change] = attempt(options, path, kind(change), load)
    return outcomes


@pytest.mark.parametrize("form", forms("shards", "one_file_of_shards", "replicated"))
def test_checkpoint_of_another_run(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Names the checkpoint, the ranks, and what is missing, left over, of another shape or trained otherwise.

    Else moments and settings would be dropped silently, or missing in the first step.
    """
    for outcomes in pool2.run(_load_into_others, FORMS[form], str(tmp_path)):
        for change, (kind, told) in CHANGES.items():
            message, is_unchanged = outcomes[change]
            assert message.startswith(f"Cannot load {tmp_path}/other.ckpt: rank 0, rank 1: ")
            assert told in message
            if kind is OtherOptimizer:
                assert ": configure the optimizers that the run was saved with" in message
                assert is_unchanged


def _read_places(path: str) -> list[tuple[str, int]]:
    """The places that this rank reads as it resumes a fit with an average, in the order in which it does."""
    places: list[tuple[str, int]] = []
    read_data = ShardDirectory.read_data

    def counted(reader: ShardDirectory, plan: Any, planner: Any) -> Any:
        found = [reader._metadata.storage_data[item.storage_index] for item in plan.items]
        places.extend((place.relative_path, place.offset) for place in found)
        return read_data(reader, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardDirectory, "read_data", counted)
        fit({}, seed=CASE.seed + 2, callbacks=[EMAWeightAveraging()], ckpt_path=path, max_epochs=2)
    return places


def _save_average(path: str) -> int:
    trainer, _ = fit({}, callbacks=[EMAWeightAveraging()])
    trainer.save_checkpoint(path)
    return len(ShardDirectory(path, True)._metadata.storage_data)


def test_each_entry_is_read_once(pool2: RankPool, tmp_path: Path) -> None:
    """By a rank that needs a part of it: checking is no pass of its own, nor do callbacks and hooks add one."""
    path = str(tmp_path / "last.ckpt")
    (num_entries, _) = pool2.run(_save_average, path)
    of_ranks = pool2.run(_read_places, path)
    for places in of_ranks:
        assert len(set(places)) == len(places) > 0
    assert sum(map(len, of_ranks)) == num_entries


# --- Checkpoints that somebody else has written, or writes at this moment --------------------------------------------


pytestmark = pytest.mark.filterwarnings("ignore")


def assert_refused(path: Path, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """By each command, with status 1, one line that holds ``message``, and no file left; and by a load."""
    out = str(path.parent / "out")
    started = time.process_time()
    assert message in refused(capsys, str(path))
    commands = [["export", str(path), out, *CLASS]]
    if path.is_dir():
        commands.append(["consolidate", str(path), out])
        with pytest.raises(CheckpointError) as raised:
            load_any(str(path), None, None)
        assert message in str(raised.value)
    for command in commands:
        assert main(command) == 1
        printed = capsys.readouterr()
        assert message in printed.err.encode().decode("unicode_escape")
        assert (printed.err.count("\n"), printed.out) == (1, "")
    assert time.process_time() - started < len(commands) + 2, "a second each"
    assert not (path.parent / "out").exists()


def _with_manifest(**changed: Any) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        content = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps({**content, **changed}))

    return forge


def _text(content: str) -> Callable[[Path], None]:
    return lambda path: (path / MANIFEST).write_text(content)


def _instead(make: Callable[[Path], Any], name: str) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        (path / name).rename(path.parent / "secret")
        make(path / name)

    return forge


def _code(name: str) -> Callable[[Path], None]:
    """In a directory without checksums."""

    def forge(path: Path) -> None:
        (path / MANIFEST).unlink()
        with open(path / name, "wb") as file:
            write = pickle.dump if name == ".metadata" else torch.save
            write(Runs(path.parent / "mark"), file)

    return forge


def _rest(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path / "meta.pt")


DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{
        f"leads to {name}": (
            _with_manifest(folder=name),
            f"it refers to {name!r}, which is not the name of a file in the checkpoint",
        )
        for name in ("../secret", "/etc/hostname", "..", "a\\b")
    },
    **{
        # Reading a fifo or a device would never end.
        f"{kind} as {name}": (_instead(make, name), f"{name} is not a regular file")
        for kind, make in (
            ("fifo", os.mkfifo),
            ("device", lambda path: path.symlink_to("/dev/zero")),
            ("folder", Path.mkdir),
        )
        for name in ("__0_0.distcp", "meta.pt", ".metadata", MANIFEST)
    },
    **{
        f"manifest {content[:20]}": (_text(content), "a.ckpt: ")
        for content in ("[]", "{}", '{"crc32": 1}', "[" * 200_000)
    },
    **{
        f"version {number}": (
            _with_manifest(format=f"lightning_automodel checkpoint, version {number}"),
            f"manifest.json says 'lightning_automodel checkpoint, version {number}', and this version of"
            " lightning_automodel reads 'lightning_automodel checkpoint, version 3': let the version that wrote it"
            " make one file, which this one reads (python",
        )
        for number in (2, 4)
    },
    "code in .metadata": (_code(".metadata"), "posix.mkdir"),
    "code in meta.pt": (_code("meta.pt"), "posix.mkdir"),
    "list": (_rest([1]), "it has no 'state_dict'"),
    "no model": (_rest({"state_dict": 3}), "it has no 'state_dict'"),
}
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fifo": (os.mkfifo, "is not a regular file"),
    "list": (lambda path: torch.save([1], path), "it has no 'state_dict'"),
    "before torch 1.6": (
        lambda path: path.write_bytes(pickle.dumps(1) * 4),
        "not what torch.save has written since",
    ),
    "no pickle": (lambda path: path.write_bytes(b"hello"), "not what torch.save has written"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", DIRECTORIES)
def test_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """Forged or badly written: by the command line and by ``load_from_checkpoint``."""
    forge, message = DIRECTORIES[case]
    path = save_shards(tmp_path / "a.ckpt")
    forge(path)
    assert_refused(path, capsys, message)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(("name", "message"), [("model.weight", "Size mismatch"), ("other", "Missing key")])
def test_entries_of_another_save(tmp_path: Path, name: str, message: str) -> None:
    """Of another shape, or that no shards have: nothing is loaded."""
    path = save_shards(tmp_path / "a.ckpt")
    _rest({"state_dict": {name: torch.empty(2, device="meta")}})(path)
    with pytest.raises(CheckpointError, match=message):
        load_any(str(path))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", FILES)
def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    forge, message = FILES[case]
    forge(tmp_path / "a.ckpt")
    assert_refused(tmp_path / "a.ckpt", capsys, message)


def _replace_entry(path: Path, name: str, value: Any) -> None:
    """Let an entry of the shards be ``value``, with manifest and table as they should be."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
    file = path / place.relative_path
    place.offset = file.stat().st_size
    with open(file, "ab") as stream:
        torch.save(value, stream)
        place.length = stream.tell() - place.offset
    table = pickle.dumps(metadata)
    (path / ".metadata").write_bytes(table)
    _with_manifest(crc32=f"{zlib.crc32(table):08x}")(path)


@pytest.mark.parametrize("value", [Custom(), "text"])
def test_a_shard_that_holds_an_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    """In place of a tensor: no checksum tells, and reading it ends in one line."""
    path = save_shards(tmp_path / "a.ckpt")
    _replace_entry(path, "state_dict.model.weight", value)
    assert main(["export", str(path), str(tmp_path / "out"), *CLASS]) == 1
    error = capsys.readouterr().err
    assert (error.startswith("error: "), error.count("\n")) == (True, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("value", [torch.zeros(1, 4), torch.zeros(3, 4, dtype=torch.float64)])
def test_a_shard_of_another_shape(tmp_path: Path, value: torch.Tensor) -> None:
    """Would be broadcast, or cast, into the whole."""
    path = save_shards(tmp_path / "a.ckpt")
    _replace_entry(path, "state_dict.model.weight", value)
    with pytest.raises(CheckpointError, match=r"state_dict\.model\.weight in __0_0\.distcp"):
        load_any(path, None, None)


def test_replaced_after_it_was_opened(tmp_path: Path) -> None:
    """Old tensors are not mixed with new ones, and a reader of last.ckpt hears of that, and of no damage."""
    path = save_shards(tmp_path / "last.ckpt")
    shards = ShardDirectory(str(path), None)
    save_shards(path)
    for read in (shards.check, lambda: shards.read_all(shards.tree)):
        with pytest.raises(
            CheckpointError, match="another checkpoint took its place while it was read: load"
        ):
            read()


def test_terminal_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": MODEL, "epoch": "\x1b[2J\x9b1m\nform: x"}, tmp_path / "a.ckpt")
    assert main(["inspect", str(tmp_path / "a.ckpt")]) == 0
    assert '"\\u001b[2J\\u009b1m\\nform: x"' in capsys.readouterr().out
    forged = {"state_dict": {"\x1b]0;x\x07a.b": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}
    torch.save(forged, tmp_path / "b.ckpt")
    assert main(["export", str(tmp_path / "b.ckpt"), str(tmp_path / "out"), *CLASS]) == 1
    assert "\\x1b]0;x\\x07a." in capsys.readouterr().err
