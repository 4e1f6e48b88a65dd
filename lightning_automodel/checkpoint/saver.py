"""Saving: at once or in the background, one save at a time, and what is done when it has succeeded."""

import concurrent.futures
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch.distributed.checkpoint.staging import DefaultStager

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.atomic import clear_leftovers
from lightning_automodel.checkpoint.errors import on_every_rank, translated
from lightning_automodel.checkpoint.safe_load import warn_about_code
from lightning_automodel.checkpoint.sharded import SaveTarget, ShardWriter
from lightning_automodel.checkpoint.staging import copied, make_stager, stageable
from lightning_automodel.checkpoint.state_dict import EXTRA_STATE, MODEL, optimizer_key, split_shards
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank, group_size


@dataclass
class _PendingSave:
    """A save, with a ``future`` where it is in the background and a ``target`` where it is of shards."""

    what: str
    future: Future[Any] | None
    target: SaveTarget | None


class CheckpointSaver:
    """Writes checkpoints of one run, whose model is on ``device``. Methods are collectives unless they say else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: _PendingSave | None = None
        self._of_rank_zero: str | None = None
        self._links: list[Callable[[], None]] = []
        self._removals: list[Callable[[], None]] = []
        self._stager: DefaultStager | None = None
        self._thread: ThreadPoolExecutor | None = None

    def save_shards(self, checkpoint: dict[str, Any], path: str, group: dist.ProcessGroup | None) -> None:
        """Write ``checkpoint`` as a directory: shards of model and optimizers by every rank, the rest by rank 0.

        ``checkpoint`` is as Lightning makes it, with shards in place of tensors, and is taken apart. Given a gloo
        ``group`` of all ranks, it returns when the state was copied to host memory, and writes in the background. If
        this save, or the one before it, failed on any rank, all raise :class:`CheckpointError`.
        """
        # One save at a time: copies of two would be in host memory at once, and the later one could be overtaken.
        self.wait()
        what = f"Cannot save {path}"
        shards, rest = _take_shards(checkpoint)
        target, content = None, io.BytesIO()
        with on_every_rank(what):
            if group_rank() == 0:
                target = SaveTarget.choose(path)
                torch.save(rest, content)
                warn_about_code(content)
                prepare_target(path)
        # The folder's name is random, and all ranks write into it.
        target = collectives.broadcast_object(target, 0)
        writer = ShardWriter(target, content.getvalue(), group_size())
        self._pending = _PendingSave(what, None, target)
        if group is None:
            with translated(what), self._discarding_on_error():
                dcp.save(shards, storage_writer=writer)
            self.wait()
            return
        with self._discarding_on_error():
            self._pending.future = dcp.async_save(  # type: ignore[assignment]  # the stager is no asynchronous one
                stageable(shards), storage_writer=writer, process_group=group, async_stager=self._require_stager()
            )

    def save_file(
        self, checkpoint: dict[str, Any], path: str, write: Callable[[dict[str, Any], str], None], in_background: bool
    ) -> None:
        """Let rank 0 ``write`` a file; ``in_background`` returns as soon as the state was copied to host memory."""
        self.wait()
        what = f"Cannot save {path}"
        future = None
        with on_every_rank(what):
            if group_rank() == 0:
                prepare_target(path)
                if in_background:
                    self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
                    future = self._thread.submit(write, self._staged(checkpoint), path)
                else:
                    write(checkpoint, path)
        if in_background:
            # Only rank 0 has something pending; the others ask it how that went when they next wait.
            self._of_rank_zero = what
            self._pending = None if future is None else _PendingSave(what, future, None)

    def link_afterwards(self, link: Callable[[], None]) -> None:
        """Let rank 0 call ``link`` once the saves so far have succeeded, at the next step. Not a collective."""
        self._links.append(link)

    def remove_afterwards(self, remove: Callable[[], None]) -> None:
        """Let rank 0 call ``remove`` once the saves so far have succeeded, at the next step. Not a collective.

        Until the new checkpoint is on disk, and links lead to it, the old one is the newest.
        """
        self._removals.append(remove)

    def check(self) -> None:
        """Raise the error of a save in the background, if there is one by now. Not a collective; cheap."""
        if self._pending is None:
            self._link_and_remove()
        elif self._pending.future is not None and self._pending.future.done():
            with self._translated():
                self._finish_pending()

    def wait(self) -> None:
        """Wait until no save is pending; raises CheckpointError if it failed."""
        # Rank 0 may know already, from `check`, how the file that it alone writes came out; the others do not.
        of_rank_zero, self._of_rank_zero = self._of_rank_zero, None
        with self._translated() if of_rank_zero is None else on_every_rank(of_rank_zero):
            self._finish_pending()

    def wait_for_pending(self, seconds: float) -> None:
        """Give a pending save some time to end, whatever comes of it. Not a collective."""
        if self._pending is not None and self._pending.future is not None:
            concurrent.futures.wait([self._pending.future], seconds)

    def close(self, together: bool) -> None:
        """Wait until no save is pending, and free memory and threads. A collective if ranks come here ``together``."""
        try:
            if together:
                self.wait()
            elif self._pending is not None:
                with self._translated():
                    self._finish_pending()
        finally:
            if self._stager is not None:
                self._stager.close()
            if self._thread is not None:
                self._thread.shutdown()
            self._stager = self._thread = None

    def _finish_pending(self) -> None:
        """Wait for the pending save, if there is one; then do what was to be done afterwards."""
        if self._pending is not None:
            with self._discarding_on_error():
                if self._pending.future is not None:
                    self._pending.future.result()
            self._pending = None
        self._link_and_remove()

    def _translated(self) -> AbstractContextManager[None]:
        return nullcontext() if self._pending is None else translated(self._pending.what)

    @contextmanager
    def _discarding_on_error(self) -> Iterator[None]:
        """If the pending save fails inside, remove what was written of it, and keep what it would have replaced."""
        target = self._pending.target if self._pending is not None else None
        try:
            yield
        except BaseException:
            self._pending = None
            self._links.clear()
            self._removals.clear()
            if target is not None and group_rank() == 0:
                paths.discard(target.folder)
            raise

    def _link_and_remove(self) -> None:
        # Links first: one that still leads to a checkpoint that goes would dangle for a moment.
        actions, self._links, self._removals = [*self._links, *self._removals], [], []
        if group_rank() == 0:
            for action in actions:
                action()

    def _staged(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        states = {key: value for key, value in checkpoint.items() if key in (MODEL, "optimizer_states")}
        rest = {key: value for key, value in checkpoint.items() if key not in states}
        return {**copied(rest), **self._require_stager().stage(stageable(states))}  # type: ignore[dict-item]

    def _require_stager(self) -> DefaultStager:
        self._stager = self._stager or make_stager(self._device)
        return self._stager


def _take_shards(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shards by where they belong, and the rest of ``checkpoint``, which loses the states of model and optimizers."""
    shards: dict[str, Any] = {MODEL: checkpoint.pop(MODEL)}
    for index, state in enumerate(filter(None, checkpoint.pop("optimizer_states", []))):
        shards[optimizer_key(index)] = state
    rest, others = split_shards(checkpoint, shards[MODEL].keys())
    if objects := {name: value for name, value in shards[MODEL].items() if not isinstance(value, torch.Tensor)}:
        rest[EXTRA_STATE] = objects
    return {**shards, **others}, rest


def prepare_target(path: str) -> None:
    """Make the directory that ``path`` is to be in, and clear it of what crashed saves have left there."""
    paths.refuse_to_replace(path)
    filesystem, parent = url_to_fs(paths.parent(path))
    filesystem.makedirs(parent, exist_ok=True)
    if paths.is_local(path):
        clear_leftovers(Path(parent))
