"""The state of a model and its optimizers under the names of parameters, for saving and loading."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.trees import dict_like
from lightning_automodel.internals.dtensor import plain_dtensor
from lightning_automodel.internals.torch import (
    EXTRA_STATE,
    module_versions,
    with_module_versions,
    without_wrappers,
)

MODEL = "state_dict"
"""Key of the model's state in a checkpoint."""

OPTIMIZERS = "optimizer_states"
"""Key of the optimizers' states in a checkpoint."""

STATES = (MODEL, OPTIMIZERS)

EXTRA_STATES = "lightning_automodel_extra_state"
"""Key in ``meta.pt`` of extra states (``get_extra_state``): torch would flatten dicts and lose empty ones."""

MODULE_VERSIONS = "lightning_automodel_module_versions"
"""Key in ``meta.pt`` of the modules' metadata (``_version``), an attribute of the state dict in one file."""

SHARDED_STATES = "lightning_automodel_shards"
"""Key in one file of a list: the places of its dicts whose tensors were sharded when it was saved."""


def is_extra_state(name: str) -> bool:
    """Whether the entry ``name`` of the model's state comes from a module's ``get_extra_state``."""
    return name.rpartition(".")[2] == EXTRA_STATE


def empty_on_host(entry: Tensor | None) -> Tensor | None:
    """A tensor in host memory to read ``entry`` into; None if that is not a tensor."""
    if entry is None:
        return None
    return torch.empty_like(entry, device="cpu")


class Saved(ABC):
    """A checkpoint of either form, open for loading.

    Attributes:
        path: Path of the checkpoint.
        rest: The checkpoint without the states of model and optimizers.
        entries: Tensors, with or without values, by flattened name; None for other objects.
        module_versions: torch's metadata of each module, by the module's name.
        world_size: Number of ranks that wrote a directory; None for one file.
    """

    path: str
    rest: dict[str, Any]
    entries: Mapping[str, Tensor | None]
    module_versions: Mapping[str, dict[str, Any]]
    world_size: int | None = None

    @abstractmethod
    def read_into(self, targets: dict[str, Any]) -> None:
        """Overwrite the tensors in ``targets`` in place, and replace its other values."""

    @abstractmethod
    def optimizer_states(self) -> list[dict[str, Any]]:
        """States of the optimizers, with parameters by name and a place for each tensor (:mod:`.trees`)."""

    @property
    def model(self) -> dict[str, Tensor | None]:
        """Entries of the model's state by name."""
        prefix = f"{MODEL}."
        entries = self.entries.items()
        return {name.removeprefix(prefix): entry for name, entry in entries if name.startswith(prefix)}

    def read_model(self, names: Iterable[str]) -> dict[str, Any]:
        """The entries of the model's state with these ``names``; tensors are whole and in host memory."""
        entries = self.model
        state: dict[str, Any] = {name: empty_on_host(entries[name]) for name in names}
        self.read_into({MODEL: state})
        return state


def model_state(model: nn.Module) -> dict[str, Any]:
    """State dict of the model's own tensors, not copies, under names without wrappers."""
    state = model.state_dict()
    named = without_wrappers_in(state)
    return with_module_versions(named, module_versions(state))


def without_wrappers_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` under names without wrappers; CheckpointError if two different entries have the same one."""
    named: dict[str, Any] = {}
    for name, value in state.items():
        key = without_wrappers(name)
        if key in named and named[key] is not value:
            raise CheckpointError(
                f"two entries of the state are named {key} without the prefixes of torch.compile and"
                f" activation checkpointing, one of them {name}: rename one of the modules"
            )
        named[key] = value
    return named


def whole(state: Any, keep: bool) -> Any:
    """``state``, nested collections, with whole tensors on the CPU. A collective if any tensor is sharded.

    It gathers one tensor at a time: besides the shards, a rank holds one whole tensor on its device. A rank
    with ``keep`` also holds the whole state in host memory; the others get an empty dict.
    """

    def gathered(tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not keep:
            return None
        if tensor.is_meta:
            return tensor
        return tensor.cpu()

    converted = _converted(state, gathered)
    if keep:
        return converted
    return {}


def _converted(state: dict[str, Any], convert: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
    """A copy of a checkpoint, or of a state in it, with ``convert`` applied to each tensor."""
    converted = apply_to_collection(state, Tensor, convert, allow_frozen=True)
    if versions := module_versions(state):
        return with_module_versions(converted, versions)
    if versions := module_versions(state.get(MODEL, {})):
        converted[MODEL] = with_module_versions(converted[MODEL], versions)
    return converted


def plain_dtensors(states: dict[str, Any]) -> dict[str, Any]:
    """``states`` with what torch's writers know: each takes a rank's part, where user code would get the whole."""
    return _converted(states, plain_dtensor)


def copied(states: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``states`` in host memory that training does not change, pinned for accelerators' tensors.

    torch's ``DefaultStager`` (2.13 to 2.15), which ``async_save`` uses, forgets that a tensor is a conjugate
    or negative view of its storage, cannot copy quantised tensors or tensors without a storage, copies the
    whole storage of a view, and pins memory for CUDA only.
    """
    copies = _converted(states, _copy_to_host)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return copies


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete once the device of ``tensor`` is synchronised."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return tensor
    is_view = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type == "cpu" or tensor.layout != torch.strided or tensor.is_quantized or is_view:
        return tensor.to("cpu", copy=True)
    # A copy to pageable memory goes through a buffer of the driver, and the host waits for each tensor.
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def dicts_in(tree: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, dict[Any, Any]]]:
    """Each dict within ``tree`` with its place, such as ``"callbacks/EMA"``; outer dicts first."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{place}{key}", value
            yield from dicts_in(value, f"{place}{key}/")


def sharded_states(tree: Mapping[str, Any]) -> list[str]:
    """Places of the dicts in ``tree`` that hold shards."""
    return [place for place, values in dicts_in(tree) if _has_shards(values.values())]


def _has_shards(leaves: Iterable[Any]) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in leaves)


def split_shards(tree: dict[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``tree``, left unchanged, into the tensors of sharded states, by place, and everything else.

    Raises ValueError if there are shards in a list, or beside names that are not among the ``names`` of the
    model's state.
    """
    rest = with_own_dicts(tree)
    shards: dict[str, Any] = {}
    for place, values in [("", rest), *dicts_in(rest)]:
        listed = [leaf for value in values.values() if isinstance(value, (list, tuple)) for leaf in value]
        if _has_shards(values.values()):
            tensors = [name for name, leaf in values.items() if isinstance(leaf, Tensor)]
            shards[place] = {name: values.pop(name) for name in tensors}
        if _has_shards(listed) or not set(names).issuperset(shards.get(place, ())):
            raise shards_that_cannot_be_loaded(place or "top level")
    return rest, shards


def shards_that_cannot_be_loaded(place: str) -> ValueError:
    """The error for shards at a ``place`` of the checkpoint from which they could not be loaded."""
    return ValueError(
        f"The checkpoint's {place} holds shards in a list or an object, or beside names that are not in the"
        " model's state dict, so that they could not be loaded again: save shards in a dict under the names"
        " of the parameters that they belong to, or tensor.full_tensor(), called on every rank."
    )


def with_own_dicts(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``tree`` with new dicts at every level and the same leaves."""
    items = dict(tree.items())
    for key, value in items.items():
        if isinstance(value, dict):
            items[key] = with_own_dicts(value)
    return dict_like(tree, items)
