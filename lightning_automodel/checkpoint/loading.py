"""Loads a checkpoint, as hooks have edited it: read into new tensors, which their owners load."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.layouts import Layouts, Target, first_alike
from lightning_automodel.checkpoint.optimizer_loading import OptimizerLoading, check_number
from lightning_automodel.checkpoint.optimizer_names import NamedOptimizer
from lightning_automodel.checkpoint.shard_directory import ShardDirectory, is_shard_directory
from lightning_automodel.checkpoint.single_file import load_file
from lightning_automodel.checkpoint.state_dict import (
    MODEL,
    OPTIMIZERS,
    SHARDED,
    SHARDS,
    model_state,
    under_own_names,
)
from lightning_automodel.checkpoint.tree import Entry, key_of, leaves, mapped
from lightning_automodel.checkpoint.tree import Path as TreePath
from lightning_automodel.distributed import collectives
from lightning_automodel.internals.torch import module_versions, without_wrappers
from lightning_automodel.sharding import weight_averaging
from lightning_automodel.sharding.whole_copies import write_part


class CheckpointLoader:
    """Loads one checkpoint. Its methods are collectives unless they say otherwise.

    Lightning calls them in this order:

    ========================  ==========================================  ==================================
    call                      what is read                                what has changed in the run
    ========================  ==========================================  ==================================
    :meth:`open`              all but what lies in shards                 nothing
    the module's hook         the entries with whose values it computes   what the hook does
    :meth:`fill_model`        each rank's part of all other entries       the model, once all of it is read
    the callbacks' hooks      as the module's                             callbacks
    :meth:`fill_optimizers`   what hooks have put in the place of others  optimizers
    ========================  ==========================================  ==================================
    """

    def __init__(self) -> None:
        self._what = ""  # what an error says first
        self._shards: ShardDirectory | None = None
        self._loaded: dict[str, Any] = {}
        self._versions: dict[str, dict[str, Any]] = {}  # of the model's modules
        # Of one file: paths of what was sharded beside model and optimizers.
        self._sharded: frozenset[Any] = frozenset()
        self._holds_optimizers = False
        self._loops: str | None = None
        self._layouts = Layouts({})
        self._read: dict[str, Tensor] = {}  # by the key of its entry
        self._used: set[str] = set()  # keys of which a tensor has been handed out

    def open(
        self, path: str | Path, weights_only: bool | None, io: CheckpointIO, is_first_on_node: bool
    ) -> dict[str, Any]:
        """Open the checkpoint at rank 0's ``path``: Lightning's dict, with an entry for what lies in shards.

        Nothing in the run changes yet. If any rank cannot open the checkpoint, every rank raises
        :class:`CheckpointError`. If it is one file, the first rank of each node compares the content with
        its checksums; a directory's shards are compared where they are read.
        """
        place = paths.normalize(collectives.broadcast_object(path, 0))
        self._what = f"Cannot load {place}"
        loaded: dict[str, Any] = {}
        with on_every_rank(self._what):
            is_ours = type(io) is TorchCheckpointIO
            if paths.is_directory(place) and (is_ours or is_shard_directory(place)):
                self._shards = ShardDirectory(place, weights_only)
                loaded = self._shards.tree
            elif is_ours:
                loaded = load_file(place, weights_only, reads_content=is_first_on_node)
            else:
                # A copy, since the plugin may keep the dict that it returned.
                loaded = dict(io.load_checkpoint(place, weights_only=weights_only))
            self._versions = module_versions(loaded.get(MODEL, {}))
            self._sharded = frozenset([*loaded.pop(SHARDED, ()), *loaded.pop(SHARDS, ())])
        moments = set(collectives.gather_objects((loaded.get("epoch"), loaded.get("global_step"))))
        if len(moments) > 1:
            raise CheckpointError(
                f"{self._what}: ranks have read different checkpoints there (epoch and step"
                f" {', '.join(map(str, moments))}). If a run that saves has replaced it meanwhile, load it"
                " again; else give all ranks the same file system"
            )
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
        optimizers: list[NamedOptimizer] | None,
        strict: bool,
    ) -> None:
        """Fill the model from :meth:`open`'s ``checkpoint``, after the module's ``on_load_checkpoint``.

        Everything is read before anything changes: in a fit also what callbacks keep, and the states of its
        ``optimizers``, which are None elsewhere. If that fails on any rank, or the model or the optimizers
        do not match, every rank raises :class:`CheckpointError`.
        """
        module.zero_grad()  # ends open windows, in case a hook loads weights within a fit
        loadings: list[OptimizerLoading] = []
        tree = {MODEL: checkpoint.get(MODEL)}
        with on_every_rank(self._what):
            if not isinstance(tree[MODEL], dict):
                raise CheckpointError("on_load_checkpoint has left no dict in checkpoint['state_dict']")
            self._layouts = Layouts(model_state(module))
            if optimizers is not None:
                tree = {key: value for key, value in checkpoint.items() if key != OPTIMIZERS}
                loadings = self._loadings(checkpoint, optimizers)
        self._fetch([(tree, self._target), *((loading.state, loading.target) for loading in loadings)])
        filled = self._filled(tree, self._target)
        with on_every_rank(self._what):
            self._load_model(module, filled[MODEL], strict)
        # Lightning's WeightAveraging reads the weights from this entry, and loads the average by itself.
        if not weight_averaging.averaged_models(module):
            del filled[MODEL]
        checkpoint.update(filled)
        self._read = {key: value for key, value in self._read.items() if key.startswith(f"{OPTIMIZERS}.")}

    def _load_model(self, module: nn.Module, state: dict[str, Any], strict: bool) -> None:
        """Pass ``state`` to the module's ``load_state_dict``. Not a collective."""
        own = self._layouts.own
        is_another = own.keys().isdisjoint(map(without_wrappers, state))
        # Even without ``strict``: training would silently start from scratch.
        if own and is_another and type(module).load_state_dict is nn.Module.load_state_dict:
            raise CheckpointError(
                f"it does not match the model, of which it holds nothing: {', '.join(list(own)[:3])}"
            )
        versions = module_versions(state) or self._versions  # a hook may have made another dict, without
        try:
            module.load_state_dict(under_own_names(module, state, versions), strict=strict)
        except CheckpointError:  # of an entry that a module has read
            raise
        except RuntimeError as error:
            raise CheckpointError(
                f"it does not match the model: {error} (with LightningModule.strict_loading = False, names"
                " that only one of the two has are skipped)"
            ) from error

    def fill_optimizers(self, checkpoint: dict[str, Any], optimizers: list[NamedOptimizer]) -> None:
        """Fill the optimizers, after the callbacks' hooks, which may edit the ``checkpoint`` too.

        An optimizer that had not stepped when it was saved, or a parameter that had no gradients yet, starts
        without state. Saved options override this run's; options that were not saved stay this run's.

        Raises :class:`CheckpointError`, and changes no optimizer, if they differ from the saved ones.
        """
        loadings: list[OptimizerLoading] = []
        with on_every_rank(self._what):
            loadings = self._loadings(checkpoint, optimizers)
        self._fetch([(loading.state, loading.target) for loading in loadings])
        states = [self._filled(loading.state, loading.target) for loading in loadings]
        saved_dtypes = {
            without_wrappers(name): value.dtype
            for name, value in checkpoint.get(MODEL, {}).items()
            if isinstance(value, Tensor)
        }
        with on_every_rank(self._what):
            for loading, state in zip(loadings, states, strict=True):
                loading.load(state, saved_dtypes)

    def _loadings(
        self, checkpoint: dict[str, Any], optimizers: list[NamedOptimizer]
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
        # Lightning's mock optimizer, for modules without one, has no state.
        optimizers = [named for named in optimizers if named.optimizer.state_dict()]
        if not optimizers or (self._holds_optimizers and states == []):
            return []
        if not self._holds_optimizers:
            raise CheckpointError(
                "it holds no state of optimizer 0: it was saved with save_weights_only=True, or with fewer"
                " optimizers, or it is a directory of another program, of which weights alone are read (to"
                " go on from a run of ModelParallelStrategy, let it write one file:"
                " save_distributed_checkpoint=False; Lightning's consolidate_checkpoint reads FSDPStrategy's"
                " directories alone); validate, test and predict can load it"
            )
        if not isinstance(states, list):
            raise CheckpointError("on_load_checkpoint has left no list in checkpoint['optimizer_states']")
        states = [state for state in states if state]
        check_number("optimizers", len(states), len(optimizers))
        pairs = enumerate(zip(states, optimizers, strict=True))
        return [OptimizerLoading(state, named, index, self._layouts) for index, (state, named) in pairs]

    def _target(self, path: TreePath, leaf: Tensor) -> Tensor | None:
        """The target of a tensor of the model, or beside model and optimizers: see :data:`.layouts.Target`.

        It may belong to a parameter of its name, such as an average.
        """
        is_of_model = path[0] == MODEL
        # Only a module that renames entries reads unknown ones.
        if is_of_model and without_wrappers(str(path[1])) not in self._layouts.own:
            return None
        is_nested = not is_of_model or len(path) > 2  # in what callbacks keep, or in an extra state
        # Older files list keys, or the dicts that hold them.
        listed = (path, key_of(path), "/".join(map(str, path[:-1])))
        if is_nested and not isinstance(leaf, Entry) and self._sharded.isdisjoint(listed):
            return None
        owner = first_alike(leaf, self._layouts.own, [without_wrappers(str(path[-1]))])
        return self._layouts.target(leaf, owner, was_sharded=is_nested)

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
