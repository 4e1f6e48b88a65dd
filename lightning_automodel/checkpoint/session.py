"""The checkpoints of one run: what the strategy's hooks for saving and loading do."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from torch import nn
from torch.optim import Optimizer

from lightning_automodel import lightning_internals
from lightning_automodel.checkpoint import atomic, paths, state_dict
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.reading import read_unreplaced
from lightning_automodel.checkpoint.saver import CheckpointSaver, prepare_target
from lightning_automodel.checkpoint.sharded import ShardDirectory
from lightning_automodel.checkpoint.single_file import FileCheckpointIO, WholeCheckpoint, check_file, fill_module
from lightning_automodel.distributed import collectives, connections
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.patching import PatchStack
from lightning_automodel.sharding import weight_averaging
from lightning_automodel.sharding.param_names import without_wrappers

log = logging.getLogger(__name__)

PENDING_SAVE_LIMIT_S = 60.0


class RunCheckpoints:
    """Saves and loads the checkpoints of one strategy. Its methods are collectives unless they say otherwise.

    Args:
        is_sharded: Whether the model is.
        as_directory: Whether to write a directory of shards; otherwise one file.
        in_background: Whether to write while training goes on.
    """

    def __init__(self, is_sharded: bool, as_directory: bool, in_background: bool) -> None:
        self.is_sharded, self.as_directory, self.in_background = is_sharded, as_directory, in_background
        self._saver: CheckpointSaver | None = None
        self._opened: ShardDirectory | None = None
        self._path = ""
        self._pending_path: str | None = None
        self._group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    @property
    def names_parameters(self) -> bool:
        """Whether states are saved under the names of parameters; plain files hold what the modules give themselves."""
        return self.is_sharded or self.as_directory

    def patch_callbacks(self, trainer: "pl.Trainer", patches: PatchStack) -> None:
        """Let each ``ModelCheckpoint`` of ``trainer`` wait for what is written in the background."""
        lightning_internals.patch_model_checkpoints(patches, trainer, self._link, self._is_pending)

    def _is_pending(self, path: _PATH) -> bool:
        return self._pending_path is not None and paths.normalize(path) == self._pending_path

    def _link(self, path: str, link: str) -> None:
        """Let ``link`` lead to the checkpoint at ``path``, by rank 0, once that is on disk. Not a collective."""
        make = partial(atomic.link, Path(path), Path(link))
        if self._saver is not None:
            self._saver.link_afterwards(make)
        elif group_rank() == 0:
            make()

    # --- Saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        checkpoint: dict[str, Any],
        path: _PATH,
        device: torch.device,
        io: CheckpointIO,
        goes_on: bool,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint at rank 0's ``path``, where it appears in one step or not at all.

        If that fails on any rank, every rank raises :class:`CheckpointError`, and older checkpoints are as they were.
        A save in the background makes sense where training ``goes_on``; ``io`` is the Trainer's plugin for files.
        """
        # Names may hold a time, or a version that is counted by looking for files: ranks may disagree.
        target = paths.normalize(collectives.broadcast_object(path, 0))
        if self._saver is None:
            self._saver = CheckpointSaver(device)
        in_background = self.in_background and goes_on
        self._pending_path = target if in_background else None
        if self.as_directory:
            if storage_options is not None:
                raise TypeError(
                    f"storage_options ({storage_options!r}) would have no effect on a directory of shards: configure"
                    " file systems for fsspec (its configuration files or environment variables), or save one file"
                    " with save_distributed_checkpoint=False and a CheckpointIO that takes them."
                )
            self._saver.save_shards(checkpoint, target, self._background_group() if in_background else None)
        else:
            if self.is_sharded:
                # One file holds whole tensors: what was sharded is listed, to become shards again.
                rest = {key: value for key, value in checkpoint.items() if key != state_dict.MODEL}
                checkpoint[state_dict.SHARDED_STATES] = list(state_dict.sharded_states(rest))
                checkpoint = state_dict.whole(checkpoint, keep=group_rank() == 0)
            write = partial(_files_by(io).save_checkpoint, storage_options=storage_options)
            self._saver.save_file(checkpoint, target, write, in_background)
        if not goes_on:
            # No step follows that would do what waits for this save.
            self._saver.close(together=True)
            self._saver = None

    def save_alone(self, checkpoint: dict[str, Any], path: _PATH, io: CheckpointIO) -> None:
        """Let rank 0 save a replicated model after a failure, when ranks no longer act together. Not a collective.

        For a sharded one an error is logged rather than raised, since it would hide the failure.
        """
        if self.names_parameters:
            log.error(
                "No checkpoint at %s: shards are saved by all ranks together, and after a failure they were not."
                " Save regularly, with ModelCheckpoint.",
                path,
            )
        elif group_rank() == 0:
            target = paths.normalize(path)
            prepare_target(target)
            _files_by(io).save_checkpoint(checkpoint, target)

    def _background_group(self) -> dist.ProcessGroup:
        """A gloo group that training does not use, so that collectives of two threads do not meet."""
        world = dist.group.WORLD
        assert world is not None
        if self._group is None or self._group[0] is not world:
            with connections.recording():
                self._group = world, dist.new_group(backend="gloo")
        return self._group[1]

    def remove(self, path: _PATH, io: CheckpointIO) -> None:
        """Remove a checkpoint by rank 0, once what replaces it is on disk. Not a collective."""
        target = paths.normalize(path)
        self._pending_path = None if self._pending_path == target else self._pending_path
        remove = partial(_files_by(io).remove_checkpoint, target)
        if self._saver is not None:
            self._saver.remove_afterwards(remove)
        elif group_rank() == 0:
            remove()

    def check(self) -> None:
        """Raise the error of a save in the background, if there is one by now. Not a collective."""
        if self._saver is not None:
            self._saver.check()

    def close(self, was_interrupted: bool) -> None:
        """Return when the last save is on disk, or raise its error; after a failure of the run, log it."""
        saver, self._saver, self._opened = self._saver, None, None
        if saver is None:
            return
        try:
            saver.close(together=not was_interrupted)
        except Exception as error:
            if not was_interrupted:
                raise
            log.error("%s", error)

    def wait_for_pending_save(self) -> None:
        """Before this rank tells the others that it failed: let a pending save end, which needs them. Bounded."""
        if self._saver is not None:
            self._saver.wait_for_pending(PENDING_SAVE_LIMIT_S)

    # --- Loading ------------------------------------------------------------------------------------------------------

    @property
    def fills_optimizers(self) -> bool:
        """Whether :meth:`fill` fills the optimizers too; otherwise Lightning does."""
        return self.is_sharded or self._opened is not None

    def open(self, path: _PATH, weights_only: bool | None, io: CheckpointIO, is_first_on_node: bool) -> dict[str, Any]:
        """Check the checkpoint at rank 0's ``path``, and load what Lightning restores of it: all but shards.

        Nothing is changed yet. If any rank cannot read it, every rank raises :class:`CheckpointError`. Of one file, the
        first rank of each node compares the content with its checksums.
        """
        self._path, self._opened = paths.normalize(collectives.broadcast_object(path, 0)), None
        if self._agree_on_directory():
            self._opened = read_unreplaced(self._path, lambda: ShardDirectory(self._path, weights_only))
            return self._opened.rest
        files = _files_by(io)
        if not isinstance(files, FileCheckpointIO):
            return files.load_checkpoint(self._path, weights_only=weights_only)

        def load_file() -> dict[str, Any]:
            with on_every_rank(f"Cannot load {self._path}"):
                if is_first_on_node:
                    check_file(self._path)
            with on_every_rank(f"Cannot load {self._path}"):
                loaded = files.load_checkpoint(self._path, weights_only=weights_only)
            return loaded

        return read_unreplaced(self._path, load_file)

    def _agree_on_directory(self) -> bool:
        """Whether there is a directory at the path, as every rank must see it."""
        is_directory = False
        with on_every_rank(f"Cannot load {self._path}"):
            is_directory = paths.is_directory(self._path)
        on_rank_zero = collectives.broadcast_object(is_directory, 0)
        with on_every_rank(f"Cannot load {self._path}"):
            if is_directory != on_rank_zero:
                raise CheckpointError(
                    f"it is {'a' if is_directory else 'no'} directory here, unlike on rank 0: let all ranks see the"
                    " same file system"
                )
        return is_directory

    def fill(
        self, checkpoint: dict[str, Any], module: "pl.LightningModule", optimizers: list[Optimizer], strict: bool
    ) -> None:
        """Fill the model from the ``checkpoint`` that :meth:`open` returned; optimizers too where Lightning does not.

        Where it does not fit, every rank raises :class:`CheckpointError` before anything was changed.
        """
        optimizers = [each for each in optimizers if state_dict.has_state(each.state_dict())]
        if not self.fills_optimizers:
            with on_every_rank(f"Cannot load {self._path}"):
                fill_module(module, checkpoint, optimizers, strict)
            return
        saved: state_dict.Saved | None = self._opened
        if saved is None:
            names = [_parameter_names(module, optimizer) for optimizer in optimizers]
            own = state_dict.model_state(module)
            with on_every_rank(f"Cannot load {self._path}"):
                saved = WholeCheckpoint(self._path, checkpoint, names, own)
        state_dict.load_state(saved, module, optimizers, strict)
        own = state_dict.model_state(module)
        state_dict.restore_shards(saved, checkpoint, own)
        # The callback takes the average from where the weights were saved, and puts it there itself.
        if weight_averaging.averaged_models(module):
            checkpoint[state_dict.MODEL] = own


def _files_by(io: CheckpointIO) -> CheckpointIO:
    """The plugin to use for files: the Trainer's, but ours where it is Lightning's own, which nobody has chosen."""
    return FileCheckpointIO() if type(io) is TorchCheckpointIO else io


def _parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of an optimizer's parameters in its order."""
    names = {id(parameter): without_wrappers(name) for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
