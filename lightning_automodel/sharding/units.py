"""Which modules become FSDP units."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_automodel.internals.torch import parameters_of, uncompiled
from lightning_automodel.sharding.precision import HALF
from lightning_automodel.sharding.quantized import stays_whole

WrapPolicy = set[type[nn.Module]] | Callable[[nn.Module], bool] | None


HEAD_ELEMENTS = 2**24
"""The size from which a head's gradient is reduced by itself. For a smaller one, another collective costs too much."""

_IS_HEAD = "lightning_automodel_head"

_Place = tuple[nn.Module | None, nn.Module | None]  # a root and a unit below it


@dataclass(frozen=True)
class ShardingPlan:
    """What FSDP2 shards: roots, and outermost units below them; and parameters that stay whole.

    ``head``, if any, is gathered with its root, and stays gathered as long. Only its gradient is reduced by
    itself.
    """

    roots: list[nn.Module]
    units: list[nn.Module]
    replicated: set[str]
    head: nn.Module | None = None


def is_sharded(model: nn.Module) -> bool:
    """Whether anything at or below ``model`` holds a DTensor parameter, as FSDP2 modules do."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def plan_sharding(
    model: nn.Module,
    policy: WrapPolicy,
    root_is_model: bool,
    precision: MixedPrecisionPolicy | None = None,
) -> ShardingPlan:
    """Decide which modules become FSDP units; the model is unchanged.

    By default a unit is an outermost repeated block: a child with parameters of an ``nn.ModuleList`` or
    ``nn.Sequential``, or, below a module with a ``_no_split_modules`` list (Hugging Face), an instance of a
    class named there. A block that shares a parameter with anything outside of it is left to the root, so
    that tied parameters stay in one unit: FSDP2 gathers each unit by itself, and torch raises where two hold
    one. A ``policy`` overrides the default: classes whose outermost instances become units, or a predicate.
    Without one, a large head is a group of its own within the root.

    With ``root_is_model`` the whole model is one root, and its steps run as its forward. Else, for manual
    optimization, each child is a root, since gradients are needed while the step still runs.

    ``precision`` has the dtypes of the units, by which more parameters stay whole. Raises ValueError for
    parameters that could neither be sharded nor stay whole. None if nobody asks for what stays whole.
    """
    roots = [model] if root_is_model else callable_children(model)
    named = dict(model.named_parameters())
    modules = list(model.modules())
    large: list[nn.Linear] = []
    if policy is not None:
        starts = model.children() if root_is_model else roots
        found = outermost(starts, lambda module: can_be_unit(module) and matches(module, policy))
    else:
        found = list(dict.fromkeys(block for root in roots for block in _repeated_blocks(root)))
        if root_is_model:
            large = [
                module
                for module in modules
                if isinstance(module, nn.Linear)
                and module.in_features * module.out_features >= HEAD_ELEMENTS
            ]
    found = [unit for unit in found if unit not in roots]
    places = _places(model, roots, {*found, *large})
    shared = {unit for ways in places.values() if len(ways) > 1 for _, unit in ways}
    whole = _stay_whole(modules, named, places, precision)
    # In the root's group its gradient, which is the first that a backward computes, would be reduced with the
    # last, that of the embedding: after the whole backward, which then hides neither of them.
    heads = [
        layer
        for layer in large
        if layer not in found
        and all(p not in whole and places[p] == {(model, layer)} for p in layer.parameters())
    ]
    return ShardingPlan(
        roots,
        units=[unit for unit in found if unit not in shared],
        replicated={name for name, parameter in named.items() if parameter in whole},
        head=heads[0] if len(heads) == 1 else None,
    )


def _places(
    model: nn.Module, roots: Container[nn.Module], units: Container[nn.Module]
) -> dict[nn.Parameter, set[_Place]]:
    """Where each parameter is reached, by all ways to it: the outermost root and unit of each way, if any."""
    places: dict[nn.Parameter, set[_Place]] = defaultdict(set)

    def visit(module: nn.Module, root: nn.Module | None, unit: nn.Module | None) -> None:
        if root is None and module in roots:
            root = module
        if unit is None and module in units:
            unit = module
        for parameter in parameters_of(module).values():
            if parameter is not None:
                places[parameter].add((root, unit))
        for child in module.children():
            visit(child, root, unit)

    visit(model, None, None)
    return places


def _stay_whole(
    modules: Iterable[nn.Module],
    named: Mapping[str, nn.Parameter],
    places: Mapping[nn.Parameter, set[_Place]],
    precision: MixedPrecisionPolicy | None,
) -> set[nn.Parameter]:
    """What FSDP2 cannot take: scalars, empty and complex parameters, codes, and those of no root or of several.

    It reduces the gradients of a unit in one real dtype. Parameters of a TorchScript module cannot be replaced. No
    policy casts running statistics, and torch requires the parameters beside them in their dtype.
    """
    in_half = precision is not None and precision.param_dtype in HALF
    whole: set[nn.Parameter] = set()
    for module in modules:
        is_beside_statistics = in_half and isinstance(getattr(module, "running_mean", None), Tensor)
        if is_beside_statistics or isinstance(module, torch.jit.ScriptModule):
            whole.update(module.parameters(recurse=False))
    for name, parameter in named.items():
        roots = {root for root, _ in places[parameter]}
        is_unfit = parameter.ndim == 0 or parameter.numel() == 0 or parameter.is_complex()
        is_coded = precision is not None and stays_whole(name, parameter, precision)
        if is_unfit or is_coded or len(roots) > 1 or None in roots:
            whole.add(parameter)
    return whole


def mark_head(module: nn.Module) -> None:
    """Note that a module was sharded as the head of its root."""
    vars(module)[_IS_HEAD] = True


def is_head(module: object) -> bool:
    """Whether :func:`mark_head` was called for a module."""
    return _IS_HEAD in vars(module)


def _repeated_blocks(module: nn.Module, is_entry: bool = False) -> Iterator[nn.Module]:
    """Yield the outermost blocks at or below ``module``, which may be below an entry of an ``nn.ModuleDict``.

    Ranks that choose different entries (experts) must not gather different units: Sequentials there are no
    units, and neither are the tails of an adaptive softmax, each of which some rank may not need.
    """
    if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
        return
    # Hugging Face's own word for what must stay on one device; None and missing both occur.
    names = getattr(module, "_no_split_modules", None) or ()
    if names:
        named = outermost(
            [module], lambda candidate: class_name(candidate) in names and can_be_unit(candidate)
        )
        yield from named
        if named:
            return
    repeats = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and not is_entry)
    for child in module.children():
        if repeats and can_be_unit(child):
            yield child
        else:
            in_dict = isinstance(module, nn.ModuleDict) and has_forward(child)
            yield from _repeated_blocks(child, is_entry or in_dict)


def outermost(starts: Iterable[nn.Module], condition: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Modules at or below ``starts`` that meet it, but none inside of another, each once, as they are registered."""
    found: dict[nn.Module, None] = {}
    for module in starts:
        below = [module] if condition(module) else outermost(module.children(), condition)
        found.update(dict.fromkeys(below))
    return list(found)


def matches(module: nn.Module, policy: set[type[nn.Module]] | Callable[[nn.Module], bool]) -> bool:
    """Whether a module is an instance of one of these classes, or meets this predicate."""
    module = uncompiled(module)
    if isinstance(policy, (set, frozenset)):
        return isinstance(module, tuple(policy))
    return policy(module)


def can_be_unit(module: nn.Module) -> bool:
    """Whether ``module`` has what FSDP2 needs: parameters, a forward of its own, and a class that can be changed."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return has_forward(module) and any(True for _ in module.parameters())


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: containers such as ``nn.ModuleList`` cannot."""
    return type(uncompiled(module)).forward is not nn.Module.forward


def callable_children(module: nn.Module) -> list[nn.Module]:
    """Outermost descendants that can be FSDP roots, looking through containers without a forward, each once."""
    return outermost(module.children(), can_be_unit)


def fsdp_roots(model: nn.Module) -> list[FSDPModule]:
    """FSDP2 modules that no other FSDP2 module contains."""
    return cast(list[FSDPModule], outermost([model], lambda module: isinstance(module, FSDPModule)))


def class_name(module: nn.Module) -> str:
    """Name of the user's class, without the classes that FSDP2 and ``torch.compile`` add."""
    return next(cls.__name__ for cls in type(uncompiled(module)).__mro__ if not issubclass(cls, FSDPModule))


def is_a(module: nn.Module, *names: str) -> bool:
    """Whether ``module`` is of a class with one of these names, whose library is not imported for it."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def described(model: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    """For messages: where ``modules`` are in ``model``, and their classes."""
    names = {module: name for name, module in model.named_modules()}
    return [f"{names[module]} ({class_name(module)})".lstrip() for module in modules]
