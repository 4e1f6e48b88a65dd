"""How FSDP2 shards a module for a run: its units, what of it stays gathered, and what is said of that."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.torch import named_tensors
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding import apply, checks, memory, tensor_parallel, units
from lightning_automodel.sharding.shards import shard_parameters
from lightning_automodel.sharding.sync_context import Deferral


@dataclass(frozen=True)
class FSDP2Settings:
    """What was decided for a sharded module.

    Attributes:
        defer: Which reductions wait for the end of a window, as ``defer_fsdp_grad_sync``.
        retains_unsharded: Whether parameters stay gathered for a window.
        prefetch: How many units ahead all-gathers start.
        report: All of it, and why, for ``describe()``.
    """

    defer: Deferral
    retains_unsharded: bool
    prefetch: int
    report: dict[str, Any]


def shard_module(
    module: pl.LightningModule,
    placement: Placement,
    options: StrategyOptions,
    policy: MixedPrecisionPolicy,
    give_values: Callable[[], None],
) -> FSDP2Settings:
    """Make weights equal on all ranks, and shard them unless they are sharded. A collective over the world.

    ``policy`` has the dtypes that units compute and reduce in; ``give_values`` initialises tensors without
    values, once they are sharded.
    """
    mesh = placement.mesh
    plan = None
    with apply.attributes_kept(module):
        if not fsdp2.fsdp_units(module):  # else other code or an earlier run has sharded it
            plan = units.plan_sharding(
                module, options.auto_wrap_policy, module.automatic_optimization, policy
            )
            named = module.named_parameters()
            checks.check_shardable({name: p for name, p in named if name not in plan.replicated})
        tensor_parallel.distribute(module, mesh)
        tensors = named_tensors(module)
        apply.broadcast_states(tensors, mesh)
        if plan is not None:
            checks.check_memory(tensors, plan.replicated)
            apply.apply_fsdp2(module, tensors, plan, mesh, options, policy)
    give_values()
    sharded = fsdp2.fsdp_units(module)
    parameters = dict(module.named_parameters())
    apply.initialise_fsdp2(module, sharded, parameters, mesh.sizes.divisor)
    shard_parameters(sharded, parameters, accept_hooks=options.count_window_ahead)
    report = _report_on_units(module, sharded, parameters)
    report |= memory.choose(parameters.values(), module.automatic_optimization, placement, options)
    if not report["reshard_during_accumulation"]:
        report["reshard_after_forward"] = False
    elif plan is not None:
        report["reshard_after_forward"] = options.reshard_after_forward
    report |= _choose_prefetch(options.prefetch, placement)
    report["cpu_offload"] = options.cpu_offload
    retains_unsharded = not report["reshard_during_accumulation"]
    return FSDP2Settings(report["defer_fsdp_grad_sync"], retains_unsharded, report["prefetch"], report)


def _choose_prefetch(asked: int | Literal["auto"], placement: Placement) -> dict[str, Any]:
    """How many units ahead all-gathers start, and why, for ``describe()``."""
    if placement.mesh.fsdp.size() == 1:
        return {"prefetch": 0}
    if asked != "auto":
        return {"prefetch": asked}
    return {
        "prefetch": int(placement.device.type == "cpu"),
        "prefetch_reason": "auto: 1 on a CPU, where FSDP2 by itself waits for each all-gather, else 0",
    }


def _report_on_units(
    module: pl.LightningModule, sharded: list[Any], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """What is said of the ``sharded`` FSDP2 units, whoever has made them, and of parameters that stay whole."""
    names = dict(zip(sharded, units.described(module, sharded), strict=True))
    roots = units.fsdp_roots(module)
    heads = list(filter(units.is_head, sharded))
    return {
        "roots": [names[unit] for unit in roots],
        "units": [name for unit, name in names.items() if unit not in roots and unit not in heads],
        "head": [names[unit] for unit in heads],
        "replicated": [name for name, p in parameters.items() if not isinstance(p, DTensor)],
    }


def set_prefetch(units_of_roots: Iterable[list[Any]], num_ahead: int, in_background: bool) -> None:
    """Let each FSDP unit start the all-gathers of the next ``num_ahead`` units, in forward and backward.

    ``units_of_roots`` has the units of each root, the first of which is the root itself.
    0 is FSDP2's own behaviour: one unit ahead in the backward. Not a collective, but ranks must agree on the
    arguments. If units run in another order than they are registered in, memory is wasted; if ranks use different
    ones, they start other numbers of gathers, and hang.
    """
    for forward in units_of_roots:
        fsdp2.set_background_gathers(forward, in_background)
        root, *others = forward
        backward = [root, *reversed(others)]
        for index in range(len(forward)):
            following = slice(index + 1, index + 1 + num_ahead)
            forward[index].set_modules_to_forward_prefetch(forward[following])
            # FSDP2 itself gathers one unit ahead, in the order in which the units have really run.
            gathered_ahead = backward[following] if num_ahead > 1 else []
            backward[index].set_modules_to_backward_prefetch(gathered_ahead)
