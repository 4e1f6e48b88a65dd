"""The state of a model and its optimizers under the names of parameters: collected for saving, filled when loading."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.torch_internals import (
    EXTRA_STATE,
    loads_by_itself,
    module_versions,
    with_module_versions,
    without_wrappers,
)

MODEL = "state_dict"

EXTRA_STATES = "lightning_automodel_extra_state"
"""Key in ``meta.pt`` of what ``get_extra_state`` returns: torch would flatten dicts, and lose empty ones."""

MODULE_VERSIONS = "lightning_automodel_module_versions"
"""Key in ``meta.pt`` of what torch notes of each module (``_version``). One file has it on the model's state dict."""

SHARDED_STATES = "lightning_automodel_shards"
"""Key in one file of a list: the places of its dicts whose tensors were sharded when it was saved."""


def optimizer_key(index: int) -> str:
    """Key of the state of the ``index``-th optimizer."""
    return f"optimizer_{index}"


def is_optimizer_key(key: str) -> bool:
    """Whether ``key`` is the key of an optimizer's state."""
    start, _, index = key.rpartition("_")
    return start == "optimizer" and index.isdecimal()


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
    named = {without_wrappers(name): value for name, value in state.items()}
    return with_module_versions(named, module_versions(state))


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
    """A copy of ``states`` in host memory, which training does not change.

    torch's ``DefaultStager`` (2.13 to 2.15) loses that a tensor is a conjugate or negative view of its storage, and
    cannot copy tensors without a storage or quantised ones.
    """
    found = _converted(
        states, lambda each: each if each.is_meta else each.detach().to("cpu", copy=True, non_blocking=True)
    )
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return found


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name, with the optimizer's own tensors; empty if :func:`has_state` is false."""
    state = optimizer.state_dict()
    return by_name(state, parameter_names(model, optimizer)) if has_state(state) else {}


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of an optimizer's parameters in its order."""
    names = {id(parameter): without_wrappers(name) for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state with parameters by name, also where they are numbered, as plain optimizers do."""
    ids = [each for group in state["param_groups"] for each in group["params"]]
    if not all(isinstance(each, int) for each in ids):
        return state
    if len(ids) != len(names):
        raise CheckpointError(f"the saved optimizer has {len(ids)} parameters, and this run's has {len(names)}")
    name_of = dict(zip(ids, names, strict=True))
    groups = [{**group, "params": [name_of[each] for each in group["params"]]} for group in state["param_groups"]]
    return {"state": {name_of.get(each, each): value for each, value in state["state"].items()}, "param_groups": groups}


def has_state(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state dict has torch's form. That of Lightning's stand-in for no optimizer is empty."""
    return "param_groups" in state


def load_state(saved: Saved, model: nn.Module, optimizers: list[Optimizer], strict: bool) -> None:
    """Fill a model and its optimizers, once everything was checked. Every rank must call it.

    What had no state when it was saved (an optimizer that had not stepped, a parameter without gradients so far) starts
    without state. Saved options of optimizers win; others stay this run's.

    Raises :class:`CheckpointError`, and loads nothing, if entries are missing, left over (``strict`` only), or have
    other shapes, or the optimizers differ from the saved ones.
    """
    model.zero_grad()  # which ends open windows, if a hook loads weights within a fit
    of_model = model_state(model)
    parameters = {without_wrappers(name): parameter.detach() for name, parameter in model.named_parameters()}
    names = [parameter_names(model, optimizer) for optimizer in optimizers]
    what = f"Cannot load {saved.path}"
    targets: dict[str, Any] = {}
    with on_every_rank(what):
        targets[MODEL] = _model_targets(saved, model, of_model, strict)
        keys = {name.partition(".")[0] for name in saved.entries}
        if optimizers and (num_saved := sum(map(is_optimizer_key, keys))):
            check_number("optimizers", num_saved, len(optimizers))
        for index, optimizer in enumerate(optimizers):
            own = {name: parameters[name] for name in names[index]}
            targets[optimizer_key(index)] = _optimizer_targets(saved.entries, optimizer, own, index)
    # Everything fits on every rank: from here on tensors are overwritten.
    saved.read_into(targets)
    with on_every_rank(what):
        _load_model(model, targets[MODEL], saved.module_versions, strict)
    for index, optimizer in enumerate(optimizers):
        read, packed = targets[optimizer_key(index)], optimizer.state_dict()
        groups = packed["param_groups"]
        ids = dict(zip(names[index], (each for group in groups for each in group["params"]), strict=True))
        packed["state"] = {ids[name]: value for name, value in read["state"].items()}
        packed["param_groups"] = [{**group, **each} for group, each in zip(groups, read["param_groups"], strict=True)]
        optimizer.load_state_dict(packed)


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
    differing = [f"{word} {_some(names)}" for word, names in (("missing", missing), ("unexpected", unknown)) if names]
    return CheckpointError(
        f"it does not match the model: {', '.join(differing)}"
        " (with LightningModule.strict_loading = False, what both have is loaded)"
    )


def under_own_names(
    model: nn.Module, state: Mapping[str, Any], versions: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """``state`` as ``model.load_state_dict`` takes it: names with wrappers, and the versions of its modules."""
    name_of = {without_wrappers(name): name for name in model.state_dict()}
    named = {name_of.get(without_wrappers(name), name): value for name, value in state.items()}
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


def no_optimizer_state(index: int) -> CheckpointError:
    """The error for an optimizer of which nothing was saved."""
    return CheckpointError(
        f"it holds no state of optimizer {index}: it was saved with save_weights_only=True, or with fewer"
        " optimizers; validate, test and predict can load it"
    )


def check_number(what: str, saved: int, own: int) -> None:
    """Raise CheckpointError unless as many were saved as this run has."""
    if saved != own:
        raise CheckpointError(f"it holds {saved} {what}, and this run has {own}: {_AS_SAVED}")


def check_groups(optimizer: Optimizer, saved: Sequence[Collection[str]], index: int) -> None:
    """Raise CheckpointError unless as many groups were ``saved``, each with the options of this optimizer's type.

    Flags may be missing: newer releases of torch have added some.
    """
    check_number(f"groups of parameters of optimizer {index}", len(saved), len(optimizer.param_groups))
    needed = {name for name, value in optimizer.defaults.items() if not (value is None or isinstance(value, bool))}
    for settings in saved:
        if missing := sorted(needed - set(settings)):
            raise CheckpointError(
                f"optimizer {index} is a {type(optimizer).__name__}, and the checkpoint lacks its {_some(missing)}:"
                f" {_AS_SAVED}"
            )


_AS_SAVED = "configure the optimizers that the run was saved with"


def _optimizer_targets(
    entries: Mapping[str, Tensor | None], optimizer: Optimizer, parameters: Mapping[str, Tensor], index: int
) -> dict[str, Any]:
    """What to read of an optimizer's saved state: shards for what has its parameter's shape, the rest whole."""
    start = f"{optimizer_key(index)}."
    settings: dict[int, set[str]] = {}
    state: dict[str, dict[str, Tensor | None]] = {}
    for place in (each.removeprefix(start) for each in entries if each.startswith(start)):
        part, _, within = place.partition(".")
        name, _, kind = within.rpartition(".")
        if part == "param_groups":
            group, setting, *_ = within.split(".")
            settings.setdefault(int(group), set()).add(setting)
        elif name in parameters:
            state.setdefault(name, {})[kind] = _empty(entries[f"{start}{place}"], like=parameters[name])
        elif name.rpartition(".")[0] in parameters:
            raise CheckpointError(f"optimizer {index} keeps a dict for {name}, which cannot be loaded into shards")
    if not settings:
        raise no_optimizer_state(index)
    check_groups(optimizer, list(settings.values()), index)
    groups: list[dict[str, Any]] = []
    for i, own in enumerate(optimizer.param_groups):
        # By what was saved: user code may have put more into a group while it trained.
        places = {setting: f"{start}param_groups.{i}.{setting}" for setting in settings[i] - {"params"}}
        values = {setting: _empty(entries[place]) for setting, place in places.items() if place in entries}
        groups.append({**{setting: own[setting] for setting in places.keys() & own.keys()}, **values})
    return {"state": state, "param_groups": groups}


def _empty(entry: Tensor | None, like: Tensor | None = None) -> Tensor | None:
    if entry is None:
        return None
    if like is not None and entry.dim() and entry.size() == like.size():
        return torch.empty_like(like, dtype=entry.dtype)
    return torch.empty(entry.size(), dtype=entry.dtype)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


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
            raise ValueError(
                f"The checkpoint's {place or 'top level'} holds shards in a list, or beside names that are not in the"
                " model's state dict, so that they could not be loaded again: save shards in a dict under the names of"
                " the parameters that they belong to, or tensor.full_tensor(), called on every rank."
            )
    return rest, shards


def with_own_dicts(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``tree`` whose dicts are new, down to its leaves."""
    return {key: with_own_dicts(value) if isinstance(value, dict) else value for key, value in tree.items()}


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
