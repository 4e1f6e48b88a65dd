"""Fills a model and its optimizers from a checkpoint of any form, once both are known to match."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.optimizer_loading import OptimizerLoading
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    PARAMETER_NAMES,
    Names,
    Owners,
    check_groups,
    check_number,
    flat,
    has_groups,
    in_order,
    new_names,
    no_optimizer_state,
    parameter_names,
    some,
)
from lightning_automodel.checkpoint.restorable import names_of_owned
from lightning_automodel.checkpoint.state_dict import (
    MODEL,
    OPTIMIZERS,
    Saved,
    dicts_in,
    is_extra_state,
    model_state,
)
from lightning_automodel.internals.torch import (
    loads_by_itself,
    module_versions,
    with_module_versions,
    without_wrappers,
)

OwnedParameters = Callable[[Optimizer], Mapping[nn.Parameter, bool]]
"""The parameters that an optimizer steps whole, and whether this rank owns them."""


def load_model(saved: Saved, model: nn.Module, optimizers: list[Optimizer], strict: bool) -> None:
    """Fill a model, after checking it and its ``optimizers``. Every rank must call it.

    Raises :class:`CheckpointError`, and loads nothing, if entries are missing or left over (only if
    ``strict``), if entries have other shapes, or if the optimizers differ from the saved ones.
    """
    model.zero_grad()  # ends open windows, in case a hook loads weights within a fit
    of_model = model_state(model)
    what = f"Cannot load {saved.path}"
    targets: dict[str, Any] = {}
    with on_every_rank(what):
        targets[MODEL] = _model_targets(saved, model, of_model, strict)
        _loadings(saved, model, optimizers, owned=lambda optimizer: {})
    # Everything matches on every rank: from here on tensors are overwritten.
    saved.read_into(targets)
    with on_every_rank(what):
        _load_model(model, targets[MODEL], saved.module_versions, strict)


def load_optimizers(
    saved: Saved, model: nn.Module, optimizers: list[Optimizer], owned: OwnedParameters
) -> None:
    """Fill the optimizers of a model. Every rank must call it.

    An optimizer that had not stepped when it was saved, or a parameter that had no gradients yet, starts
    without state. Saved options override this run's; options that were not saved stay this run's.

    Raises :class:`CheckpointError`, and changes no optimizer, if they differ from the saved ones.
    """
    loadings: list[OptimizerLoading] = []
    with on_every_rank(f"Cannot load {saved.path}"):
        loadings = _loadings(saved, model, optimizers, owned)
    targets: dict[str, Any] = {}
    for loading in loadings:
        targets.update(loading.make_targets())
    saved.read_into(targets)
    for loading in loadings:
        loading.finish()


def _loadings(
    saved: Saved, model: nn.Module, optimizers: list[Optimizer], owned: OwnedParameters
) -> list[OptimizerLoading]:
    if not optimizers:
        return []
    states = saved.optimizer_states()
    if not states:
        raise no_optimizer_state()
    check_number("optimizers", len(states), len(optimizers))
    named = {without_wrappers(name): parameter for name, parameter in model.named_parameters()}
    parameters = {name: parameter.detach() for name, parameter in named.items()}
    loadings: list[OptimizerLoading] = []
    for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
        owned_names = names_of_owned(named, owned(optimizer))
        owners = Owners(parameters, parameter_names(model, optimizer))
        loadings.append(OptimizerLoading(state, saved.entries, optimizer, owners, index, owned_names))
    return loadings


def _model_targets(saved: Saved, model: nn.Module, own: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Targets for reading the model's saved state: its ``own`` tensors, or new ones that its modules take apart.

    Raises CheckpointError unless the two states match. Modules that load by themselves check theirs.
    """
    entries = saved.model
    prefixes = _loading_by_themselves(model)
    _check_model(entries, own, strict, prefixes)
    targets: dict[str, Any] = {}
    for name, entry in entries.items():
        if name not in own and not name.startswith(prefixes):
            continue
        target = own.get(name)
        if entry is not None:
            is_resized = isinstance(target, Tensor) and target.size() != entry.size()
            if name not in own or is_resized or is_extra_state(name):
                target = torch.empty(entry.size(), dtype=entry.dtype)
        targets[name] = target
    return targets


def _loading_by_themselves(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the entries' names below the modules that load by themselves."""
    paths = [without_wrappers(path) for path, module in model.named_modules() if loads_by_itself(module)]
    return tuple(f"{path}." if path else "" for path in paths)


def _check_model(
    entries: Mapping[str, Tensor | None], targets: dict[str, Any], strict: bool, prefixes: tuple[str, ...]
) -> None:
    """Raise CheckpointError unless the entries match, apart from those below the ``prefixes``."""
    missing = [name for name in targets if name not in entries and not name.startswith(prefixes)]
    unknown = [name for name in entries if name not in targets and not name.startswith(prefixes)]
    # Nothing in common is an error even without ``strict``: training would silently start from scratch.
    if (targets and len(missing) == len(targets)) or (strict and (missing or unknown)):
        raise _mismatch(missing, unknown)
    for name, target in targets.items():
        entry = entries.get(name)
        if not isinstance(target, Tensor) or entry is None or is_extra_state(name):
            continue
        if entry.size() == target.size():
            continue
        # A module may resize a buffer, but not a sharded tensor.
        if isinstance(target, DTensor) or not name.startswith(prefixes):
            there = list(entry.size())
            here = list(target.size())
            raise CheckpointError(f"{name} has shape {there} in the checkpoint and {here} in this model")


def _mismatch(missing: list[str], unknown: list[str]) -> CheckpointError:
    differing: list[str] = []
    if missing:
        differing.append(f"missing {some(missing)}")
    if unknown:
        differing.append(f"unexpected {some(unknown)}")
    return CheckpointError(
        f"it does not match the model: {', '.join(differing)}"
        " (with LightningModule.strict_loading = False, what both have is loaded)"
    )


def under_own_names(
    model: nn.Module, state: Mapping[str, Any], versions: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """``state`` for ``model.load_state_dict``: under names with wrappers, and with its modules' versions."""
    own = model.state_dict().keys()
    own_name = {without_wrappers(name): name for name in own}
    renamed: dict[str, Any] = {}
    for name, value in state.items():
        if name not in own:
            name = own_name.get(without_wrappers(name), name)
        renamed[name] = value
    own_versions: dict[str, dict[str, Any]] = {}
    for path, _ in model.named_modules():
        name = without_wrappers(f"{path}.").removesuffix(".")
        if name in versions:
            own_versions[path] = versions[name]
    return with_module_versions(renamed, own_versions)


def _load_model(
    model: nn.Module, state: dict[str, Any], versions: Mapping[str, dict[str, Any]], strict: bool
) -> None:
    """Pass ``state`` to the modules; those of their own tensors that are in it have their values already."""
    result = model.load_state_dict(under_own_names(model, state, versions), strict=False)
    if result is None:  # from a user's load_state_dict
        return
    prefixes = _loading_by_themselves(model)
    # The other entries were compared before.
    unknown = [name for name in result.unexpected_keys if without_wrappers(name) in state]
    missing = [name for name in result.missing_keys if without_wrappers(name).startswith(prefixes)]
    if strict and (missing or unknown):
        raise _mismatch(missing, unknown)


def fill_plain_module(
    module: nn.Module, checkpoint: dict[str, Any], own: list[Optimizer], strict: bool
) -> None:
    """Load the state of a replicated ``module`` through its hooks, which may rename entries. Not a collective.

    Puts optimizer states in the order of the run's ``own`` optimizers, which Lightning fills afterwards.
    Raises :class:`CheckpointError` if the checkpoint does not match them, or holds another model; torch has
    then loaded the entries that match.
    """
    if own:
        states = checkpoint.get(OPTIMIZERS, [])
        if not states:
            raise no_optimizer_state()
        check_number("optimizers", len(states), len(own))
        names_by_optimizer = checkpoint.get(PARAMETER_NAMES) or [None] * len(own)
        checkpoint[OPTIMIZERS] = [
            _as_own(module, optimizer, state, names, index)
            for index, (optimizer, state, names) in enumerate(
                zip(own, states, names_by_optimizer, strict=True)
            )
        ]
    saved = checkpoint[MODEL]
    state = under_own_names(module, saved, module_versions(saved))
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"it does not match the model: {error} (with LightningModule.strict_loading = False, names that"
            " only one of the two has are skipped)"
        ) from error


def _as_own(
    module: nn.Module, optimizer: Optimizer, state: Any, saved_names: Names | None, index: int
) -> Any:
    """A saved optimizer's ``state`` in this run's order of parameters, if it or ``saved_names`` has names."""
    if not has_groups(state):  # not torch's form: the optimizer checks it when it loads
        return state
    state = {key: value for key, value in state.items() if key != NOTES}
    groups = state["param_groups"]
    check_groups(optimizer, groups, index)
    saved = saved_names or [list(group["params"]) for group in groups]
    if not all(isinstance(name, str) for name in flat(saved)):
        return state
    names = parameter_names(module, optimizer)
    known = {without_wrappers(name): parameter for name, parameter in module.named_parameters()}
    renamed = new_names(saved, names, known, index)
    return in_order(state, saved, renamed, names)


# --- Shards beside the model, such as callbacks' averages of the weights ----------------------------------


def restore_shards(saved: Saved, tree: dict[str, Any], model_state: dict[str, Any]) -> None:
    """Read sharded states into ``tree``, part of ``saved.rest``, sharded like ``model_state``. A collective."""
    for place, values in dicts_in(tree):
        shards = {
            name: torch.empty_like(own, dtype=entry.dtype)
            for name, own in model_state.items()
            if (entry := saved.entries.get(f"{place}.{name}")) is not None
        }
        if shards:
            saved.read_into({place: shards})
            values.update(shards)
