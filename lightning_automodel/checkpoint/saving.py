"""Saves the checkpoints of one run, now or in the background: the steps of the strategy's ``save_checkpoint``."""

import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_automodel.checkpoint import paths, single_file
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.optimizers import NamedOptimizer
from lightning_automodel.checkpoint.shard_directory import is_of_all_ranks, prepare_shards
from lightning_automodel.checkpoint.tree import check_pickled, leaves, model_state, whole
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank, group_size
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding.units import is_sharded

log = logging.getLogger(__name__)

PENDING_SAVE_LIMIT_S = 60.0


@dataclass
class _Save:
    """A save after which training goes on: what waits for it runs in the next step, once it is on disk.

    Attributes:
        path: Where the checkpoint lies.
        writing: Done when the checkpoint is on disk.
        actions: What rank 0 does then: it links to it, then removes older ones.
    """

    path: str
    writing: Future[None]
    actions: list[Callable[[], None]] = field(default_factory=list)


class CheckpointSaver:
    """Saves the checkpoints of one strategy. Its methods are collectives unless they say otherwise.

    Lightning asks for :meth:`model_state` and :meth:`optimizer_state`, lets hooks edit its checkpoint, and
    calls :meth:`save`, which

    1. agrees on rank 0's path,
    2. waits for the save before,
    3. completes the checkpoint in the run's form, and makes a place for it,
    4. writes it, at once or in the background.

    While training goes on, ``_unfinished`` is the newest save, until ``finish``. Links to it, and removals of older
    checkpoints, wait until it is on disk; else they run at once. After a save that was given up (``_keeps_older``) they
    are dropped: nothing takes the place of older checkpoints.

    The ``options`` are the strategy's.

    Attributes:
        is_sharded: Whether the model is sharded.
        as_directory: Whether checkpoints are directories of shards, or single files.
    """

    def __init__(self, options: StrategyOptions) -> None:
        self.is_sharded = options.is_sharded
        self._chosen = options.save_distributed_checkpoint
        self.as_directory = bool(self._chosen)
        self._in_background = options.async_checkpoint
        self._timeout = options.parsed_timeout
        self._plugin: CheckpointIO | None = None  # of the Trainer, if that is not Lightning's default
        # The tensors that Lightning has got, by id. A hook may have put others in their place since.
        self._given: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._unfinished: _Save | None = None
        self._keeps_older = False

    def choose_form(self, io: CheckpointIO, world_size: int) -> None:
        """Choose the form, for a run of ``world_size`` ranks whose files the Trainer's plugin ``io`` writes.

        ValueError if the user asked for directories, on which a plugin has no effect. Not a collective.
        """
        self._plugin = None if type(io) is TorchCheckpointIO else io
        if self._chosen is None:
            # A single rank has no use for a directory, and any program can read one file.
            self.as_directory = self.is_sharded and world_size > 1 and self._plugin is None
        elif self._chosen and self._plugin is not None:
            raise ValueError(
                "save_distributed_checkpoint=True writes directories of shards, on which"
                f" {type(io).__name__} would have no effect: leave the plugin out, or pass"
                " save_distributed_checkpoint=False, with which it writes one file."
            )

    def patch_callbacks(self, trainer: "pl.Trainer", patches: PatchStack) -> None:
        """Make each ``ModelCheckpoint`` of ``trainer`` wait for saves in the background. Not a collective."""
        lightning_internals.patch_model_checkpoints(patches, trainer, self._link, self._is_unfinished)

    def _is_unfinished(self, path: str) -> bool:
        return self._unfinished is not None and self._unfinished.path == paths.normalize(path)

    # --- States, for Lightning's checkpoint -------------------------------------------------------

    def model_state(self, module: "pl.LightningModule") -> dict[str, Any]:
        """The state of ``module`` by parameter name, with shards. Not a collective."""
        return self._note(model_state(module))

    def optimizer_state(self, named: NamedOptimizer, is_together: bool) -> dict[str, Any]:
        """Like :meth:`model_state`, of an optimizer. A collective of a sharded model's ranks that are together.

        After a failure they are not ``is_together``; saving finds out whether the other ranks still come.
        """
        if not self.is_sharded or not is_together or group_size() == 1:
            return self._note(named.state())
        collectives.named_barrier("save_checkpoint", self._timeout)
        group = collectives.host_group(self._timeout)
        return self._note(named.state_to_save(group, for_one_file=not self.as_directory))

    def _note(self, state: dict[str, Any]) -> dict[str, Any]:
        """Note which tensors Lightning gets. Not a collective."""
        self._given.update((id(leaf), leaf) for *_, leaf in leaves(state) if isinstance(leaf, Tensor))
        return state

    # --- One save ---------------------------------------------------------------------------------

    def save(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        path: str | Path,
        storage_options: Any | None,
        goes_on: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Save ``checkpoint`` at rank 0's ``path``, where it appears in one step or not at all.

        If training ``goes_on``, links and removals wait for its next step, and the state may be copied and
        written in the background: an error then rises in :meth:`poll`, or in the next save. ``group`` exchanges
        objects of all ranks on their hosts: in one of accelerators they would wait for queued work. None in a
        process without groups.

        Raises:
            CheckpointError: On every rank, if one cannot save; older checkpoints are unchanged.
            TypeError: If ``storage_options`` would have no effect.
        """
        self._keeps_older = False
        # Ranks may disagree: it may hold a time, or a version that is free.
        target = paths.normalize(collectives.broadcast_object(path, 0))
        if storage_options is not None and self._plugin is None:
            raise TypeError(
                f"storage_options ({storage_options!r}) would have no effect: configure fsspec"
                " (fsspec.config.conf), or save one file with save_distributed_checkpoint=False and a"
                " CheckpointIO that takes them."
            )
        self.finish()
        in_background = self._in_background and goes_on
        if self.is_sharded:
            with on_every_rank(f"Cannot save {target}"):
                _leave_out_shards(checkpoint, module)
                if group_rank() == 0:
                    check_pickled(checkpoint)
        if self.is_sharded or self.as_directory:
            self._check_edits(checkpoint, target, group)
        if self.as_directory:
            write = prepare_shards(checkpoint, target, in_background)
        else:
            if self.is_sharded:
                checkpoint = whole(checkpoint, keep=group_rank() == 0)
            save_file = self._file_saver(storage_options)
            write = single_file.prepare_file(checkpoint, target, save_file, in_background)
        if in_background:
            if group is not None:
                # Collectives of two threads must not mix in one group.
                group = collectives.background_group(self._timeout)
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            writing = executor.submit(_write_beside_training, module.device, write, group)
            executor.shutdown(wait=False)  # its thread ends with this save
        else:
            write(group)
            writing = Future()
            writing.set_result(None)
        if goes_on:
            self._unfinished = _Save(target, writing)

    def finish(self) -> None:
        """Wait for the pending save, or raise its CheckpointError; then run deferred links and removals.

        Not a collective: if rank 0 fails to link or to remove, the others learn of it as of any failure. One
        save at a time: two would need host memory for two copies, and could finish in the wrong order.
        """
        unfinished = self._unfinished
        self._unfinished = None
        if unfinished is not None:
            unfinished.writing.result()  # if it raises, the older checkpoint stays the newest
            for action in unfinished.actions:
                _link_or_remove(action)

    def _check_edits(self, checkpoint: dict[str, Any], target: str, group: dist.ProcessGroup | None) -> None:
        """Raise CheckpointError on every rank if a hook has edited on some ranks alone what each writes a part of.

        The checkpoint would be edited in part, and ranks might wait for others in a gather. A collective.
        """
        if group is None:
            return
        found: dict[str, str] = {}
        for key, path, leaf in leaves(checkpoint):
            if is_of_all_ranks(path, leaf):
                origin = "the run's" if self._given.get(id(leaf)) is leaf else "a hook's"
                found[key] = f"{origin} ({leaf.dtype} of shape {list(leaf.shape)})"
        if difference := collectives.disagreement(found, group):
            raise CheckpointError(
                f"Cannot save {target}: {difference}: each rank writes its part, so on_save_checkpoint must"
                " edit it on all ranks, not on rank 0 alone"
            )

    # --- Beside saving ----------------------------------------------------------------------------

    def _file_saver(self, storage_options: Any | None) -> Callable[[dict[str, Any], str], None]:
        """The function that writes a file: this package's, or that of the Trainer's plugin if it has one."""
        if self._plugin is None:
            return single_file.save_file
        return partial(self._plugin.save_checkpoint, storage_options=storage_options)

    def save_alone(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Save a replicated model on rank 0 after a failure, when ranks no longer act together. Not a collective.

        That of a sharded model is refused.
        """
        if self.is_sharded or self.as_directory:
            self.refuse(
                path, "all ranks save shards together, which they cannot after a failure. Save regularly"
            )
        elif group_rank() == 0:
            target = paths.normalize(path)
            paths.prepare_place(target)
            self._file_saver(None)(checkpoint, target)

    def refuse(self, path: str | Path, why: str) -> None:
        """Say why this process saves nothing. Not a collective.

        RuntimeError, or an error in the log while an exception is handled, which another one would hide.
        """
        text = f"No checkpoint was written at {path}: {why}."
        if sys.exc_info()[1] is None:
            raise RuntimeError(text)
        self._keeps_older = True
        log.error(text)

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint on rank 0, once the one that replaces it is on disk. Not a collective."""
        remove = paths.remove if self._plugin is None else self._plugin.remove_checkpoint
        self._once_on_disk(partial(remove, paths.normalize(path)), is_link=False)

    def _link(self, path: str, link: str) -> None:
        """Point ``link`` to the checkpoint at ``path`` on rank 0, once that is on disk. Not a collective."""
        # Before removals: until the links point to the new checkpoint, they need the old one.
        self._once_on_disk(partial(paths.link, Path(path), Path(link)), is_link=True)

    def _once_on_disk(self, action: Callable[[], None], is_link: bool) -> None:
        """Run ``action`` on rank 0 once the newest save is on disk, links before removals. Not a collective."""
        if self._keeps_older or group_rank() != 0:
            return
        if self._unfinished is None:
            _link_or_remove(action)
            return
        waiting = self._unfinished.actions
        waiting.insert(0 if is_link else len(waiting), action)

    def poll(self) -> None:
        """End a save in the background that is done by now, or raise its error, by :meth:`finish`."""
        if self._unfinished is not None and self._unfinished.writing.done():
            self.finish()

    def close(self, was_interrupted: bool) -> None:
        """Wait until the last save is on disk. Raises its error, or logs it if the run ``was_interrupted``.

        Not a collective of this thread: a save in the background is one, in its own.
        """
        try:
            self.finish()
        except Exception as error:
            if not was_interrupted:
                raise
            log.error("%s", error)

    def wait_for_pending_save(self) -> None:
        """Wait, with a limit, for a pending save before reporting a failure: it needs the other ranks.

        Not a collective of this thread, as :meth:`close`.
        """
        if self._unfinished is not None:
            wait([self._unfinished.writing], PENDING_SAVE_LIMIT_S)


def _link_or_remove(action: Callable[[], None]) -> None:
    with on_this_rank("Cannot remove an older checkpoint, or link to the new one"):
        action()


def _leave_out_shards(checkpoint: dict[str, Any], module: "pl.LightningModule") -> None:
    """Leave out hyper-parameters that are parts of the sharded model, which the checkpoint holds. Not a collective."""
    key = module.CHECKPOINT_HYPER_PARAMS_KEY
    saved = checkpoint.get(key, {})
    parts = [
        name
        for name, value in saved.items()
        if any(isinstance(leaf, nn.Module) and is_sharded(leaf) for *_, leaf in leaves(value))
    ]
    if parts:
        checkpoint[key] = {name: value for name, value in saved.items() if name not in parts}
        rank_zero_warn(
            f"The hyper-parameters {', '.join(parts)} are parts of the model, which is sharded: checkpoints leave"
            " them out, and hold the model alone. Pass them to load_from_checkpoint(path,"
            f" {', '.join(f'{name}={name}' for name in parts)}). Without this note:"
            f" self.save_hyperparameters(ignore={parts})."
        )


def _write_beside_training(
    device: torch.device, write: single_file.Write, group: dist.ProcessGroup | None
) -> None:
    """Write, in a background thread, with this rank's ``device`` current and on a separate stream.

    A new thread's current device is the first one, and its stream is the one that training uses. While torch
    writes, it keeps synchronising the current stream.
    """
    if device.type == "cpu":
        write(group)
        return
    torch.accelerator.set_device_index(device)
    with torch.Stream(device):
        write(group)
