"""Which modules become FSDP units."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
)
from torch.distributed.tensor import DTensor

from lightning_automodel import torch_internals

WrapPolicy = set[type[nn.Module]] | Callable[[nn.Module], bool] | None


SHARED_BETWEEN_ROOTS = "shared between FSDP roots"


@dataclass(frozen=True)
class ShardingPlan:
    """What is sharded how.

    Attributes:
        roots: FSDP roots, each with the parameters that no unit below it takes.
        units: Modules below the roots that become FSDP units of their own, outermost only.
        replicated: Names of parameters that stay whole on every rank, with the reason.
    """

    roots: list[nn.Module]
    units: list[nn.Module]
    replicated: dict[str, str] = field(default_factory=dict)


def is_sharded(model: nn.Module) -> bool:
    """Whether anything at or below ``model`` is an FSDP2 module or holds a DTensor parameter."""
    return has_fsdp_units(model) or any(isinstance(p, DTensor) for p in model.parameters())


def has_fsdp_units(model: nn.Module) -> bool:
    """Whether anything at or below ``model`` is an FSDP2 module."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def plan_sharding(model: nn.Module, policy: WrapPolicy, root_is_model: bool) -> ShardingPlan:
    """Decide which modules become FSDP units.

    By default a unit is an outermost repeated block: a child with parameters of an ``nn.ModuleList`` or
    ``nn.Sequential``, or, below a module with a ``_no_split_modules`` list (Hugging Face), an instance of a class named
    there. A block that shares a parameter with anything outside of it is left to the root, so that tied parameters stay
    in one unit.

    Args:
        model: The LightningModule, not sharded yet.
        policy: Overrides the default: classes whose (outermost) instances become units, or a predicate on modules.
        root_is_model: Whether the whole model is one root (its steps run as its forward) where its class allows that,
            else each of its children: for manual optimization, where gradients are needed while the step is still
            running.

    Returns:
        The plan; nothing has been changed.
    """
    root_is_model = root_is_model and _takes_fsdp_class(type(model))
    roots = [model] if root_is_model else distinct(callable_children(model))
    starts = list(model.children()) if root_is_model and policy is not None else roots
    units = distinct(unit for start in starts for unit in _find_units(start, policy))
    units = [unit for unit in units if not any(unit is root for root in roots)]
    # Tied parameters must be in one unit: FSDP2 gathers each unit by itself, and torch raises where two hold one.
    units = [unit for unit in units if _belongs_to_one_root(unit, roots) and not _is_used_outside(model, unit)]
    return ShardingPlan(roots=roots, units=units, replicated=_find_replicated(model, roots))


def units_of(model: nn.Module, policy: WrapPolicy, root_is_model: bool) -> list[nn.Module]:
    """FSDP2 modules below the roots of a model that has some; for any other, the units that it would get."""
    if not has_fsdp_units(model):
        return plan_sharding(model, policy, root_is_model).units
    roots = {id(root) for root in fsdp_roots(model)}
    return [module for module in model.modules() if isinstance(module, FSDPModule) and id(module) not in roots]


def _find_units(module: nn.Module, policy: WrapPolicy) -> Iterator[nn.Module]:
    """Yield the outermost units at or below ``module`` in registration order."""
    if policy is not None:
        yield from _outermost(module, _as_predicate(policy))
        return
    # Hugging Face's own word for what must stay on one device; None and missing both occur.
    names = getattr(module, "_no_split_modules", None) or ()
    if named := list(_outermost(module, lambda candidate: class_name(candidate) in names)):
        yield from named
        return
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and can_be_unit(child):
            yield child
        else:
            yield from _find_units(child, policy)


def _outermost(module: nn.Module, matches: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    if can_be_unit(module) and matches(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, matches)


def outermost_instances(model: nn.Module, classes: Iterable[type[nn.Module]]) -> list[nn.Module]:
    """Outermost modules below ``model`` of these classes that have a forward, with parameters or not, each once."""
    wanted, found = tuple(classes), []
    to_visit = list(model.children())[::-1]
    while to_visit:
        module = to_visit.pop()
        if isinstance(uncompiled(module), wanted) and _has_forward(module):
            found.append(module)
        else:
            to_visit.extend(list(module.children())[::-1])
    return distinct(found)


def _as_predicate(policy: set[type[nn.Module]] | Callable[[nn.Module], bool]) -> Callable[[nn.Module], bool]:
    if isinstance(policy, (set, frozenset)):
        classes = tuple(policy)
        return lambda module: isinstance(uncompiled(module), classes)
    return lambda module: policy(uncompiled(module))


def can_be_unit(module: nn.Module) -> bool:
    """FSDP2 needs a module with parameters, a forward of its own and a class that can be extended."""
    return _has_forward(module) and any(True for _ in module.parameters()) and _takes_fsdp_class(type(module))


def _takes_fsdp_class(cls: type) -> bool:
    """Whether FSDP2 can put a class of its own in front of this one on an instance.

    Python allows no such change where the first base has no ``__dict__``, as in ``class Net(Generic[T], nn.Module)``.
    """
    base = cls
    while base.__base__ not in (None, object):
        base = base.__base__
    return base.__dictoffset__ != 0


def _has_forward(module: nn.Module) -> bool:
    return type(uncompiled(module)).forward is not nn.Module.forward


def callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost descendants that can be FSDP roots, looking through containers without a forward."""
    for child in module.children():
        if can_be_unit(child):
            yield child
        else:
            yield from callable_children(child)


def distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Each module once, in order, however many ways lead to it."""
    return list({id(module): module for module in modules}.values())


def _belongs_to_one_root(unit: nn.Module, roots: list[nn.Module]) -> bool:
    return sum(any(module is unit for module in root.modules()) for root in roots) == 1


def _is_used_outside(model: nn.Module, unit: nn.Module) -> bool:
    """Whether any parameter of ``unit`` is reached without passing through it: tied, or of a module shared below it."""
    own = set(unit.parameters())
    seen = {id(unit)}
    to_visit = [model]
    while to_visit:
        module = to_visit.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if not own.isdisjoint(p for p in module._parameters.values() if p is not None):
            return True
        to_visit.extend(module.children())
    return False


def _find_replicated(model: nn.Module, roots: list[nn.Module]) -> dict[str, str]:
    """Parameters that FSDP2 cannot take: scalars, empty and complex ones, and those of no root or of several."""
    owners: Counter[nn.Parameter] = Counter(p for root in roots for p in root.parameters())
    reasons: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            reasons[name] = "a scalar"
        elif parameter.numel() == 0:
            reasons[name] = "empty"
        elif parameter.is_complex():
            reasons[name] = "complex"  # FSDP2 reduces the gradients of a unit in one real dtype
        elif owners[parameter] == 0:
            reasons[name] = "outside of every FSDP root"
        elif owners[parameter] > 1:
            reasons[name] = SHARED_BETWEEN_ROOTS
    return reasons


def fsdp_roots(model: nn.Module) -> list[FSDPModule]:
    """FSDP2 modules that no other FSDP2 module contains."""
    if isinstance(model, FSDPModule):
        return [model]
    found: dict[int, FSDPModule] = {}
    for child in model.children():
        found.update((id(root), root) for root in fsdp_roots(child))
    return list(found.values())


def is_plain_and_trainable(parameter: nn.Parameter) -> bool:
    """Whether a parameter of a sharded model is whole on every rank, so that nobody averages its gradient."""
    return parameter.requires_grad and not isinstance(parameter, DTensor)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` has wrapped, else the module."""
    return torch_internals.uncompiled(module)


def class_name(module: nn.Module) -> str:
    """Name of the user's class: FSDP2 puts a class of its own in front, ``torch.compile`` one around."""
    module = uncompiled(module)
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name
