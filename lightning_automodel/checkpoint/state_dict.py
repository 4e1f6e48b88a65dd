"""The state of a model and its optimizers under the names of parameters: collected for saving, filled when loading."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.optimizers import (
    Loading,
    check_number,
    no_optimizer_state,
    parameter_names,
    some,
)
from lightning_automodel.checkpoint.restorable import names_of_owned
from lightning_automodel.checkpoint.trees import dict_like
from lightning_automodel.internals.torch import (
    EXTRA_STATE,
    loads_by_itself,
    module_versions,
    with_module_versions,
    without_wrappers,
)

MODEL = "state_dict"

OwnedParameters = Callable[[Optimizer], Mapping[nn.Parameter, bool]]
"""Of an optimizer: the parameters that it steps whole, and whether this rank owns them."""

OPTIMIZERS = "optimizer_states"

EXTRA_STATES = "lightning_automodel_extra_state"
"""Key in ``meta.pt`` of what ``get_extra_state`` returns: torch would flatten dicts, and lose empty ones."""

MODULE_VERSIONS = "lightning_automodel_module_versions"
"""Key in ``meta.pt`` of what torch notes of each module (``_version``). One file has it on the model's state dict."""

SHARDED_STATES = "lightning_automodel_shards"
"""Key in one file of a list: the places of its dicts whose tensors were sharded when it was saved."""


def is_extra_state(name: str) -> bool:
    """Whether a module's ``get_extra_state`` has returned the entry ``name`` of the model's state."""
    return name.rpartition(".")[2] == EXTRA_STATE


class Saved(ABC):
    """A checkpoint that is open for loading, of either form.

    Attributes:
        path: Path of the checkpoint.
        rest: The checkpoint without the states of model and optimizers.
        entries: Tensors, with or without values, by flattened name; None for other objects.
        module_versions: What torch has noted of each module, by its name.
        world_size: Ranks that wrote a directory; None for one file.
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
        """States of optimizers, with parameters by name and a place for each tensor (:mod:`.trees`)."""

    @property
    def model(self) -> dict[str, Tensor | None]:
        """Entries of the model's state by name."""
        return {n.removeprefix(f"{MODEL}."): entry for n, entry in self.entries.items() if n.startswith(f"{MODEL}.")}

    def read_model(self, names: Iterable[str]) -> dict[str, Any]:
        """The entries of the model's state with these ``names``, tensors whole and in host memory."""
        entries = self.model
        found = {name: None if (e := entries[name]) is None else torch.empty_like(e, device="cpu") for name in names}
        self.read_into({MODEL: found})
        return found


def model_state(model: nn.Module) -> dict[str, Any]:
    """State dict of the model's own tensors, which are not copied, under names without wrappers."""
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
                f"two entries of the state are named {key} without the prefixes of torch.compile and activation"
                f" checkpointing, one of them {name}: rename one of the modules"
            )
        named[key] = value
    return named


def whole(state: Any, keep: bool) -> Any:
    """``state``, nested collections, with whole tensors on the CPU. Every rank must call it if any is sharded.

    Gathers one tensor at a time: besides the shards, a rank holds one whole tensor on its device. A rank with ``keep``
    also holds the whole state in host memory; the others get an empty dict.
    """

    def gathered(tensor: Tensor) -> Tensor | None:
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return None if not keep else tensor if tensor.is_meta else tensor.cpu()

    found = _converted(state, gathered)
    return found if keep else {}


def _converted(state: dict[str, Any], convert: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
    """A copy of a checkpoint, or of a state in it, whose tensors are those that ``convert`` returns."""
    found = apply_to_collection(state, Tensor, convert, allow_frozen=True)
    if versions := module_versions(state):
        return with_module_versions(found, versions)
    if versions := module_versions(state.get(MODEL, {})):
        found[MODEL] = with_module_versions(found[MODEL], versions)
    return found


def copied(states: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``states`` in host memory, which training does not change; pinned, of tensors on an accelerator.

    torch's ``DefaultStager`` (2.13 to 2.15), as ``async_save`` uses it, loses that a tensor is a conjugate or negative
    view of its storage, cannot copy tensors without a storage or quantised ones, copies the whole storage of a view,
    and pins memory for CUDA alone.
    """
    found = _converted(states, _copy_to_host)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return found


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A copy, of an accelerator's tensor complete once the device is synchronised."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return tensor
    is_view = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type == "cpu" or tensor.layout != torch.strided or tensor.is_quantized or is_view:
        return tensor.to("cpu", copy=True)
    # Into pageable memory the device would copy by way of a buffer of its driver, and the host wait for each tensor.
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def load_model(saved: Saved, model: nn.Module, optimizers: list[Optimizer], strict: bool) -> None:
    """Fill a model, once it and its ``optimizers`` were checked. Every rank must call it.

    Raises :class:`CheckpointError`, and loads nothing, if entries are missing, left over (``strict`` only), or have
    other shapes, or the optimizers differ from the saved ones.
    """
    model.zero_grad()  # which ends open windows, if a hook loads weights within a fit
    of_model = model_state(model)
    what = f"Cannot load {saved.path}"
    targets: dict[str, Any] = {}
    with on_every_rank(what):
        targets[MODEL] = _model_targets(saved, model, of_model, strict)
        _loadings(saved, model, optimizers, owned=lambda optimizer: {})
    # Everything fits on every rank: from here on tensors are overwritten.
    saved.read_into(targets)
    with on_every_rank(what):
        _load_model(model, targets[MODEL], saved.module_versions, strict)


def load_optimizers(saved: Saved, model: nn.Module, optimizers: list[Optimizer], owned: OwnedParameters) -> None:
    """Fill the optimizers of a model. Every rank must call it.

    What had no state when it was saved (an optimizer that had not stepped, a parameter without gradients so far) starts
    without state. Saved options of optimizers win; others stay this run's.

    Raises :class:`CheckpointError`, and changes none, if they differ from the saved ones.
    """
    loadings: list[Loading] = []
    with on_every_rank(f"Cannot load {saved.path}"):
        loadings = _loadings(saved, model, optimizers, owned)
    targets: dict[str, Any] = {}
    for loading in loadings:
        targets.update(loading.make_targets())
    saved.read_into(targets)
    for loading in loadings:
        loading.finish()


def _loadings(saved: Saved, model: nn.Module, optimizers: list[Optimizer], owned: OwnedParameters) -> list[Loading]:
    states = saved.optimizer_states() if optimizers else []
    if optimizers and not states:
        raise no_optimizer_state(0)
    check_number("optimizers", len(states), len(optimizers))
    named = {without_wrappers(name): parameter for name, parameter in model.named_parameters()}
    parameters = {name: parameter.detach() for name, parameter in named.items()}
    loadings: list[Loading] = []
    for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
        names = parameter_names(model, optimizer)
        owned_names = names_of_owned(named, owned(optimizer))
        loadings.append(Loading(state, saved.entries, optimizer, parameters, names, index, owned_names))
    return loadings


def _model_targets(saved: Saved, model: nn.Module, own: dict[str, Any], strict: bool) -> dict[str, Any]:
    """What to read of the model's saved state: its ``own`` tensors, else new ones, which its modules take apart.

    Raises CheckpointError unless the two states match. Where modules load by themselves, they decide.
    """
    entries = saved.model
    prefixes = _loading_by_themselves(model)
    _check_model(entries, own, strict, prefixes)
    targets: dict[str, Any] = {}
    for name, entry in entries.items():
        is_own = name in own
        if not is_own and not name.startswith(prefixes):
            continue
        is_resized = isinstance(own.get(name), Tensor) and entry is not None and own[name].size() != entry.size()
        if entry is not None and (not is_own or is_resized or is_extra_state(name)):
            targets[name] = torch.empty(entry.size(), dtype=entry.dtype)
        else:
            targets[name] = own.get(name)
    return targets


def _loading_by_themselves(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of what is below the modules that load by themselves."""
    paths = [without_wrappers(path) for path, each in model.named_modules() if loads_by_itself(each)]
    return tuple(f"{path}." if path else "" for path in paths)


def _check_model(
    entries: Mapping[str, Tensor | None], targets: dict[str, Any], strict: bool, prefixes: tuple[str, ...]
) -> None:
    """Raise CheckpointError unless the entries match, apart from those whose names begin with one of ``prefixes``."""
    missing = [name for name in targets if name not in entries and not name.startswith(prefixes)]
    unknown = [name for name in entries if name not in targets and not name.startswith(prefixes)]
    # Nothing in common is an error also where loading is not strict: it would train from scratch in silence.
    if (targets and len(missing) == len(targets)) or (strict and (missing or unknown)):
        raise _mismatch(missing, unknown)
    for name, target in targets.items():
        entry = entries.get(name)
        if not isinstance(target, Tensor) or entry is None or is_extra_state(name) or entry.size() == target.size():
            continue
        # A module may resize a buffer, but not its shards.
        if isinstance(target, DTensor) or not name.startswith(prefixes):
            there, here = list(entry.size()), list(target.size())
            raise CheckpointError(f"{name} has shape {there} in the checkpoint and {here} in this model")


def _mismatch(missing: list[str], unknown: list[str]) -> CheckpointError:
    differing = [f"{word} {some(names)}" for word, names in (("missing", missing), ("unexpected", unknown)) if names]
    return CheckpointError(
        f"it does not match the model: {', '.join(differing)}"
        " (with LightningModule.strict_loading = False, what both have is loaded)"
    )


def under_own_names(
    model: nn.Module, state: Mapping[str, Any], versions: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """``state`` as ``model.load_state_dict`` takes it: names with wrappers, and the versions of its modules."""
    own = model.state_dict().keys()
    name_of = {without_wrappers(name): name for name in own}
    named = {name if name in own else name_of.get(without_wrappers(name), name): value for name, value in state.items()}
    paths = {path: without_wrappers(f"{path}.").removesuffix(".") for path, _ in model.named_modules()}
    return with_module_versions(named, {path: versions[name] for path, name in paths.items() if name in versions})


def _load_model(model: nn.Module, state: dict[str, Any], versions: Mapping[str, dict[str, Any]], strict: bool) -> None:
    """Hand ``state`` to the modules, whose own tensors in it have their values already."""
    found = model.load_state_dict(under_own_names(model, state, versions), strict=False)
    if found is None:  # of a load_state_dict of the user's
        return
    # The rest was compared before.
    unknown = [name for name in found.unexpected_keys if without_wrappers(name) in state]
    missing = [name for name in found.missing_keys if without_wrappers(name).startswith(_loading_by_themselves(model))]
    if strict and (missing or unknown):
        raise _mismatch(missing, unknown)


# --- Shards beside the model, such as callbacks' averages of the weights ----------------------------------------------


def dicts_in(tree: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, dict[Any, Any]]]:
    """Each dict within ``tree`` with its place, such as ``"callbacks/EMA"``; outer ones first."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{place}{key}", value
            yield from dicts_in(value, f"{place}{key}/")


def sharded_states(tree: Mapping[str, Any]) -> list[str]:
    """Places of the dicts in ``tree`` that hold shards."""
    return [place for place, each in dicts_in(tree) if any(isinstance(leaf, DTensor) for leaf in each.values())]


def split_shards(tree: dict[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``tree``, left unchanged, into what is whole on every rank and the tensors of sharded states, by place.

    Raises ValueError if there are shards in a list, or under names that are not in the model's state's ``names``.
    """
    rest, shards = with_own_dicts(tree), dict[str, Any]()
    for place, each in [("", rest), *dicts_in(rest)]:
        listed = [leaf for value in each.values() if isinstance(value, (list, tuple)) for leaf in value]
        if any(isinstance(leaf, DTensor) for leaf in each.values()):
            shards[place] = {name: each.pop(name) for name, leaf in list(each.items()) if isinstance(leaf, Tensor)}
        if any(isinstance(leaf, DTensor) for leaf in listed) or not set(names).issuperset(shards.get(place, ())):
            raise shards_that_cannot_be_loaded(place or "top level")
    return rest, shards


def shards_that_cannot_be_loaded(place: str) -> ValueError:
    """The error for shards at a ``place`` of the checkpoint where nobody would find them again."""
    return ValueError(
        f"The checkpoint's {place} holds shards in a list or an object, or beside names that are not in the model's"
        " state dict, so that they could not be loaded again: save shards in a dict under the names of the parameters"
        " that they belong to, or tensor.full_tensor(), called on every rank."
    )


def with_own_dicts(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``tree`` whose dicts are new, down to its leaves."""
    items = {key: with_own_dicts(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return dict_like(tree, items)


def restore_shards(saved: Saved, tree: dict[str, Any], model_state: dict[str, Any]) -> None:
    """Put sharded states back into ``tree``, a part of ``saved.rest``, sharded like ``model_state``. A collective."""
    for place, each in dicts_in(tree):
        shards = {
            name: torch.empty_like(own, dtype=entry.dtype)
            for name, own in model_state.items()
            if (entry := saved.entries.get(f"{place}.{name}")) is not None
        }
        if shards:
            saved.read_into({place: shards})
            each.update(shards)
