"""Tensor parallelism: Hugging Face models' own plans, and what tensor-parallel ranks must have in common."""

from collections.abc import Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_automodel.data.tensors import checksum
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.mesh import TENSOR, RunMesh
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.units import class_name, is_sharded, outermost

_HEADS_DIM = 2  # [b, s, heads, head width]

STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    # A norm over each head's width runs on the rank's own heads: its weight is whole, its gradient a partial
    # sum.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
}
"""torch's style for each name of a style in the plans of transformers."""

_SECOND_DERIVATIVES = (
    "A backward with create_graph=True through a tensor-parallel layer, of which torch computes wrong second"
    " derivatives. Leave create_graph out if there are none, leave the layer out of the plan, or leave"
    " tensor_parallel_size at 1."
)


def distribute(module: nn.Module, mesh: RunMesh) -> None:
    """Distribute the Hugging Face models in ``module`` by their ``tp_plan``, unless the module is distributed already.

    A collective over the tensor-parallel group: all ranks get its first rank's weights. Raises ValueError
    where that cannot be.
    """
    if mesh.tensor_parallel is None or mesh.sizes.tensor == 1:
        return
    dimension = (mesh.tensor_parallel.mesh_dim_names or (TENSOR,))[0]
    if not _takes_part(module, dimension):
        planned = [] if is_sharded(module) else outermost([module], _has_plan)
        if not planned:
            raise ValueError(
                f"tensor_parallel_size={mesh.sizes.tensor}, but no parameter of {class_name(module)} is"
                " distributed for it, and it holds no Hugging Face model with a tp_plan that is not sharded"
                f" yet: call parallelize_module(..., self.device_mesh[{dimension!r}],"
                " plan) in configure_model, before any fully_shard, or leave tensor_parallel_size at 1."
            )
        for model in planned:
            _apply_plan(model, mesh.tensor_parallel)
    for name, submodule in module.named_modules():
        if torch_internals.is_compiled(submodule) and _takes_part(submodule, dimension):
            raise ValueError(
                f"{name or class_name(module)} is compiled and holds tensor-parallel parameters, for which"
                " torch.compile computes wrong gradients (torch 2.13) or fails (2.14, 2.15): compile modules"
                " outside of the plan alone, or leave tensor_parallel_size at 1."
            )


def _takes_part(module: nn.Module, dimension: str) -> bool:
    """Whether any parameter of ``module`` is a DTensor on this dimension of the mesh."""
    return any(
        isinstance(p, DTensor) and dimension in (p.device_mesh.mesh_dim_names or ())
        for p in module.parameters()
    )


def _has_plan(module: nn.Module) -> bool:
    plan = getattr(module, "tp_plan", None)
    return isinstance(plan, dict) and bool(plan)


def _apply_plan(model: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, str] = model.tp_plan
    unknown = sorted({style for style in plan.values() if style not in STYLES})
    if unknown:
        raise ValueError(
            f"The tp_plan of {type(model).__name__} asks for {', '.join(unknown)}, which this strategy"
            f" cannot carry out (it knows {', '.join(STYLES)}): apply a plan of your own with"
            " parallelize_module in configure_model, or spread experts by expert_parallel_size."
        )
    parallelize_module(model, mesh, {name: STYLES[style] for name, style in plan.items()})
    model.tie_weights()  # modules that share a parameter were distributed each by itself


def check_ties(before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if ``parallelize_module`` has made several parameters of one, which would train apart."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in before.items():
        first = names.setdefault(parameter, name)
        new = after.get(name)
        if isinstance(new, DTensor) and new is not after.get(first):
            raise ValueError(
                f"parallelize_module has made two parameters of {first} and {name}, which were one: set self.{name} ="
                f" self.{first} again after it, in configure_model."
            )


def refuse_second_derivatives(module: nn.Module, parameters: Set[nn.Parameter], patches: PatchStack) -> None:
    """Let a backward with ``create_graph=True`` raise RuntimeError in layers with any of these split parameters.

    torch sums gradients of such a layer's input over the ranks, but records no graph of that.
    """
    for layer in module.modules():
        if not parameters.isdisjoint(layer.parameters(recurse=False)):
            patches.callback(layer.register_forward_hook(_refuse_second_derivative).remove)


def _refuse_second_derivative(layer: nn.Module, args: Any, output: Any) -> None:
    def refuse(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(_SECOND_DERIVATIVES)

    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(refuse)


def share_random_state(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Give the ranks of ``group``, if any, their first one's random state. A collective.

    Tensor-parallel peers must drop out the same activations.
    """
    if group is None:
        return
    modules: list[Any] = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device.type)]
    for module in modules:
        state = module.get_rng_state().to(device)
        dist.broadcast(state, group=group, group_src=0)
        module.set_rng_state(state.cpu())


def check_same_batch(batch: Any, group: dist.ProcessGroup, kind: str) -> None:
    """Raise ValueError on all peers if their batches differ: they would silently compute a mixture of both.

    A collective over the group. Copies all tensors to the host.
    """
    if collectives.disagreement({"checksum": str(checksum(batch))}, group):
        raise ValueError(
            f"The {kind} ranks {dist.get_process_group_ranks(group)} were given different first batches, but"
            " compute each one together: give them the same data in the same order (a sampler by"
            " trainer.strategy.distributed_sampler_kwargs; random augmentation seeded alike)."
        )
