"""Modules that a checkpoint pickles, such as a network among the hyper-parameters, saved whole and plain.

A sharded module has a class that FSDP2 made, FSDP2's hooks, and only this rank's part of each parameter. So
rank 0 pickles a copy of the user's class instead, with whole tensors, which all ranks gather.
"""

import io
import pickle
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.state_dict import with_own_dicts
from lightning_automodel.checkpoint.trees import Nowhere
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals import torch as torch_internals

_PLAIN = (str, bytes, int, float, bool, complex, type(None), Tensor)
_OURS = __name__.partition(".")[0]


def with_whole_modules(checkpoint: dict[str, Any], module: nn.Module, what: str) -> dict[str, Any]:
    """``checkpoint`` with whole, plain copies in place of submodules of the sharded ``module`` in it.

    A collective, even if there are no submodules to copy. It gathers one tensor at a time; rank 0 keeps them
    in host memory. On the other ranks the checkpoint is unchanged.

    Raises:
        CheckpointError: On every rank, if rank 0 cannot pickle an entry, or an entry holds shards that are
            not the module's. The message says that ``what`` failed.
    """
    tree: dict[str, Any] = checkpoint
    entries: list[_Entry] = []  # filled on rank 0 alone, which writes them
    names: list[str] = []
    with on_every_rank(what):
        if group_rank() == 0:
            tree = with_own_dicts(checkpoint)
            entries = list(_entries_with_modules(tree, module))
            names = _names_of_shards(entries, module)
    whole: dict[str, Tensor] = {}
    for name in collectives.broadcast_object(names, 0):
        tensor = _by_name(module)[name]
        gathered = tensor.detach().full_tensor().cpu()
        if group_rank() == 0:
            if isinstance(tensor, nn.Parameter):
                gathered = nn.Parameter(gathered, tensor.requires_grad)
            whole[name] = gathered
    with on_every_rank(what):
        for entry in entries:
            entry.replace(whole, module)
    return tree


def note_on_hyper_parameters(module: Any) -> str | None:
    """A note for the user if there are sharded modules among the hyper-parameters of a LightningModule."""
    held: list[str] = []
    for name, value in dict(module.hparams).items():
        parameters = value.parameters() if isinstance(value, nn.Module) else ()
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            held.append(name)
    if not held:
        return None
    return (
        f"The hyper-parameters {', '.join(held)} are parts of the model: each checkpoint holds a whole copy"
        " of them beside the shards, for which rank 0 needs host memory, and loads with weights_only=False"
        f" alone. Where that is not wanted: self.save_hyperparameters(ignore={held})."
    )


class _Entry:
    """A pickled value of a checkpoint; its ``content`` refers to its ``tensors`` by number."""

    def __init__(
        self,
        place: str,
        holder: dict[Any, Any],
        key: Any,
        content: bytes,
        tensors: list[Tensor],
    ) -> None:
        self.place = place
        self.tensors = tensors
        self._holder = holder
        self._key = key
        self._content = content

    def replace(self, whole: dict[str, Tensor], module: nn.Module) -> None:
        """Put a copy in place of the value, with ``whole`` tensors by their names in ``module`` for its shards."""
        names = _names_by_id(module)
        copies: list[Tensor] = []
        for tensor in self.tensors:
            if isinstance(tensor, DTensor):
                copies.append(whole[names[id(tensor)]])
            elif isinstance(tensor, nn.Parameter):
                copies.append(nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
            else:
                copies.append(tensor.detach().clone())
        self._holder[self._key] = _Unpacking(self._content, copies).load()


def _entries_with_modules(tree: dict[str, Any], module: nn.Module) -> Iterator[_Entry]:
    modules = {id(submodule) for submodule in module.modules()}
    for place, holder, key, value in _leaves(tree, "checkpoint"):
        survey = _Packing(Nowhere(), modules)  # most entries hold no modules, and some are large
        try:
            survey.dump(value)
        except Exception as error:  # objects can raise anything
            raise CheckpointError(f"{place} cannot be pickled: {error}") from error
        has_shards = any(isinstance(tensor, DTensor) for tensor in survey.tensors)
        if isinstance(value, (list, tuple)):
            has_shards = False  # split_shards refuses shards in lists, and whole() gathers them
        if survey.has_modules or has_shards:
            stream = io.BytesIO()
            packing = _Packing(stream, modules)
            packing.dump(value)
            yield _Entry(place, holder, key, stream.getvalue(), packing.tensors)


def _leaves(tree: dict[Any, Any], place: str) -> Iterator[tuple[str, dict[Any, Any], Any, Any]]:
    for key, value in tree.items():
        within = f"{place}[{key!r}]"
        if str(key).startswith(_OURS):  # plain data, which grows with the number of ranks
            continue
        if isinstance(value, dict):
            yield from _leaves(value, within)
        elif not isinstance(value, _PLAIN):
            yield within, tree, key, value


def _by_name(module: nn.Module) -> dict[str, Any]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _names_by_id(module: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in _by_name(module).items()}


def _names_of_shards(entries: list[_Entry], module: nn.Module) -> list[str]:
    """Names of the sharded tensors in ``entries``; CheckpointError if one is not the model's."""
    names = _names_by_id(module)
    used: dict[str, None] = {}
    for entry in entries:
        for tensor in entry.tensors:
            if not isinstance(tensor, DTensor):
                continue
            if id(tensor) not in names:
                raise CheckpointError(
                    f"{entry.place} holds a sharded tensor that is none of the model's parameters: save"
                    " tensor.full_tensor(), called on every rank"
                )
            used[names[id(tensor)]] = None
    return list(used)


class _Packing(pickle.Pickler):
    """Pickles a value with tensors by number and the model's modules as plain ones of the user's classes."""

    def __init__(self, stream: io.BytesIO | Nowhere, modules: Collection[int]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.has_modules = False
        self._modules = modules
        self._numbers: dict[int, int] = {}

    @override
    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]

    @override
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, nn.Module) or id(value) not in self._modules:
            return NotImplemented
        cls: Any = next(base for base in type(value).__mro__ if not issubclass(base, FSDPModule))
        if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
            return NotImplemented
        self.has_modules = True
        return _blank, (cls,), _without_sharding(cls.__getstate__(value), cls)


class _Unpacking(pickle.Unpickler):
    def __init__(self, content: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = tensors

    @override
    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]


def _blank(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _without_sharding(state: dict[str, Any], cls: type[nn.Module]) -> dict[str, Any]:
    """A module's attributes without those that FSDP2 sets, and without this package's hooks and methods."""
    kept: dict[str, Any] = {}
    for name, value in state.items():
        is_method = hasattr(cls, name) and torch_internals.defined_in(value, _OURS)
        if is_method or name.startswith(_OURS) or fsdp2.is_set_by_fsdp(name):
            continue
        if name.endswith("_hooks") and isinstance(value, dict):
            value = type(value)(
                (number, hook)
                for number, hook in value.items()
                if not torch_internals.defined_in(hook, _OURS, "torch.distributed")
            )
        kept[name] = value
    return kept
