"""Handing a model to FSDP2 or DDP, with equal weights on every rank, and what it must not hold."""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.sharding.precision import cast_around, compute_as_units, step_policy, unit_policy
from lightning_automodel.sharding.units import (
    SHARED_BETWEEN_ROOTS,
    ShardingPlan,
    callable_children,
    can_be_unit,
    class_name,
    distinct,
    fsdp_roots,
)

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


def apply_fsdp2(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    reshard_after_forward: bool | int,
    cpu_offload: bool,
    mp_policy: MixedPrecisionPolicy,
) -> None:
    """Shard ``model`` in place by the plan.

    A collective over ``mesh``: every rank must call it with the same model and plan, weights already equal.

    Args:
        model: The LightningModule, on its device.
        plan: From :func:`plan_sharding`.
        mesh: 1-D to shard over, or 2-D (replicate, shard).
        reshard_after_forward: For the units, as ``fully_shard`` has it. Roots keep their parameters through a step.
        cpu_offload: Keep shards, gradients and optimizer state in host memory.
        mp_policy: What units compute and reduce in. Outputs, and inputs where a root's forward is a Lightning step,
            are cast around the modules that the LightningModule calls.
    """
    offload: OffloadPolicy = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    by_name = dict(model.named_parameters())
    _make_contiguous(by_name.values())
    kwargs: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload,
        "ignored_params": {by_name[name] for name in plan.replicated},
    }
    for unit in plan.units:
        fully_shard(unit, reshard_after_forward=reshard_after_forward, mp_policy=unit_policy(mp_policy), **kwargs)
    for root in plan.roots:
        # A root's parameters are needed again at once in backward; with roots below the model there is no such
        # moment, and parameters that stay gathered would miss the next optimizer step.
        if root is not model:
            fully_shard(root, reshard_after_forward=True, mp_policy=unit_policy(mp_policy), **kwargs)
            continue
        fully_shard(root, reshard_after_forward=False, mp_policy=step_policy(mp_policy), **kwargs)
        _run_steps_as_forward(root)
    shared = [name for name, reason in plan.replicated.items() if reason == SHARED_BETWEEN_ROOTS]
    compute_as_units(model, shared, mp_policy, mesh.device_type)
    cast_around(distinct(callable_children(model)), mp_policy)


def _make_contiguous(parameters: Iterable[nn.Parameter]) -> None:
    """Lay out anew, in place, what FSDP2 refuses: transposed weights, convolutions in the channels-last format."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Context that may replace parameters: what users have attached to one (a tag for weight decay) stays with it."""
    before = {name: dict(vars(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    yield
    for name, parameter in model.named_parameters(remove_duplicate=False):
        vars(parameter).update(before[name])


class _RootForward:
    """Runs FSDP2's root hooks around the outermost of nested calls: a step, the ``forward`` inside it, a child's.

    A step uses parameters outside of ``forward`` too, and torch's own registration of several forward methods would
    gather a root twice for nested ones. Where no gradients are to come, what was gathered is freed at the end: kept for
    a backward that never follows, it would outlive the next write to the sharded weights.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root = root
        self._before, self._after = torch_internals.take_over_forward_hooks(root)
        self._is_running = False

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return method(*args, **kwargs)
            self._is_running = True
            try:
                args, kwargs = self._before(self._root, args, kwargs)
                return self._after(self._root, args, method(*args, **kwargs))
            finally:
                self._is_running = False
                if not torch.is_grad_enabled():
                    self._root.reshard()

        return call


def _run_steps_as_forward(model: nn.Module) -> None:
    """Gather the root's parameters for each Lightning step as for a forward, and for parts called outside of any."""
    root_forward = _RootForward(cast(FSDPModule, model))
    for name in ("forward", *_STEP_METHODS):
        setattr(model, name, root_forward.around(getattr(model, name)))
    for part in distinct((*callable_children(model), *_around_units(model))):
        if not isinstance(part, FSDPModule):
            part.forward = root_forward.around(part.forward)


def _around_units(model: nn.Module) -> Iterator[nn.Module]:
    """Callable modules below ``model`` that hold FSDP units: what a wrapper calls past its own forward (`generate`)."""
    for module in model.modules():
        if module is not model and can_be_unit(module) and any(isinstance(m, FSDPModule) for m in module.modules()):
            yield module


def initialise_fsdp2(model: nn.Module, divisor: int) -> None:
    """Settle FSDP2's lazy state at set-up, so that its errors come now and no step is special.

    A collective: gathers every unit once. A unit that is first used in the last micro-batch of a window would
    otherwise lack the gathered parameter that FSDP2 accumulates into.

    Args:
        model: Sharded model.
        divisor: Number of ranks that gradients are to be averaged over.

    Raises:
        ValueError: If FSDP2 was told another divisor, so that two places would own the scale of the gradients, or
            averages over other ranks than those that hold different data.
    """
    for root in fsdp_roots(model):
        torch_internals.initialise_fsdp_root(root)
    names = {id(module): name for name, module in model.named_modules()}
    for group in torch_internals.fsdp_param_groups(model):
        averaged_over = torch_internals.averaging_size(group)
        if averaged_over != divisor:
            raise ValueError(
                f"FSDP unit {names[id(group.modules[0])]!r} averages its gradients over {averaged_over} ranks,"
                f" but {divisor} hold different data: shard it over self.device_mesh['data_parallel_shard'], or where"
                " there are replicas over self.device_mesh['data_parallel_replicate', 'data_parallel_shard']."
            )
        if group.gradient_divide_factor not in (None, divisor):
            raise ValueError(
                f"An FSDP unit divides gradients by {group.gradient_divide_factor} (set_gradient_divide_factor), but"
                f" the strategy rescales averages over {divisor} ranks; leave the factor unset."
            )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
    for group in torch_internals.fsdp_param_groups(model):
        for sharded, gathered in torch_internals.sharded_and_unsharded(group):
            vars(gathered).update(vars(sharded))


def shard_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of ``whole``, which every rank has, laid out as ``tensor`` is. Not a collective."""
    if not isinstance(tensor, DTensor):
        return whole
    whole = whole.detach().to(tensor.device)
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def apply_ddp(
    model: nn.Module, device: torch.device, group: dist.ProcessGroup, ddp_kwargs: dict[str, Any]
) -> DistributedDataParallel:
    """Replicate ``model``. A collective over ``group``: broadcasts weights and buffers from its first rank."""
    device_ids = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(model, device_ids=device_ids, process_group=group, **ddp_kwargs)


def broadcast_states(model: nn.Module, mesh: RunMesh) -> None:
    """Make copies equal: every rank gets rank 0's plain parameters and buffers, every replica its shards.

    A collective over the world and, for what is sharded already, over the groups of its replicas: the axes of its mesh
    along which it is replicated, and all data-parallel ranks where only tensor parallelism has sharded it. If shapes of
    plain tensors differ between ranks, every rank raises. What has no values (meta device) is left alone.
    """
    world = dist.group.WORLD
    assert world is not None
    copies: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "meta":
            continue
        if not isinstance(tensor, DTensor):
            copies[world].append(tensor.detach())
            continue
        local = torch_internals.local_tensor(tensor).detach()
        for axis, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                copies[tensor.device_mesh.get_group(axis)].append(local)
        if tensor.device_mesh == mesh.tensor_parallel:
            copies[mesh.group].append(local)
    if copies[world]:
        torch_internals.verify_shapes_across_ranks(world, copies[world])
    for group, tensors in copies.items():
        _broadcast(tensors, group)


def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of the group's first rank. A collective over the group."""
    if group.size() == 1:
        return
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() > 0:
            by_device[tensor.device].append(tensor)
    for same_device in by_device.values():
        torch_internals.broadcast_tensors(group, same_device)


def check_optimizers(module: nn.Module, optimizers: list[Optimizer], divisor: int) -> None:
    """Refuse optimizers that would train something else than the distributed model, in silence.

    Raises:
        ValueError: For parameters that are none of the module's (collected before it was sharded), and for an optimizer
            that decides from a rank's own loss.
    """
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strangers = sum(id(parameter) not in known for parameter in parameters)
        if strangers and not isinstance(optimizer, lightning_internals.MockOptimizer):
            raise ValueError(
                f"{strangers} of {len(parameters)} parameters of {name} are not parameters of {class_name(module)}"
                " (any more): sharding replaces them. Collect them in configure_optimizers, from self.parameters()."
            )
        if isinstance(optimizer, LBFGS) and divisor > 1:
            raise ValueError(
                f"{name} chooses its step from the loss of each rank alone, so {divisor} ranks would drift apart;"
                " choose a first-order optimizer or one rank."
            )


def check_hooks(module: nn.Module) -> None:
    """Refuse hooks that act on a gradient before its window is complete, as optimizers that step inside backward do.

    Raises:
        ValueError: Naming the first parameters with a post-accumulate-gradient hook, or sharded with a gradient hook.
    """
    refuse_gradient_hooks(module, [name for name, p in module.named_parameters() if not isinstance(p, DTensor)])
    hooked = [
        name for name, parameter in module.named_parameters() if torch_internals.has_post_accumulate_hook(parameter)
    ]
    if hooked:
        raise ValueError(
            f"{len(hooked)} parameters have post-accumulate-gradient hooks ({', '.join(hooked[:3])}, ...), as an"
            " optimizer that steps inside backward has. They would see sums over tokens whose number is known only at"
            " the end of the window: remove them, and step after backward."
        )


def refuse_gradient_hooks(module: nn.Module, whole: Collection[str]) -> None:
    """Refuse hooks on gradients (``parameter.register_hook``) that FSDP2 would never call.

    Args:
        module: The LightningModule.
        whole: Names of the parameters that are not sharded, nor going to be.

    Raises:
        ValueError: Naming the first of the others that has one.
    """
    named = module.named_parameters()
    hooked = [name for name, parameter in named if name not in whole and torch_internals.has_gradient_hook(parameter)]
    if hooked:
        raise ValueError(
            f"{len(hooked)} parameters that FSDP2 shards have gradient hooks ({', '.join(hooked[:3])}), which it never"
            " calls: change gradients in on_before_optimizer_step, or pass data_parallel='ddp'."
        )
