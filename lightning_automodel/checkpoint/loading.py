"""Loads a checkpoint, as hooks have edited it: read into new tensors, which their owners load.

And directories for ``load_from_checkpoint``, in one process.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.optimizers import AS_SAVED, NamedOptimizer, load_state, state_here
from lightning_automodel.checkpoint.shard_directory import ShardDirectory, open_checkpoint
from lightning_automodel.checkpoint.single_file import check_model
from lightning_automodel.checkpoint.tree import (
    MODEL,
    OPTIMIZERS,
    Entry,
    TreePath,
    model_state,
    moved,
    placed,
    under_own_names,
)
from lightning_automodel.distributed import collectives
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import overwrite
from lightning_automodel.internals.torch import without_wrappers
from lightning_automodel.sharding import weight_averaging


class CheckpointLoader:
    """Loads one checkpoint. Its methods are collectives unless they say otherwise.

    Lightning calls them in this order:

    ========================  ==========================================  ==================================
    call                      what is read                                what has changed in the run
    ========================  ==========================================  ==================================
    :meth:`open`              all but what lies in shards                 nothing
    the module's hook         the entries with whose values it computes   what the hook does
    :meth:`fill_model`        each rank's part of all other entries       the model, once all of it is read
    the callbacks' hooks      nothing                                     callbacks
    :meth:`fill_optimizers`   nothing                                     optimizers
    ========================  ==========================================  ==================================
    """

    def __init__(self) -> None:
        self._what = ""  # what an error says first
        self._shards: ShardDirectory | None = None
        self._loaded: dict[str, Any] = {}
        self._loops: str | None = None
        self._own: dict[str, Any] = {}  # the model's state by name
        self._named: list[NamedOptimizer] = []

    def open(self, path: str | Path, weights_only: bool | None, io: CheckpointIO) -> dict[str, Any]:
        """Open the checkpoint at rank 0's ``path``: Lightning's dict, with an entry for what lies in shards.

        Nothing in the run changes yet. If any rank cannot open the checkpoint, every rank raises
        :class:`CheckpointError`. One file is compared with its checksums; a directory's shards are compared
        where they are read.
        """
        place = paths.normalize(collectives.broadcast_object(path, 0))
        self._what = f"Cannot load {place}"
        with on_every_rank(self._what):
            if type(io) is not TorchCheckpointIO:
                # A copy, since the plugin may keep the dict that it returned.
                loaded = dict(io.load_checkpoint(place, weights_only=weights_only))
                check_model(loaded)
            else:
                loaded, self._shards = open_checkpoint(place, weights_only)
        moments = set(collectives.gather_objects((loaded.get("epoch"), loaded.get("global_step"))))
        if len(moments) > 1:
            raise CheckpointError(
                f"{self._what}: ranks have read different checkpoints there (epoch and step"
                f" {', '.join(map(str, moments))}). If a run that saves has replaced it meanwhile, load it"
                " again; else give all ranks the same file system"
            )
        self._loaded = loaded
        return loaded

    def watch_loops(self) -> None:
        """Refuse later changes of the loops' counters by hooks. Not a collective."""
        self._loops = repr(self._loaded.get("loops"))

    def discard(self) -> None:
        """Empty a checkpoint that the run has failed to restore: Lightning would restore it in the next."""
        self._loaded.clear()

    def fill_model(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        optimizers: list[NamedOptimizer] | None,
        strict: bool,
    ) -> None:
        """Fill the model from :meth:`open`'s ``checkpoint``, after the module's ``on_load_checkpoint``.

        Everything is read before anything changes: in a fit also what callbacks keep, and the states of its
        ``optimizers``, which are None elsewhere. If that fails on any rank, or the model or the optimizers
        do not match, every rank raises :class:`CheckpointError`.
        """
        module.zero_grad()  # ends open windows, in case a hook loads weights within a fit
        with on_every_rank(self._what):
            self._own = model_state(module)
            tree = {MODEL: checkpoint[MODEL]}
            if optimizers is not None:
                tree = {**checkpoint, OPTIMIZERS: self._states(checkpoint, optimizers)}
            filled, targets = placed(tree, self._target)
        if self._shards is not None:
            self._shards.read(targets)
        with on_every_rank(self._what):
            self._load_model(module, filled[MODEL], strict)
        # Lightning's WeightAveraging reads the weights from this entry, and loads the average by itself.
        if not weight_averaging.averaged_models(module):
            del filled[MODEL]
        checkpoint.update(filled)

    def _load_model(self, module: nn.Module, state: dict[str, Any], strict: bool) -> None:
        """Pass ``state`` to the module's ``load_state_dict``. Not a collective."""
        own = self._own
        is_another = own.keys().isdisjoint(map(without_wrappers, state))
        # Even without ``strict``: training would silently start from scratch.
        if own and is_another and type(module).load_state_dict is nn.Module.load_state_dict:
            raise CheckpointError(
                f"it does not match the model, of which it holds nothing: {', '.join(list(own)[:3])}"
            )
        module.load_state_dict(under_own_names(module, state), strict=strict)

    def fill_optimizers(self, checkpoint: dict[str, Any]) -> None:
        """Fill the optimizers, after the callbacks' hooks, which may edit what :meth:`fill_model` has read.

        An optimizer that had not stepped when it was saved, or a parameter that had no gradients yet, starts
        without state. Saved options replace this run's.
        """
        saved_dtypes = {
            without_wrappers(name): value.dtype
            for name, value in checkpoint.get(MODEL, {}).items()
            if isinstance(value, Tensor)
        }
        with on_every_rank(self._what):
            if self._loops != repr(checkpoint.get("loops")):
                raise CheckpointError(
                    "on_load_checkpoint has changed checkpoint['loops'], which says where the run goes"
                    " on, together with the states of loaders and random numbers: to begin a new run"
                    " from the weights, load them in the module (load_from_checkpoint) and call fit"
                    " without ckpt_path"
                )
            states = checkpoint.get(OPTIMIZERS)
            # None, if a hook has emptied the list.
            for named, state in zip(self._named, states or (), strict=bool(states)):
                load_state(named, state, saved_dtypes)

    def _states(self, checkpoint: dict[str, Any], optimizers: list[NamedOptimizer]) -> list[dict[str, Any]]:
        """The state of each optimizer, by this run's names; none if a hook has emptied the list: they start afresh."""
        # Lightning's mock optimizer, for modules without one, has no state.
        self._named = [named for named in optimizers if named.optimizer.state_dict()]
        if not self._named or checkpoint.get(OPTIMIZERS) == []:
            return []
        if OPTIMIZERS not in checkpoint:
            raise CheckpointError(
                "it holds no states of optimizers: it was saved with save_weights_only=True, or it is a"
                " directory of another program, of which weights alone are read (to go on from a run of"
                " ModelParallelStrategy, let it write one file:"
                " save_distributed_checkpoint=False; Lightning's consolidate_checkpoint reads FSDPStrategy's"
                " directories alone); validate, test and predict can load it"
            )
        states = [state for state in checkpoint[OPTIMIZERS] if state]
        if len(states) != len(self._named):
            raise CheckpointError(
                f"it holds {len(states)} optimizers, and this run has {len(self._named)}: {AS_SAVED}"
            )
        pairs = enumerate(zip(states, self._named, strict=True))
        return [state_here(state, named, index) for index, (state, named) in pairs]

    def _target(self, path: TreePath, leaf: Any) -> Tensor | None:
        """The new tensor that a leaf of the checkpoint is read into, each rank its part; None if it stays as it is.

        It is laid out like the parameter that it belongs to, such as one whose average it is. What was sharded
        and belongs to none is laid out like a sharded one of its shape, or whole.
        """
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
            return None
        name = without_wrappers(str(path[-1]))
        owner = self._own.get(name)
        if path[0] == OPTIMIZERS:
            owner = self._named[path[1]].parameter_like(path[2:], leaf)
        elif path[0] == MODEL and len(path) == 2:
            if name not in self._own:
                return None  # only a module that renames entries reads unknown ones
        elif not isinstance(leaf, Entry):  # of a callback, or in an extra state
            return None
        elif getattr(owner, "shape", None) != leaf.shape:
            sharded = [value for value in self._own.values() if isinstance(value, DTensor)]
            owner = next((value for value in sharded if value.shape == leaf.shape), None)
        if isinstance(owner, DTensor) and owner.shape == leaf.shape:
            return torch.empty_like(owner.detach(), dtype=leaf.dtype)
        if isinstance(leaf, Entry):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        return None


_load = lightning_internals.saving.pl_load


def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Replaces what Lightning's ``load_from_checkpoint`` calls, which has no setting for directories of shards.

    These are read in the form of one file, without optimizer states.
    """
    is_path = isinstance(path_or_url, str | Path) and not str(path_or_url).startswith(
        ("http://", "https://")
    )
    if not is_path or not paths.is_directory(path := paths.normalize(path_or_url)):
        return _load(path_or_url, map_location, weights_only)
    with on_this_rank(f"Cannot load {path}"):
        shards = ShardDirectory(path, weights_only)
    checkpoint = shards.read_all({key: value for key, value in shards.tree.items() if key != OPTIMIZERS})
    # The other kinds of map_location, functions and dicts, need not move tensors that are in host memory.
    if isinstance(map_location, str | torch.device):
        # Lightning's own walk would lose the versions of modules that a state dict has.
        return moved(checkpoint, map_location)
    return checkpoint


overwrite(lightning_internals.saving, "pl_load", load_any)
