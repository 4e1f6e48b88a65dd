"""Saving: at once or in the background, one save at a time, and removing what newer checkpoints have replaced."""

import concurrent.futures
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.atomic import clear_leftovers
from lightning_automodel.checkpoint.errors import on_every_rank, translated
from lightning_automodel.checkpoint.safe_load import warn_about_code
from lightning_automodel.checkpoint.sharded import SavePlace, ShardWriter
from lightning_automodel.checkpoint.staging import Stager, copied
from lightning_automodel.checkpoint.state_dict import EXTRA_STATE, MODEL, optimizer_key, split_shards
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank as get_rank_safe
from lightning_automodel.distributed.process_group import group_size as get_world_size_safe


@dataclass
class _InFlight:
    """A save; there is a ``future`` where it is in the background, and a ``place`` where it is of shards."""

    what: str
    future: Future[Any] | None
    place: SavePlace | None


class CheckpointSaver:
    """Writes checkpoints of one run. All methods must be called by every rank, unless they say otherwise.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_flight: _InFlight | None = None
        self._of_rank_zero: str | None = None
        self._links: list[Callable[[], None]] = []
        self._removals: list[Callable[[], None]] = []
        self._stager: Stager | None = None
        self._thread: ThreadPoolExecutor | None = None

    def save_shards(self, checkpoint: dict[str, Any], path: str, group: dist.ProcessGroup | None) -> None:
        """Write ``checkpoint`` as a directory: shards of model and optimizers by every rank, the rest by rank 0.

        A collective over the default group. The directory appears, or takes the place of an older one, in one step when
        all of it is on disk and was read back.

        Args:
            checkpoint: As Lightning makes it, with shards in place of tensors; taken apart.
            path: The directory; the same on every rank.
            group: A gloo group of all ranks to write in the background, after the state was copied to host memory.
                None: return when it is published.

        Raises:
            CheckpointError: If it, or the save before it, failed on any rank; older checkpoints are as they were.
        """
        self.wait()
        what = f"Cannot save {path}"
        shards, rest = _take_shards(checkpoint)
        place, content = None, b""
        with on_every_rank(what):
            if get_rank_safe() == 0:
                place, content = SavePlace.choose(path), _serialised(rest)
                prepare_place(path)
        place = collectives.broadcast_object(place, 0)
        writer = ShardWriter(place, content, get_world_size_safe())
        self._in_flight = _InFlight(what, None, place)
        if group is None:
            with translated(what), self._discarding():
                dcp.save(shards, storage_writer=writer)
            self.wait()
            return
        with self._discarding():
            self._in_flight.future = dcp.async_save(  # type: ignore[assignment]  # the stager is no asynchronous one
                shards, storage_writer=writer, process_group=group, async_stager=self._require_stager()
            )

    def save_file(
        self, checkpoint: dict[str, Any], path: str, write: Callable[[dict[str, Any], str], None], in_background: bool
    ) -> None:
        """Write ``checkpoint`` as one file, by rank 0. A collective over the default group.

        Args:
            checkpoint: As Lightning makes it; used on rank 0.
            path: The file.
            write: What writes it.
            in_background: Return as soon as the state was copied to host memory.

        Raises:
            CheckpointError: If it, or the save before it, failed; older checkpoints are as they were.
        """
        self.wait()
        is_first = get_rank_safe() == 0
        what = f"Cannot save {path}"
        future = None
        with on_every_rank(what):
            if is_first:
                prepare_place(path)
                if in_background:
                    future = self._require_thread().submit(write, self._staged(checkpoint), path)
                else:
                    write(checkpoint, path)
        if in_background:
            self._of_rank_zero = what
            self._in_flight = None if future is None else _InFlight(what, future, None)

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
        if self._in_flight is None:
            self._catch_up()
        elif self._in_flight.future is not None and self._in_flight.future.done():
            with translated(self._in_flight.what):
                self._settle()

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            CheckpointError: If it failed.
        """
        # Rank 0 may know already, from `check`, how the file that it alone writes came out; the others do not.
        of_rank_zero, self._of_rank_zero = self._of_rank_zero, None
        if of_rank_zero is not None:
            with on_every_rank(of_rank_zero):
                self._settle()
        elif self._in_flight is not None:
            with translated(self._in_flight.what):
                self._settle()
        else:
            self._catch_up()

    def linger(self, seconds: float) -> None:
        """Give a save in flight some time to end, whatever comes of it. Not a collective."""
        if self._in_flight is not None and self._in_flight.future is not None:
            concurrent.futures.wait([self._in_flight.future], seconds)

    def close(self, together: bool) -> None:
        """Wait until no save is in flight, and give memory and threads back.

        Args:
            together: Whether every rank comes here; otherwise it is no collective.

        Raises:
            CheckpointError: If a save failed.
        """
        try:
            if together:
                self.wait()
            elif self._in_flight is not None:
                with translated(self._in_flight.what):
                    self._settle()
        finally:
            if self._stager is not None:
                self._stager.close()
            if self._thread is not None:
                self._thread.shutdown()
            self._stager = self._thread = None

    def _settle(self) -> None:
        future = self._in_flight.future if self._in_flight is not None else None
        with self._discarding():
            if future is not None:
                future.result()
        self._in_flight = None
        self._catch_up()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """If the save in flight fails inside, remove what was written of it, and keep what it would have replaced."""
        place = self._in_flight.place if self._in_flight is not None else None
        try:
            yield
        except BaseException:
            self._in_flight = None
            self._links.clear()
            self._removals.clear()
            if place is not None and get_rank_safe() == 0:
                paths.discard(place.folder)
            raise

    def _catch_up(self) -> None:
        actions, self._links, self._removals = [*self._links, *self._removals], [], []
        for action in actions if get_rank_safe() == 0 else []:
            action()

    def _staged(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        states = {key: value for key, value in checkpoint.items() if key in (MODEL, "optimizer_states")}
        rest = {key: value for key, value in checkpoint.items() if key not in states}
        return {**copied(rest), **self._require_stager().stage(states)}

    def _require_stager(self) -> Stager:
        if self._stager is None:
            self._stager = Stager(self._device)
        return self._stager

    def _require_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        return self._thread


def _take_shards(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shards by where they belong, and the rest of ``checkpoint``, which loses the states of model and optimizers."""
    shards: dict[str, Any] = {MODEL: checkpoint.pop(MODEL)}
    for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
        shards[optimizer_key(index)] = state
    rest, others = split_shards(checkpoint, shards[MODEL].keys())
    if objects := {name: value for name, value in shards[MODEL].items() if not isinstance(value, torch.Tensor)}:
        rest[EXTRA_STATE] = objects
    return {**shards, **others}, rest


def _serialised(rest: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(rest, stream)
    warn_about_code(stream)
    return stream.getvalue()


def prepare_place(path: str) -> None:
    """Make the directory that ``path`` is to be in, and clear it of what crashed saves have left there.

    Raises:
        CheckpointError: If something else than a checkpoint would be replaced.
    """
    paths.refuse_to_replace(path)
    filesystem, parent = url_to_fs(paths.parent(path))
    filesystem.makedirs(parent, exist_ok=True)
    if paths.is_local(path):
        clear_leftovers(Path(parent))
