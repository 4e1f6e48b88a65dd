"""Checkpoints elsewhere than in a local directory: whatever fsspec knows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from torch import Tensor

from lightning_automodel.checkpoint import CheckpointError, paths
from lightning_automodel.checkpoint.loading import load_any
from lightning_automodel.checkpoint.shard_directory import prepare_shards
from lightning_automodel.checkpoint.single_file import prepare_file, save_file
from tests.checkpoint.checkpoints import FORMS, are_equal, fit, load_only, resume, save, uninterrupted
from tests.checkpoint.test_damage import opened
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.runs import TOLERANCE


class Stand(DirFileSystem):
    """Stands for an object store that all ranks see: no local file system, and nothing is renamed in one step."""

    protocol = "stand"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(path=os.environ["STAND_ROOT"], fs=LocalFileSystem(), **kwargs)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("stand://").strip("/")

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.isdir(path1):
            raise NotImplementedError("an object store has no directories to rename")
        super().mv(path1, path2, **kwargs)


@contextlib.contextmanager
def stand(root: str) -> Iterator[None]:
    fsspec.register_implementation("stand", Stand, clobber=True)
    os.environ["STAND_ROOT"] = root
    try:
        yield
    finally:
        del os.environ["STAND_ROOT"]
        Stand.clear_instance_cache()


def _go_on_from_a_stand(options: dict[str, Any], root: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with stand(root):
        save(options, "stand://runs/last.ckpt")
        save(options, "stand://runs/last.ckpt", max_epochs=1)
        return resume(options, "stand://runs/last.ckpt"), uninterrupted(options)


@pytest.mark.parametrize("form", ["shards", "replicated"])
def test_object_store(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Saved twice in the same place, resumed, and nothing is left of the first save."""
    for resumed, through in pool2.run(_go_on_from_a_stand, FORMS[form], str(tmp_path)):
        assert weight_error(resumed, through) <= TOLERANCE
    path = tmp_path / "runs" / "last.ckpt"
    assert path.is_dir() == (form == "shards")
    if form == "shards":
        names = [each.name for each in path.iterdir()]
        assert sum(name.startswith(paths.TEMPORARY) for name in names) == 1


def _fail_to_replace(root: str) -> tuple[str, bool]:
    with stand(root):
        trainer, module = fit({})
        trainer.save_checkpoint("stand://runs/last.ckpt")
        saved = full_weights(module.model)
        fit({}, module)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr("lightning_automodel.checkpoint.shard_directory.ShardWriter.write_data", _fail)
            patch.setattr(Stand, "rm", _fail)  # what cleaning up meets must not hide the cause
            with pytest.raises(CheckpointError) as raised:
                trainer.save_checkpoint("stand://runs/last.ckpt")
        loaded = load_only({}, "stand://runs/last.ckpt")
        return str(raised.value), are_equal(loaded, saved)


def _fail(*_: Any) -> None:
    raise OSError(5, "the store is gone")


def test_failure_leaves_the_older_one(pool2: RankPool, tmp_path: Path) -> None:
    """The manifest is replaced last, so that what it names is valid until then."""
    for message, is_intact in pool2.run(_fail_to_replace, str(tmp_path)):
        assert "rank 1: OSError: [Errno 5] the store is gone" in message
        assert is_intact


class ObjectStore(MemoryFileSystem):
    """Knows names alone: one can be an object and the beginning of others at once."""

    protocol = "objects"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{str(path).removeprefix('objects://').strip('/')}".rstrip("/")

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self.store[self._strip_protocol(path)] = MemoryFile(self, path, value)

    def isdir(self, path: str) -> bool:
        return any(name.startswith(f"{self._strip_protocol(path)}/") for name in self.store)


@pytest.mark.parametrize("place", ["objects://runs/last.ckpt", "objects://last.ckpt"])
def test_a_file_after_a_directory(place: str) -> None:
    """An object store can hold both at one place, and the directory would be loaded: refused, also at its root."""
    ObjectStore.store.clear()
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
    weight = torch.zeros(3)
    prepare_shards({"state_dict": {"weight": weight}, "epoch": 0}, place)(None)
    with pytest.raises(CheckpointError, match=f"{place} is a directory: remove it, or choose another path"):
        prepare_file({"state_dict": {"weight": weight + 1}, "epoch": 1}, place, save_file)(None)
    assert torch.equal(load_any(place, None, None)["state_dict"]["weight"], weight)
    assert not Path("objects:").exists()


def _load_where_one_rank_sees_nothing(path: str, blind: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == blind:
            patch.setattr("lightning_automodel.checkpoint.paths.is_directory", lambda _: False)
        return opened({}, path)


@pytest.mark.parametrize("blind", [0, 1])
def test_ranks_that_see_different_file_systems(pool2: RankPool, tmp_path: Path, blind: int) -> None:
    """A disk of one machine: an error on every rank, before they go different ways."""
    for message in pool2.run(_load_where_one_rank_sees_nothing, str(tmp_path), blind):
        assert f"rank {blind}: {tmp_path.name} is not a regular file" in message


def _save_apart(options: dict[str, Any], path: str, root: str) -> tuple[str, list[str], bool]:
    """Save where each rank has a place of its own; the message, what is left, and whether another save works."""
    own = Path(root) / str(dist.get_rank())
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch, stand(str(own)):
        patch.chdir(own)  # what /proc/self/cwd leads to is another directory in each process
        MemoryFileSystem.store.clear()
        trainer, module = fit(options)
        if dist.get_rank() == 0:
            (own / "older.ckpt").write_text("")
        with pytest.raises(CheckpointError) as raised:
            trainer.save_checkpoint(path)
        left = [str(each.relative_to(own)) for each in own.rglob("*")] + list(MemoryFileSystem.store)
        trainer.save_checkpoint(f"{root}/last.ckpt")
        saved = full_weights(module.model)
        loaded = load_only(options, f"{root}/last.ckpt")
    return str(raised.value), left, are_equal(loaded, saved)


@pytest.mark.each_value
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "place", ["/proc/self/cwd/last.ckpt", "memory://last.ckpt", "stand://runs/last.ckpt"]
)
def test_a_place_of_each_rank(pool2: RankPool, tmp_path: Path, place: str, in_background: bool) -> None:
    """A disk of one node, the memory of one process: an error on every rank at the save, and nothing is left there."""
    options = {"async_checkpoint": in_background}
    for rank, (message, left, goes_on) in enumerate(pool2.run(_save_apart, options, place, str(tmp_path))):
        assert message.startswith(
            f"Cannot save {place}: rank 0: rank 0 does not see all that the ranks have written ("
        )
        assert "__1_0.distcp" in message
        assert "pass save_distributed_checkpoint=False" in message
        # A store's names are no directories, which stay where they are.
        left = [name for name in left if not name.startswith("runs")]
        assert left == (["older.ckpt"] if rank == 0 else [])
        assert goes_on
