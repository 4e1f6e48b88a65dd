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

from lightning_automodel.checkpoint import atomic, paths, state_dict
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.saver import CheckpointSaver, prepare_place
from lightning_automodel.checkpoint.sharded import ShardDirectory
from lightning_automodel.checkpoint.single_file import WholeCheckpoint, check_file, fill_module, load_file, save_file
from lightning_automodel.distributed import collectives, connections
from lightning_automodel.distributed.process_group import group_rank as get_rank_safe
from lightning_automodel.sharding import weight_averaging
from lightning_automodel.sharding.param_names import without_wrappers

log = logging.getLogger(__name__)

LONGEST_LINGERING_S = 60.0


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
        self._coming: str | None = None
        self._group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    @property
    def names_parameters(self) -> bool:
        """Whether states are saved under the names of parameters; plain files hold what the modules give themselves."""
        return self.is_sharded or self.as_directory

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
        """Write a checkpoint, which appears in one step or not at all.

        Args:
            checkpoint: As Lightning makes it.
            path: Where; rank 0's counts.
            device: Where the model is.
            io: The Trainer's plugin for files; Lightning's own is replaced by what checks and publishes.
            goes_on: Whether training goes on, so that a save in the background makes sense.
            storage_options: For a plugin of the user's.

        Raises:
            CheckpointError: On every rank, if it failed on any; older checkpoints are as they were.
        """
        if self.as_directory or _is_plain(io):
            _refuse_storage_options(storage_options)
            write = save_file
        else:
            write = partial(io.save_checkpoint, storage_options=storage_options)
        place = paths.normal(collectives.broadcast_object(path, 0))
        if self._saver is None:
            self._saver = CheckpointSaver(device)
        in_background = self.in_background and goes_on
        self._coming = place if in_background else None
        if self.as_directory:
            self._saver.save_shards(checkpoint, place, self._background_group() if in_background else None)
        else:
            if self.is_sharded:
                rest = {key: value for key, value in checkpoint.items() if key != state_dict.MODEL}
                checkpoint[state_dict.SHARDED_PLACES] = list(state_dict.sharded_places(rest))
                checkpoint = state_dict.whole(checkpoint, keep=get_rank_safe() == 0)
            self._saver.save_file(checkpoint, place, write, in_background)
        if not goes_on:
            # No step follows that would do what waits for this save.
            self._saver.close(together=True)
            self._saver = None

    def save_alone(self, checkpoint: dict[str, Any], path: _PATH, io: CheckpointIO) -> None:
        """Write a checkpoint after a failure, when ranks no longer act together, if that is possible.

        Not a collective: a replicated model is saved by rank 0. Otherwise an error is logged rather than raised, since
        it would hide the failure.
        """
        if self.names_parameters:
            log.error(
                "No checkpoint at %s: shards are saved by all ranks together, and after a failure they were not."
                " Save regularly, with ModelCheckpoint.",
                path,
            )
        elif get_rank_safe() == 0:
            place = paths.normal(path)
            prepare_place(place)
            (save_file if _is_plain(io) else io.save_checkpoint)(checkpoint, place)

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
        place = paths.normal(path)
        self._coming = None if self._coming == place else self._coming
        remove = partial(paths.remove if _is_plain(io) else io.remove_checkpoint, place)
        if self._saver is not None:
            self._saver.remove_afterwards(remove)
        elif get_rank_safe() == 0:
            remove()

    def is_coming(self, path: _PATH) -> bool:
        """Whether the newest save was begun in the background and is to be at ``path``. Not a collective."""
        return self._coming is not None and paths.normal(path) == self._coming

    def link(self, path: _PATH, link: _PATH) -> None:
        """Let ``link`` lead to the checkpoint at ``path``, by rank 0, once that is on disk. Not a collective."""
        make = partial(atomic.link, Path(path), Path(link))
        if self._saver is not None:
            self._saver.link_afterwards(make)
        elif get_rank_safe() == 0:
            make()

    def check(self) -> None:
        """Raise the error of a save in the background, if there is one by now. Not a collective."""
        if self._saver is not None:
            self._saver.check()

    def close(self, was_interrupted: bool) -> None:
        """Return when the last save is on disk, or raise its error.

        Args:
            was_interrupted: Whether the run failed: then its error counts, and that of the save is logged.
        """
        saver, self._saver, self._opened = self._saver, None, None
        if saver is None:
            return
        try:
            saver.close(together=not was_interrupted)
        except Exception as error:
            if not was_interrupted:
                raise
            log.error("%s", error)

    def linger(self) -> None:
        """Before this rank tells the others that it failed: let a save in flight end, which needs them. Bounded."""
        if self._saver is not None:
            self._saver.linger(LONGEST_LINGERING_S)

    # --- Loading ------------------------------------------------------------------------------------------------------

    @property
    def fills_optimizers(self) -> bool:
        """Whether :meth:`fill` fills the optimizers too; otherwise Lightning does."""
        return self.is_sharded or self._opened is not None

    def open(self, path: _PATH, weights_only: bool | None, io: CheckpointIO, is_first_on_node: bool) -> dict[str, Any]:
        """Check a checkpoint, and load what Lightning restores of it. Nothing is changed yet.

        Args:
            path: Where it is; rank 0's counts.
            weights_only: False runs code that it may hold.
            io: The Trainer's plugin for files.
            is_first_on_node: Whether this rank reads a file for the others of its machine, to check it.

        Returns:
            The checkpoint, without the shards of a directory.

        Raises:
            CheckpointError: On every rank, if any cannot read it.
        """
        place = paths.normal(collectives.broadcast_object(path, 0))
        self._path, self._opened = place, None
        if self._agree_on_directory(place):
            self._opened = ShardDirectory(place, weights_only)
            return self._opened.rest
        if not _is_plain(io):
            return io.load_checkpoint(place, weights_only=weights_only)
        with on_every_rank(f"Cannot load {place}"):
            if is_first_on_node:
                check_file(place)
        with on_every_rank(f"Cannot load {place}"):
            return load_file(place, weights_only)

    @staticmethod
    def _agree_on_directory(place: str) -> bool:
        """Whether there is a directory at ``place``, as every rank must see it."""
        is_directory = False
        with on_every_rank(f"Cannot load {place}"):
            is_directory = paths.is_directory(place)
        on_rank_zero = collectives.broadcast_object(is_directory, 0)
        with on_every_rank(f"Cannot load {place}"):
            if is_directory != on_rank_zero:
                raise CheckpointError(
                    f"it is {'a' if is_directory else 'no'} directory here, unlike on rank 0: let all ranks see the"
                    " same file system"
                )
        return is_directory

    def fill_replicated(
        self, checkpoint: dict[str, Any], module: "pl.LightningModule", optimizers: list[Optimizer], strict: bool
    ) -> None:
        """Fill a replicated model from a file, where Lightning fills the optimizers; otherwise like :meth:`fill`."""
        with on_every_rank(f"Cannot load {self._path}"):
            fill_module(module, checkpoint, optimizers, strict)

    def fill(
        self, checkpoint: dict[str, Any], module: "pl.LightningModule", optimizers: list[Optimizer], strict: bool
    ) -> None:
        """Fill model and optimizers from what :meth:`open` has opened.

        Args:
            checkpoint: What it returned, after the user's hooks.
            module: The model.
            optimizers: Empty where only the model is wanted.
            strict: Whether the checkpoint must hold exactly what the model has.

        Raises:
            CheckpointError: On every rank, before anything was changed.
        """
        saved: state_dict.Saved | None = self._opened
        if saved is None:
            names = [_parameter_names(module, optimizer) for optimizer in optimizers]
            sizes = {
                name: t.size() for name, t in state_dict.model_state(module).items() if isinstance(t, torch.Tensor)
            }
            with on_every_rank(f"Cannot load {self._path}"):
                saved = WholeCheckpoint(self._path, checkpoint, names, sizes)
        state_dict.load_state(saved, module, optimizers, strict)
        own = state_dict.model_state(module)
        state_dict.restore_shards(saved, checkpoint, own)
        if weight_averaging.keeps_average(module):
            checkpoint[state_dict.MODEL] = own


def _refuse_storage_options(storage_options: Any | None) -> None:
    """Raise TypeError where options for a file system are given."""
    if storage_options is not None:
        raise TypeError(
            f"storage_options ({storage_options!r}) would have no effect: give fsspec's settings by its configuration"
            " (FSSPEC_<PROTOCOL>_<OPTION> in the environment, or fsspec.config.conf)."
        )


def _is_plain(io: CheckpointIO) -> bool:
    """Whether the Trainer has Lightning's own plugin for files, which nobody has chosen."""
    return type(io) is TorchCheckpointIO


def _parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of an optimizer's parameters in its order."""
    names = {id(parameter): without_wrappers(name) for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
