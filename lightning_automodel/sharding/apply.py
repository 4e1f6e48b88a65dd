"""Sharding a model with FSDP2, and making its weights equal on every rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.mesh import (
    EXPERT_SHARD,
    REPLICATE,
    SHARD,
    RunMesh,
    num_expert_ranks,
)
from lightning_automodel.internals import fsdp2, process_groups
from lightning_automodel.internals.patching import overwrite
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding.precision import cast_around, outermost_calls, step_policy, unit_policy
from lightning_automodel.sharding.quantized import has_parts
from lightning_automodel.sharding.replicas import copies
from lightning_automodel.sharding.units import (
    ShardingPlan,
    callable_children,
    can_be_unit,
    class_name,
    described,
    fsdp_roots,
    mark_head,
)

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
_BROADCAST_BUCKET_BYTES = 250 * 1024 * 1024  # large enough for the network, small beside a model


def apply_fsdp2(
    model: nn.Module,
    named: Mapping[str, Tensor],
    plan: ShardingPlan,
    run_mesh: RunMesh,
    options: StrategyOptions,
    policy: MixedPrecisionPolicy,
) -> None:
    """Shard ``model``, on its device, in place by the plan: over ``fsdp`` of the mesh, experts over ``expert_fsdp``.

    ``named`` are its parameters and buffers.
    A collective over the mesh: every rank must call it with the same model, weights and plan. The model,
    where it is a root, stays gathered through a step. Inputs and outputs are cast at the modules that the
    LightningModule calls.
    """
    for tensor in named.values():
        # FSDP2 refuses transposed weights, and convolutions in the channels-last format.
        if (
            not tensor.is_contiguous()
            and isinstance(tensor, nn.Parameter)
            and not isinstance(tensor, DTensor)
        ):
            tensor.data = tensor.data.contiguous()
    kwargs = _sharding_options(run_mesh, options.cpu_offload)
    replicated = {cast(nn.Parameter, named[name]) for name in plan.replicated & named.keys()}
    # Without any, FSDP2 need not look for them below each unit.
    shard = partial(fully_shard, ignored_params=replicated or None, **kwargs)
    below_root = unit_policy(policy)
    for unit in plan.units:
        shard(unit, reshard_after_forward=options.reshard_after_forward, mp_policy=below_root)
    for root in plan.roots:
        # The model's own parameters are needed again at once in the backward. For roots below it that is not
        # known, and parameters that stayed gathered would be stale after the next optimizer step.
        if root is not model:
            shard(root, reshard_after_forward=True, mp_policy=below_root)
            continue
        whole_step = [root]
        if plan.head is not None:
            mark_head(plan.head)
            whole_step.insert(0, plan.head)
        for unit in whole_step:
            shard(unit, reshard_after_forward=False, mp_policy=step_policy(policy))
        _run_steps_as_forward(root, plan.units, cast(list[FSDPModule], whole_step))
        type(root).__name__ = class_name(root)  # messages of torch and Lightning name the user's class
    if policy.output_dtype is not None or policy.cast_forward_inputs:
        cast_around(callable_children(model), policy)


def _sharding_options(mesh: RunMesh, offloads: bool) -> dict[str, Any]:
    """Keywords of ``fully_shard`` that all units have in common."""
    kwargs: dict[str, Any] = {"mesh": mesh.fsdp}
    if offloads:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type != "cpu")
    if mesh.expert_fsdp is None:
        return kwargs
    over_holders = fsdp2.sharded_over(mesh.expert_fsdp)

    # Experts stay in the unit of their block: on a unit of their own within a recomputed block, selective
    # recomputation fails (torch 2.13).
    kwargs["shard_placement_fn"] = lambda p: over_holders if num_expert_ranks(p) > 1 else None
    return kwargs


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Context that may replace parameters: keeps the attributes that users gave them (a tag for weight decay)."""
    parameters = model.named_parameters(remove_duplicate=False)
    before = {name: dict(vars(parameter)) for name, parameter in parameters if vars(parameter)}
    yield
    if not before:
        return
    for name, parameter in model.named_parameters(remove_duplicate=False):
        vars(parameter).update(before.get(name, {}))


def _run_steps_as_forward(
    model: nn.Module, own_units: list[nn.Module], whole_step: list[FSDPModule]
) -> None:
    """Gather the root's parameters for each Lightning step, and for submodules that are called outside of a step.

    The head's are gathered with them (``whole_step`` has both): some code computes losses from the head's
    weight, without calling the head. They stay gathered until the step returns: it may run backwards of its own,
    and go on with the root's parameters. ``register_fsdp_forward_method`` would leave the root's own hooks in
    place, which run again for the ``forward`` inside a step: one more all-gather in each micro-batch.
    """
    root = cast(FSDPModule, model)
    before, after = fsdp2.detach_forward_hooks(root)

    def run(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            for unit in whole_step:
                fsdp2.gather(unit)
            # On an accelerator FSDP2 would copy the containers of a batch, which steps write to.
            before(root, (), {})
            return after(root, (), method(*args, **kwargs))
        finally:
            # No backward will free the gathered parameters, and they would be stale after the next optimizer
            # step.
            if not torch.is_grad_enabled():
                for unit in whole_step:
                    unit.reshard()

    outermost = outermost_calls(run)
    for name in ("forward", *_STEP_METHODS):
        if (method := getattr(model, name)) is not None:  # Lightning's way of switching a step off
            setattr(model, name, outermost(method))
    passed_by = {model, *(module for unit in own_units for module in unit.modules())}
    entries = set(callable_children(model))
    for part in model.modules():
        # What holds units may be called directly too: a wrapper's ``generate`` does.
        if part not in passed_by and (part in entries or (can_be_unit(part) and fsdp2.fsdp_units(part))):
            part.forward = outermost(part.forward)


def initialise_fsdp2(
    model: nn.Module, units: Iterable[FSDPModule], named: Mapping[str, nn.Parameter], divisor: int
) -> None:
    """Run FSDP2's lazy initialisation at set-up, so that its errors come now (tied parameters, mixed dtypes).

    ``units`` are all FSDP2 units of ``model``, whose parameters are ``named``.
    Raises ValueError if gradients would be averaged over other ranks than the ``divisor`` that hold
    different tokens.
    """
    for root in fsdp_roots(model):
        fsdp2.initialise_fsdp_root(root)
    managed = set[nn.Parameter]()
    for group in fsdp2.groups_of(units):
        shards = [param.sharded_param for param in group.fsdp_params]
        averaged_over = group.mesh_info.mesh.size()
        for num_ranks in {divisor // num_expert_ranks(shard) for shard in shards} - {averaged_over}:
            raise ValueError(
                f"FSDP unit {described(model, group.modules)[0]} averages its gradients over {averaged_over}"
                f" ranks, but {num_ranks} hold different data for it: shard it over"
                f" self.device_mesh[{SHARD!r}], or where there are replicas over"
                f" self.device_mesh[{REPLICATE!r}, {SHARD!r}], and units of spread experts alone over"
                f" {EXPERT_SHARD!r} in place of {SHARD!r}; under context_parallel_size leave it to the strategy."
                " Experts that differ by rank need expert_parallel_size and spread_experts: as plain parameters"
                " they would be overwritten by those of the first rank."
            )
        # The strategy divides by label tokens, whatever factor was set by hand.
        overwrite(group, "gradient_divide_factor", None)
        managed.update(shards)
    for name, parameter in named.items():
        if num_expert_ranks(parameter) > 1 and parameter not in managed:
            raise ValueError(
                f"{name} is spread over expert-parallel ranks, but FSDP2 does not manage it, so that nobody"
                " would average its gradients over the ranks that hold the same experts: let it be a"
                " parameter of a module with a forward, below the LightningModule, and real."
            )


def broadcast_states(named: Mapping[str, Tensor], mesh: RunMesh) -> None:
    """Make a model's plain tensors equal on all ranks, and shards on all replicas, by copying those of the first.

    A collective over the world. Tensors on the meta device are skipped. ValueError for sparse ones.
    """
    with_values = [(name, tensor) for name, tensor in named.items() if not tensor.is_meta]
    for name, tensor in with_values:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} is sparse, and cannot be sent to other ranks: keep it as a plain attribute, equal on all ranks"
                f" (self.{name} = ..., without register_buffer), and move it to self.device in setup."
            )
    for group, copied in copies(with_values, mesh).items():
        broadcast_tensors([part for _, tensor in copied for part in _plain_parts(tensor)], group)


def _plain_parts(tensor: Any) -> Iterator[Tensor]:
    if not has_parts(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_parts(getattr(tensor, name))


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device | None = None
) -> None:
    """Overwrite ``tensors`` with those of the group's first rank, in buckets, on their own device or the given one.

    A collective over the group.
    """
    own = list(tensors)
    if group.size() == 1 or not own:
        return
    # As bytes: no backend knows every dtype.
    plain = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in own]
    # A contiguous tensor of one element may have another stride.
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in plain]
    sent = [tensor.view(torch.uint8).to(device) for tensor in flat]
    process_groups.broadcast_coalesced(group, sent, _BROADCAST_BUCKET_BYTES)
    for tensor, values in zip(own, sent, strict=True):
        if values.data_ptr() != tensor.data_ptr():  # else it was sent as it lies in memory
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))
