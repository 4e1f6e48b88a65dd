"""How FSDP2 shards a module for a run: its units, what of it stays gathered, and what is said of that."""

from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel.distributed.mesh import Placement, RunMesh
from lightning_automodel.internals.fsdp2 import fsdp_units
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding import apply, checks, memory, precision, quantized, tensor_parallel, units
from lightning_automodel.sharding.gathers import set_prefetch
from lightning_automodel.sharding.shards import shard_parameters

_DESCRIBED: WeakKeyDictionary[pl.LightningModule, dict[str, Any]] = WeakKeyDictionary()
"""What is said of modules that were sharded here: also in later runs, which find them sharded."""


def shard_module(
    module: pl.LightningModule,
    placement: Placement,
    options: StrategyOptions,
    policy: MixedPrecisionPolicy,
    give_values: Callable[[], None],
) -> dict[str, Any]:
    """Make weights equal on all ranks, and shard them unless they are sharded. A collective over the world.

    Returns what was decided, and why, for ``describe()``.
    ``policy`` has the dtypes that units compute and reduce in; ``give_values`` initialises tensors without
    values, once they are sharded.
    """
    mesh = placement.mesh
    with apply.attributes_kept(module):
        report = _shard(module, mesh, options, policy)
    give_values()
    apply.initialise_fsdp2(module, mesh.sizes.divisor)
    report |= memory.choose(module, placement, options)
    if not report["reshard_during_accumulation"]:
        report["reshard_after_forward"] = False
    shard_parameters(module, accept_hooks=options.count_window_ahead)
    is_cpu = placement.device.type == "cpu"
    ahead, reason = _num_gathers_ahead(
        options.prefetch, mesh.fsdp.size(), is_cpu and not report["sharded_elsewhere"]
    )
    if ahead:
        set_prefetch(module, ahead, in_background=is_cpu)
    report |= {"prefetch": ahead, "prefetch_reason": reason}
    report["cpu_offload"] = options.cpu_offload
    return report


def _shard(
    module: pl.LightningModule, mesh: RunMesh, options: StrategyOptions, policy: MixedPrecisionPolicy
) -> dict[str, Any]:
    """Returns what is said of the units. A collective over the world."""
    plan = None
    if not units.has_fsdp_units(module):
        whole = precision.kept_wide(module, policy) | quantized.kept_whole(module, policy)
        plan = units.plan_sharding(module, options.auto_wrap_policy, module.automatic_optimization, whole)
        checks.check_shardable({n: p for n, p in module.named_parameters() if n not in plan.replicated})
        described = _described(module, plan) | {"reshard_after_forward": options.reshard_after_forward}
        _DESCRIBED[module] = described | {"sharded_elsewhere": False}
    tensor_parallel.distribute(module, mesh)
    apply.broadcast_states(module, mesh)
    if plan is not None:
        apply.apply_fsdp2(module, plan, mesh, options, policy)
    if module in _DESCRIBED:
        return dict(_DESCRIBED[module])
    roots: list[Any] = list(units.fsdp_roots(module))
    below: list[Any] = [unit for unit in fsdp_units(module) if unit not in roots]
    return _described(module, units.ShardingPlan(roots, below)) | {"sharded_elsewhere": True}


def _described(module: pl.LightningModule, plan: units.ShardingPlan) -> dict[str, Any]:
    """What is said of a plan: names, and classes of units."""
    names = {id(submodule): name or units.class_name(module) for name, submodule in module.named_modules()}
    described: dict[str, Any] = {
        "roots": [names[id(root)] for root in plan.roots],
        "units": [f"{names[id(unit)]} ({units.class_name(unit)})" for unit in plan.units],
        "replicated": dict(plan.replicated),
    }
    if plan.head is not None:
        described["head"] = f"{names[id(plan.head)]} ({units.class_name(plan.head)})"
    return described


def _num_gathers_ahead(option: int | Literal["auto"], num_ranks: int, waits: bool) -> tuple[int, str]:
    """How many units ahead all-gathers start, and why. ``waits``: FSDP2 by itself waits for each of them."""
    if num_ranks == 1:
        return 0, "one rank gathers nothing"
    if option != "auto":
        return option, f"prefetch={option}"
    if waits:
        return 1, "auto: 1 on CPU, where FSDP2 by itself waits for each all-gather"
    return 0, "auto: what FSDP2 does by itself"
