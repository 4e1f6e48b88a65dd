"""Parameters that sharding replaces by shards, and whether optimizers train what the module has."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.internals import fsdp2
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access, tree_map_only
from lightning_automodel.sharding.units import class_name

_NUM_NAMED = 3


def _refuse_use(name: str, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"{name} was used past the module: sharding has replaced this parameter, and something (a list, a dictionary,"
        " a closure, a view of it that a module keeps) still holds what it was before. Take it from the module each"
        " time (self.weight, a property, or a module that is called), or pass data_parallel='ddp', which replaces"
        " nothing."
    )


class Replaced(nn.Parameter):
    """A plain parameter that a shard has replaced, and something still holds: any use raises."""

    parameter_name: str
    refuses_use = True
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *call: Any, **_: Any) -> Any:
        names: list[str] = []
        tree_map_only(cls, lambda used: names.append(used.parameter_name), call)
        _refuse_use(next(iter(names), "A parameter"))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.parameter_name}, which a shard has replaced>"


def check_foreign_shards(module: nn.Module) -> None:
    """Raise ValueError if ``module`` has parameters that were sharded as a part of another module."""
    sharded = {name: p for name, p in module.named_parameters() if hasattr(p, "fsdp_param")}
    if not sharded:
        return
    groups = fsdp2.groups_of(fsdp2.fsdp_units(module))
    own = {param.sharded_param for group in groups for param in group.fsdp_params}
    foreign = [name for name, parameter in sharded.items() if parameter not in own]
    if foreign:
        raise ValueError(
            f"{', '.join(foreign[:_NUM_NAMED])}: {len(foreign)} parameters that an earlier run has sharded as a part of"
            " another module, which gathers them. Give this one the whole of that module, or build its layers anew and"
            " load their values on all ranks: new.load_state_dict(old.state_dict())."
        )


class ModuleParameters:
    """The parameters of ``module`` before it is distributed, and from :meth:`invalidate_replaced` on those that train.

    Attributes:
        named: Of the distributed module, each once.

    Args:
        module: That is to be distributed.
        parameters: What it has before.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._module = module
        # Not of subclasses: `Module.to` swaps them, which torch refuses for what is weakly referred to.
        plain = {path: own for path, own in parameters.items() if type(own) is nn.Parameter}
        self._before = WeakValueDictionary(plain)
        self._shards: dict[nn.Parameter, nn.Parameter] = {}  # by what they have replaced
        self._places: list[tuple[str, dict[str, nn.Parameter | None], nn.Parameter]] = []

    def invalidate_replaced(self) -> None:
        """The module has its final parameters. Any use of those that shards have replaced raises from now on.

        What holds one would neither see nor train what the module computes with. Their memory is freed.
        """
        for prefix, owner in self._module.named_modules():
            held = torch_internals.parameters_of(owner)
            for name, parameter in held.items():
                if parameter is not None:
                    self._places.append((f"{prefix}.{name}".lstrip("."), held, parameter))
        self.named = dict(self._module.named_parameters())
        self._known = set(map(id, self.named.values()))
        for path, shard in self.named.items():
            old = self._before.get(path)
            if old is None or old is shard:
                continue
            old.data = old.new_empty(()).expand_as(old)
            if old.requires_grad:
                old.register_hook(partial(_refuse_use, path))  # for what was computed of it before
            replaced: Any = old
            replaced.parameter_name = path
            replaced.__class__ = Replaced  # which has a hash of its own
            self._shards[replaced] = shard
        self._before.clear()

    def give_shards(self, optimizer: Optimizer) -> None:
        """Give an optimizer that was made before the module was sharded, as LightningCLI makes it, the shards."""
        if optimizer.state:
            return
        for group in optimizer.param_groups:
            group["params"] = [self._shards.get(parameter, parameter) for parameter in group["params"]]

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError, at set-up or before a step, if a parameter of ``optimizer`` is none of the module's."""
        with plain_access():
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        unknown = [parameter for parameter in trained if id(parameter) not in self._known]
        if unknown:
            raise RuntimeError(
                f"{len(unknown)} parameters of {type(optimizer).__name__} are not those of"
                f" {class_name(self._module)} as it was distributed, so that ranks would train them differently."
                " Collect them in configure_optimizers, from self.parameters(): sharding replaces parameters,"
                " and within a step they are copies, which are freed after it. Register in __init__ or in"
                " configure_model what the module does not know (self.x = nn.Parameter(...), an"
                " nn.ParameterDict or an nn.ParameterList). What joins later can be frozen until then, by"
                " requires_grad_(False)."
            )

    def check_module(self) -> None:
        """Raise RuntimeError before a training step if the module has other parameters by now.

        FSDP2 would put its own ones back in their places.
        """
        replaced = [path for path, holder, own in self._places if not _is_shown(holder, own)]
        if replaced:
            raise RuntimeError(
                f"{', '.join(replaced[:_NUM_NAMED])}: {len(replaced)} parameters that were replaced after"
                " the module was distributed: the optimizer and the other ranks do not know the new ones."
                " Write the new values into the old ones (self.layer.weight.data = values), or replace"
                " them in configure_model()."
            )


def _is_shown(holder: dict[str, nn.Parameter | None], own: nn.Parameter) -> bool:
    """Whether a module has its own parameter, under whatever name, or what FSDP2 has gathered from it.

    A frozen one that is not sharded may be another.
    """
    if any(getattr(parameter, "shard", parameter) is own for parameter in holder.values()):
        return True
    return not own.requires_grad and not isinstance(own, DTensor)
