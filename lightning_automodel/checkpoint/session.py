"""The checkpoints of one run, for the strategy's hooks that save and load."""

import concurrent.futures
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch.optim import Optimizer

from lightning_automodel.checkpoint import paths, single_file, state_dict
from lightning_automodel.checkpoint.edited import EditedDirectory, lazy_model, lazy_optimizers
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.optimizers import parameter_names
from lightning_automodel.checkpoint.sharded import ShardDirectory, is_shard_directory, prepare_shards
from lightning_automodel.checkpoint.single_file import WholeCheckpoint, fill_module, load_file, prepare_file
from lightning_automodel.checkpoint.whole_modules import with_whole_modules
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import without_wrappers
from lightning_automodel.sharding import weight_averaging

log = logging.getLogger(__name__)

PENDING_SAVE_LIMIT_S = 60.0

_STATES = (state_dict.MODEL, state_dict.OPTIMIZERS)

DIRECTORY_NOTE = (
    "is a directory of shards, as the next checkpoints: ckpt_path= and load_from_checkpoint read it, not"
    " torch.load. Where a library calls torch.load(best_model_path), pass"
    " AutomodelStrategy(save_distributed_checkpoint=False); 'python -m lightning_automodel.checkpoint"
    " consolidate' makes one file of a directory."
)


class RunCheckpoints:
    """Saves and loads the checkpoints of one strategy. Its methods are collectives unless they say otherwise.

    A save, and then the links to it and the removals that wait for it, have these states:

    =====================  ============  =============================================
    state                  ``_pending``  links and removals run
    =====================  ============  =============================================
    no training goes on    None          at once (``_defers`` is False)
    saved, training on     None          in the next ``check``, ``save`` or ``close``
    being written          a future      there too, once it is written
    =====================  ============  =============================================

    ``save`` and ``close`` choose the state, ``_finish`` ends a save.

    Args:
        is_sharded: Whether the model is sharded.
        as_directory: Whether to write a directory of shards, or one file; None lets :meth:`choose_form`
            decide.
        in_background: Whether to write while training goes on.
        timeout: Timeout of the group that writes in the background.
    """

    def __init__(
        self, is_sharded: bool, as_directory: bool | None, in_background: bool, timeout: timedelta
    ) -> None:
        self.is_sharded = is_sharded
        self.in_background = in_background
        self._chosen_form = as_directory
        if as_directory is None:
            self.as_directory = is_sharded
        else:
            self.as_directory = as_directory
        self._timeout = timeout
        self._opened: ShardDirectory | None = None
        self._loaded: dict[str, Any] = {}
        self._holds_optimizers = False
        self._path = ""
        self._pending: Future[None] | None = None
        self._pending_path = ""
        self._defers = False
        self._deferred: list[Callable[[], None]] = []
        self._group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def names_parameters(self) -> bool:
        """Whether states are saved by parameter name; a replicated model's file holds plain state dicts."""
        return self.is_sharded or self.as_directory

    def choose_form(self, io: CheckpointIO, world_size: int) -> str | None:
        """Decide, for a run of ``world_size`` ranks, whether checkpoints are directories. Not a collective.

        Returns:
            A note for the user if the choice is not the usual one.

        Raises:
            ValueError: If the user asked for directories, on which ``io``, the Trainer's plugin, has no
                effect.
        """
        is_plugin = type(io) is not TorchCheckpointIO
        if self._chosen_form is None:
            # A single rank has no use for a directory, and any program can read one file.
            has_shares = self.is_sharded and world_size > 1
            self.as_directory = has_shares and not is_plugin
            if is_plugin and has_shares:
                return (
                    f"{type(io).__name__} writes the checkpoints, one file each, for which rank 0 needs host"
                    " memory for the whole state: for directories of shards, which need no more than a"
                    " rank's share, leave the plugin out."
                )
        elif self._chosen_form and is_plugin:
            raise ValueError(
                "save_distributed_checkpoint=True writes directories of shards, on which"
                f" {type(io).__name__} would have no effect: leave the plugin out, or pass"
                " save_distributed_checkpoint=False, with which it writes one file."
            )
        return None

    def patch_callbacks(self, trainer: "pl.Trainer", patches: PatchStack) -> None:
        """Make each ``ModelCheckpoint`` of ``trainer`` wait for saves in the background."""
        lightning_internals.patch_model_checkpoints(patches, trainer, self._link, self._is_pending)

    def _is_pending(self, path: str | Path) -> bool:
        return paths.normalize(path) == self._pending_path

    # --- Saving -------------------------------------------------------------------------------------------

    def save(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        path: str | Path,
        io: CheckpointIO,
        goes_on: bool,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint of ``module`` at rank 0's ``path``, where it appears in one step or not at all.

        If this fails on any rank, every rank raises :class:`CheckpointError`, and older checkpoints are
        unchanged. Only while training ``goes_on`` is a save written in the background; its error rises in
        :meth:`check` or in the next save. ``io`` is the Trainer's plugin for files.
        """
        # Ranks may disagree on the name: it may hold a time, or a version found by looking for files.
        target = paths.normalize(collectives.broadcast_object(path, 0))
        if storage_options is not None and (self.as_directory or type(io) is TorchCheckpointIO):
            raise TypeError(
                f"storage_options ({storage_options!r}) would have no effect: configure fsspec"
                " (fsspec.config.conf), or save one file with save_distributed_checkpoint=False and a"
                " CheckpointIO that takes them."
            )
        # One save at a time: two would need host memory for two copies, and could finish in the wrong order.
        self._finish()
        in_background = self.in_background and goes_on
        if self.is_sharded:
            rest = {key: value for key, value in checkpoint.items() if key not in _STATES}
            checkpoint.update(with_whole_modules(rest, module, f"Cannot save {target}"))
        self._pending_path = target if in_background else ""
        write = self._prepare(checkpoint, module, target, _file_saver(io, storage_options), in_background)
        self._defers = goes_on
        if in_background:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            group = self._background_group()
            self._pending = self._thread.submit(_write_beside_training, module.device, write, group)
            return
        # In a group of accelerators, objects would wait for queued work and take device memory.
        write(collectives.host_group(self._timeout) if dist.is_initialized() else None)
        if not goes_on:
            self._finish()  # no later step runs the links and removals that wait for this save

    def _prepare(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        target: str,
        save_file: Callable[[dict[str, Any], str], None],
        copy: bool,
    ) -> Callable[[dist.ProcessGroup | None], None]:
        """The function that writes ``checkpoint`` in this run's form; see :func:`.sharded.prepare_shards`."""
        if self.as_directory:
            parameters = module.named_parameters(remove_duplicate=False)
            names = {without_wrappers(name) for name, _ in parameters}
            return prepare_shards(checkpoint, target, names, copy)
        if self.is_sharded:
            # One file holds whole tensors, and lists which were sharded so that loading can shard them
            # again.
            rest = {key: value for key, value in checkpoint.items() if key != state_dict.MODEL}
            checkpoint[state_dict.SHARDED_STATES] = state_dict.sharded_states(rest)
            checkpoint = state_dict.whole(checkpoint, keep=group_rank() == 0)
        return prepare_file(checkpoint, target, save_file, copy)

    def save_alone(self, checkpoint: dict[str, Any], path: str | Path, io: CheckpointIO) -> None:
        """Save a replicated model on rank 0 after a failure, when ranks no longer act together. Not a collective.

        For a sharded model it logs an error. It does not raise one, which would hide the failure.
        """
        if self.names_parameters:
            log.error(
                "No checkpoint was written at %s: all ranks save shards together, which they cannot after a"
                " failure. Save regularly, with ModelCheckpoint.",
                path,
            )
        elif group_rank() == 0:
            target = paths.normalize(path)
            paths.prepare_place(target)
            _file_saver(io)(checkpoint, target)

    def _background_group(self) -> dist.ProcessGroup | None:
        """A gloo group that training does not use: collectives of two threads must not mix in one group."""
        if dist.is_initialized():
            world = dist.group.WORLD
        else:
            world = None
        if world is None:
            return None
        if self._group is None or self._group[0] is not world:
            self._group = (world, collectives.new_host_group(self._timeout))
        return self._group[1]

    def remove(self, path: str | Path, io: CheckpointIO) -> None:
        """Remove a checkpoint on rank 0, once the one that replaces it is on disk. Not a collective."""
        remove = paths.remove
        if not self.as_directory and type(io) is not TorchCheckpointIO:
            remove = io.remove_checkpoint
        self._deferred.append(partial(remove, paths.normalize(path)))
        if not self._defers:
            self._finish()

    def _link(self, path: str, link: str) -> None:
        """Point ``link`` to the checkpoint at ``path`` on rank 0, once that is on disk. Not a collective."""
        # Before removals: until the links point to the new checkpoint, they need the old one.
        self._deferred.insert(0, partial(paths.link, Path(path), Path(link)))
        if not self._defers:
            self._finish()

    def check(self) -> None:
        """Raise the error of a save in the background if it has failed by now. Not a collective."""
        if self._pending is None or self._pending.done():
            self._finish()

    def _finish(self) -> None:
        """Wait for the pending save, or raise its CheckpointError; then run deferred links and removals."""
        pending = self._pending
        deferred = self._deferred
        self._pending = None
        self._deferred = []
        if pending is not None:
            pending.result()  # if it raises, the older checkpoint stays the newest
        if group_rank() == 0:
            for action in deferred:
                action()

    def close(self, was_interrupted: bool) -> None:
        """Wait until the last save is on disk. Raises its error, or logs it if the run ``was_interrupted``."""
        self._opened = None
        self._defers = False
        try:
            self._finish()
        except Exception as error:
            if not was_interrupted:
                raise
            log.error("%s", error)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None

    def wait_for_pending_save(self) -> None:
        """Wait, with a limit, for a pending save before reporting a failure: it needs the other ranks."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending], PENDING_SAVE_LIMIT_S)

    # --- Loading ------------------------------------------------------------------------------------------

    def open(
        self, path: str | Path, weights_only: bool | None, io: CheckpointIO, is_first_on_node: bool
    ) -> dict[str, Any]:
        """Check the checkpoint at rank 0's ``path``, and load the parts that Lightning restores.

        Tensors of a directory are read when a hook asks for them. Nothing in the run changes yet. If any
        rank cannot read the checkpoint, every rank raises :class:`CheckpointError`. If it is one file, the
        first rank of each node compares the content with its checksums.
        """
        self._path = paths.normalize(collectives.broadcast_object(path, 0))
        self._opened = None
        what = f"Cannot load {self._path}"
        is_directory = False
        with on_every_rank(what):
            is_directory = paths.is_directory(self._path)
            if is_directory and type(io) is not TorchCheckpointIO:
                is_directory = is_shard_directory(self._path)  # the plugin may write directories too
        # If ranks disagree on that, opening fails on all of them: both branches begin with one exchange.
        if is_directory:
            self._opened = ShardDirectory(self._path, weights_only)
            loaded = {**self._opened.rest, state_dict.MODEL: lazy_model(self._opened)}
            if "lr_schedulers" in loaded:  # absent if only weights were saved
                loaded[state_dict.OPTIMIZERS] = lazy_optimizers(self._opened)
        else:
            with on_every_rank(what):
                if type(io) is TorchCheckpointIO:
                    loaded = load_file(self._path, weights_only, reads_content=is_first_on_node)
                else:
                    # A copy, since the plugin may keep the dict that it returned.
                    loaded = dict(io.load_checkpoint(self._path, weights_only=weights_only))
        _check_same_moment(loaded, what)
        self._loaded = loaded
        self._holds_optimizers = bool(loaded.get(state_dict.OPTIMIZERS))
        return loaded

    def loading_ended(self) -> None:
        """Drop the checkpoint that :meth:`open` returned, once Lightning has restored it."""
        self._loaded = {}

    def forget_failed(self) -> None:
        """Empty a checkpoint that an earlier run failed to restore: Lightning would restore it in the next."""
        self._loaded.clear()

    @property
    def fills_optimizers(self) -> bool:
        """Whether :meth:`fill_optimizers` fills them; otherwise Lightning does."""
        return self.is_sharded or self._opened is not None

    def fill_model(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        optimizers: list[Optimizer],
        strict: bool,
    ) -> None:
        """Fill the model from :meth:`open`'s ``checkpoint``, after the module's ``on_load_checkpoint``.

        If the model or the ``optimizers`` do not match it, every rank raises :class:`CheckpointError` before
        anything changes.
        """
        optimizers = self._to_fill(checkpoint, optimizers)
        if not self.fills_optimizers:
            with on_every_rank(f"Cannot load {self._path}"):
                fill_module(module, checkpoint, optimizers, strict)
            return
        saved = self._edited(checkpoint, module, optimizers)
        state_dict.load_model(saved, module, optimizers, strict)
        own = state_dict.model_state(module)
        rest = {key: value for key, value in checkpoint.items() if key not in _STATES}
        state_dict.restore_shards(saved, rest, own)
        # Lightning's WeightAveraging reads the weights from this entry, and loads the average by itself.
        if weight_averaging.averaged_models(module):
            checkpoint[state_dict.MODEL] = own

    def fill_optimizers(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        optimizers: list[Optimizer],
        owned: state_dict.OwnedParameters,
    ) -> None:
        """Fill the optimizers, after the callbacks' hooks, which may edit the ``checkpoint`` too."""
        optimizers = self._to_fill(checkpoint, optimizers)
        if optimizers:
            saved = self._edited(checkpoint, module, optimizers)
            state_dict.load_optimizers(saved, module, optimizers, owned)

    def _to_fill(self, checkpoint: Mapping[str, Any], optimizers: list[Optimizer]) -> list[Optimizer]:
        """The ``optimizers`` to fill; none, so that they start afresh, if a hook has emptied the saved list."""
        if self._holds_optimizers and checkpoint.get(state_dict.OPTIMIZERS) == []:
            return []
        # Lightning's mock optimizer, for modules without one, has no state.
        return [optimizer for optimizer in optimizers if optimizer.state_dict()]

    def _edited(
        self, checkpoint: dict[str, Any], module: "pl.LightningModule", optimizers: list[Optimizer]
    ) -> state_dict.Saved:
        """The open checkpoint with the hooks' edits. A collective."""
        saved: state_dict.Saved | None = None
        with on_every_rank(f"Cannot load {self._path}"):
            if not isinstance(checkpoint.get(state_dict.MODEL), Mapping):
                raise CheckpointError("on_load_checkpoint has left no dict in checkpoint['state_dict']")
            names = [parameter_names(module, optimizer) for optimizer in optimizers]
            if self._opened is not None:
                saved = EditedDirectory(self._opened, checkpoint, names)
            else:
                saved = WholeCheckpoint(self._path, checkpoint, names)
        assert saved is not None
        return saved


def _check_same_moment(loaded: Mapping[str, Any], what: str) -> None:
    """Raise CheckpointError unless all ranks have loaded the same epoch and step. A collective."""
    moments = set(collectives.gather_objects((loaded.get("epoch"), loaded.get("global_step"))))
    if len(moments) > 1:
        raise CheckpointError(
            f"{what}: ranks have read different checkpoints there (epoch and step"
            f" {', '.join(map(str, moments))}). If a run that saves has replaced it meanwhile, load it"
            " again; else give all ranks the same file system"
        )


def _write_beside_training(
    device: torch.device, write: Callable[[dist.ProcessGroup | None], None], group: dist.ProcessGroup | None
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


def _file_saver(io: CheckpointIO, storage_options: Any = None) -> Callable[[dict[str, Any], str], None]:
    """The function that writes a file: this package's, or that of the Trainer's plugin if it has one."""
    if type(io) is TorchCheckpointIO:
        return single_file.save_file
    return partial(io.save_checkpoint, storage_options=storage_options)
