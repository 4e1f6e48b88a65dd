"""Loads a checkpoint, as hooks have edited it: read into new tensors, which their owners load."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.layouts import Layouts, Target
from lightning_automodel.checkpoint.optimizer_loading import (
    OptimizerLoading,
    check_number,
    no_optimizer_state,
)
from lightning_automodel.checkpoint.optimizers import named_parameters, parameter_names
from lightning_automodel.checkpoint.shard_directory import ShardDirectory, is_shard_directory
from lightning_automodel.checkpoint.single_file import load_file
from lightning_automodel.checkpoint.state_dict import (
    MODEL,
    OPTIMIZERS,
    SHARDED,
    SHARDS,
    STATES,
    model_state,
    under_own_names,
)
from lightning_automodel.checkpoint.tree import Entry, key_of, leaves, mapped
from lightning_automodel.checkpoint.tree import Path as TreePath
from lightning_automodel.distributed import collectives
from lightning_automodel.internals.torch import module_versions, without_wrappers
from lightning_automodel.sharding import weight_averaging
from lightning_automodel.sharding.whole_copies import write_part

OwnedParameters = Callable[[Optimizer], Mapping[nn.Parameter, bool]]
"""The parameters that an optimizer steps whole, and whether this rank owns them."""


class CheckpointLoader:
    """Loads one checkpoint. Its methods are collectives unless they say otherwise.

    Lightning calls :meth:`open`, the user's hooks, :meth:`fill_model`, the callbacks' hooks and
    :meth:`fill_optimizers`, in this order.
    """

    def __init__(self) -> None:
        self._shards: ShardDirectory | None = None
        self._loaded: dict[str, Any] = {}
        self._loops: str | None = None
        self._holds_optimizers = False
        self._versions: dict[str, dict[str, Any]] = {}
        self._sharded: frozenset[Any] = frozenset()
        self._read: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._path = ""

    @property
    def _what(self) -> str:
        return f"Cannot load {self._path}"

    def open(
        self, path: str | Path, weights_only: bool | None, io: CheckpointIO, is_first_on_node: bool
    ) -> dict[str, Any]:
        """Open the checkpoint at rank 0's ``path``: Lightning's dict, with an entry for what lies in shards.

        Nothing in the run changes yet. If any rank cannot open the checkpoint, every rank raises
        :class:`CheckpointError`. If it is one file, the first rank of each node compares the content with
        its checksums; a directory's shards are compared where they are read.
        """
        self._path = paths.normalize(collectives.broadcast_object(path, 0))
        loaded: dict[str, Any] = {}
        with on_every_rank(self._what):
            is_ours = type(io) is TorchCheckpointIO
            if paths.is_directory(self._path) and (is_ours or is_shard_directory(self._path)):
                self._shards = ShardDirectory(self._path, weights_only)
                loaded = self._shards.tree
            elif is_ours:
                loaded = load_file(self._path, weights_only, reads_content=is_first_on_node)
            else:
                # A copy, since the plugin may keep the dict that it returned.
                loaded = dict(io.load_checkpoint(self._path, weights_only=weights_only))
            self._versions = module_versions(loaded.get(MODEL, {}))
            self._sharded = frozenset([*loaded.pop(SHARDED, ()), *loaded.pop(SHARDS, ())])
        _check_same_moment(loaded, self._what)
        self._holds_optimizers = bool(loaded.get(OPTIMIZERS))
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
        optimizers: list[Optimizer] | None,
        owned: OwnedParameters,
        strict: bool,
    ) -> None:
        """Fill the model from :meth:`open`'s ``checkpoint``, after the module's ``on_load_checkpoint``.

        Everything is read before anything changes: in a fit also what callbacks keep, and the states of its
        ``optimizers``, which are None elsewhere. If that fails on any rank, or the model or the optimizers
        do not match, every rank raises :class:`CheckpointError`.
        """
        module.zero_grad()  # ends open windows, in case a hook loads weights within a fit
        jobs: list[tuple[Any, Target]] = []
        own: dict[str, Any] = {}
        with on_every_rank(self._what):
            if not isinstance(checkpoint.get(MODEL), dict):
                raise CheckpointError("on_load_checkpoint has left no dict in checkpoint['state_dict']")
            own = model_state(module)
            layouts = Layouts(own)
            jobs.append((checkpoint[MODEL], layouts.of_model))
            if optimizers is not None:
                rest = {key: value for key, value in checkpoint.items() if key not in STATES}
                jobs.append((rest, partial(self._target_of_rest, layouts)))
                for loading in self._loadings(checkpoint, module, optimizers, owned, layouts):
                    jobs.append((loading.state, loading.target))
        self._fetch(jobs)
        state = self._filled(*jobs[0])
        with on_every_rank(self._what):
            self._load_model(module, own, state, module_versions(checkpoint[MODEL]), strict)
        if optimizers is not None:
            checkpoint.update(self._filled(*jobs[1]))
        # Lightning's WeightAveraging reads the weights from this entry, and loads the average by itself.
        if weight_averaging.averaged_models(module):
            checkpoint[MODEL] = state
        self._read = {key: value for key, value in self._read.items() if key.startswith(f"{OPTIMIZERS}.")}

    def _load_model(
        self,
        module: nn.Module,
        own: Mapping[str, Any],
        state: dict[str, Any],
        versions: Mapping[str, dict[str, Any]],
        strict: bool,
    ) -> None:
        """Pass ``state`` to the module's ``load_state_dict``. Not a collective."""
        names = set(map(without_wrappers, state))
        # Even without ``strict``: training would silently start from scratch.
        if own and names.isdisjoint(own) and type(module).load_state_dict is nn.Module.load_state_dict:
            raise CheckpointError(
                f"it does not match the model, of which it holds nothing: {', '.join(list(own)[:3])}"
            )
        try:
            # A hook may have made another dict, which has none.
            module.load_state_dict(under_own_names(module, state, versions or self._versions), strict=strict)
        except CheckpointError:  # of an entry that a module has read
            raise
        except RuntimeError as error:
            raise CheckpointError(
                f"it does not match the model: {error} (with LightningModule.strict_loading = False, names"
                " that only one of the two has are skipped)"
            ) from error

    def fill_optimizers(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        optimizers: list[Optimizer],
        owned: OwnedParameters,
    ) -> None:
        """Fill the optimizers, after the callbacks' hooks, which may edit the ``checkpoint`` too.

        An optimizer that had not stepped when it was saved, or a parameter that had no gradients yet, starts
        without state. Saved options override this run's; options that were not saved stay this run's.

        Raises :class:`CheckpointError`, and changes no optimizer, if they differ from the saved ones.
        """
        loadings: list[OptimizerLoading] = []
        jobs: list[tuple[Any, Target]] = []
        saved_dtypes: dict[str, torch.dtype] = {}
        with on_every_rank(self._what):
            layouts = Layouts(model_state(module))
            loadings = self._loadings(checkpoint, module, optimizers, owned, layouts)
            jobs = [(loading.state, loading.target) for loading in loadings]
            for name, value in checkpoint.get(MODEL, {}).items():
                if isinstance(value, Tensor):
                    saved_dtypes[without_wrappers(name)] = value.dtype
        self._fetch(jobs)
        states = [self._filled(*job) for job in jobs]
        with on_every_rank(self._what):
            for loading, state in zip(loadings, states, strict=True):
                loading.load(state, saved_dtypes)

    def _loadings(
        self,
        checkpoint: dict[str, Any],
        module: "pl.LightningModule",
        optimizers: list[Optimizer],
        owned: OwnedParameters,
        layouts: Layouts,
    ) -> list[OptimizerLoading]:
        """What loads each optimizer; empty if a hook has emptied the saved list: they start afresh."""
        if self._loops not in (None, repr(checkpoint.get("loops"))):
            raise CheckpointError(
                "on_load_checkpoint has changed checkpoint['loops'], which says where the run goes"
                " on, together with the states of loaders and random numbers: to begin a new run"
                " from the weights, load them in the module (load_from_checkpoint) and call fit"
                " without ckpt_path"
            )
        states = checkpoint.get(OPTIMIZERS)
        if self._holds_optimizers and states == []:
            return []
        # Lightning's mock optimizer, for modules without one, has no state.
        optimizers = [optimizer for optimizer in optimizers if optimizer.state_dict()]
        if not optimizers:
            return []
        if not self._holds_optimizers:
            raise no_optimizer_state()
        if not isinstance(states, list):
            raise CheckpointError("on_load_checkpoint has left no list in checkpoint['optimizer_states']")
        states = [state for state in states if state]
        check_number("optimizers", len(states), len(optimizers))
        parameters = named_parameters(module)
        loadings: list[OptimizerLoading] = []
        for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
            names = parameter_names(parameters, optimizer)
            of_ranks = owned(optimizer)
            is_owned = {name: of_ranks[value] for name, value in parameters.items() if value in of_ranks}
            loadings.append(OptimizerLoading(state, optimizer, names, index, layouts, is_owned))
        return loadings

    def _target_of_rest(self, layouts: Layouts, path: TreePath, leaf: Tensor) -> Tensor | None:
        """The target of a tensor beside model and optimizers, such as an average of a parameter."""
        # Older files list keys, or the dicts that hold them.
        listed = (path, key_of(path), "/".join(map(str, path[:-1])))
        if self._sharded.isdisjoint(listed) and not isinstance(leaf, Entry):
            return None
        return layouts.target(leaf, [without_wrappers(str(path[-1]))], was_sharded=True)

    def _fetch(self, jobs: list[tuple[Any, Target]]) -> None:
        """Read what lies in shards into the targets of trees, for each rank its part of it. A collective."""
        wanted: dict[str, Tensor] = {}
        with on_every_rank(self._what):
            for tree, target in jobs:
                for path, leaf in leaves(tree):
                    if not isinstance(leaf, Entry) or leaf.value is not None or leaf.key in self._read:
                        continue
                    if leaf.key not in wanted and (into := target(path, leaf)) is not None:
                        wanted[leaf.key] = into
        if self._shards is not None:
            self._shards.read(wanted)
        self._read.update(wanted)

    def _filled(self, tree: Any, target: Target) -> Any:
        """``tree`` with what was read, and each rank's part of other tensors that are to be sharded."""

        def value(path: TreePath, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if isinstance(leaf, Entry) and leaf.value is None:
                if leaf.key not in self._read:
                    return leaf  # read when somebody computes with it
                found = self._read[leaf.key]
                if leaf.key in self._used:  # under two names
                    return found.clone()
                self._used.add(leaf.key)
                return found
            known = leaf.read() if isinstance(leaf, Entry) else leaf
            into = target(path, leaf)
            if into is None or isinstance(known, DTensor):
                return known
            write_part(into, known)
            return into

        return mapped(tree, value)


def _check_same_moment(loaded: Mapping[str, Any], what: str) -> None:
    """Raise CheckpointError unless all ranks have loaded the same epoch and step. A collective."""
    moments = set(collectives.gather_objects((loaded.get("epoch"), loaded.get("global_step"))))
    if len(moments) > 1:
        raise CheckpointError(
            f"{what}: ranks have read different checkpoints there (epoch and step"
            f" {', '.join(map(str, moments))}). If a run that saves has replaced it meanwhile, load it"
            " again; else give all ranks the same file system"
        )
