"""Loads a checkpoint into one run: opened and checked first, then filled in as the user's hooks have edited it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch.optim import Optimizer

from lightning_automodel.checkpoint import filling, paths, state_dict
from lightning_automodel.checkpoint.edited import EditedDirectory, lazy_model, lazy_optimizers
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.form import CheckpointForm
from lightning_automodel.checkpoint.optimizers import parameter_names
from lightning_automodel.checkpoint.shard_directory import ShardDirectory, is_shard_directory
from lightning_automodel.checkpoint.single_file import WholeCheckpoint, load_file
from lightning_automodel.distributed import collectives
from lightning_automodel.sharding import weight_averaging


class CheckpointLoader:
    """Loads the checkpoints of one strategy. Its methods are collectives unless they say otherwise.

    Lightning calls :meth:`open`, the user's hooks, :meth:`fill_model`, the callbacks' hooks and
    :meth:`fill_optimizers`, in this order.

    Args:
        form: The form of the strategy's checkpoints.
    """

    def __init__(self, form: CheckpointForm) -> None:
        self._form = form
        self._opened: ShardDirectory | None = None
        self._loaded: dict[str, Any] = {}
        self._holds_optimizers = False
        self._path = ""

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
        """Drop the checkpoint that :meth:`open` returned, once Lightning has restored it. Not a collective."""
        self._loaded = {}

    def close(self) -> None:
        """Forget the open checkpoint, at the end of a run. Not a collective."""
        self._opened = None

    def forget_failed(self) -> None:
        """Empty a checkpoint that an earlier run failed to restore: Lightning would restore it in the next."""
        self._loaded.clear()

    @property
    def fills_optimizers(self) -> bool:
        """Whether :meth:`fill_optimizers` fills them; otherwise Lightning does."""
        return self._form.is_sharded or self._opened is not None

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
                filling.fill_plain_module(module, checkpoint, optimizers, strict)
            return
        saved = self._edited(checkpoint, module, optimizers)
        filling.load_model(saved, module, optimizers, strict)
        own = state_dict.model_state(module)
        rest = {key: value for key, value in checkpoint.items() if key not in state_dict.STATES}
        filling.restore_shards(saved, rest, own)
        # Lightning's WeightAveraging reads the weights from this entry, and loads the average by itself.
        if weight_averaging.averaged_models(module):
            checkpoint[state_dict.MODEL] = own

    def fill_optimizers(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        optimizers: list[Optimizer],
        owned: filling.OwnedParameters,
    ) -> None:
        """Fill the optimizers, after the callbacks' hooks, which may edit the ``checkpoint`` too."""
        optimizers = self._to_fill(checkpoint, optimizers)
        if optimizers:
            saved = self._edited(checkpoint, module, optimizers)
            filling.load_optimizers(saved, module, optimizers, owned)

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
