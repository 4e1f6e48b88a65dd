"""Replicas of one parameter that have drifted apart: each rank has written its own values."""

from collections import defaultdict
from collections.abc import Container, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.gradients.token_loss import wide_dtype
from lightning_automodel.internals import torch as torch_internals

_ROUNDING = 1e-3  # of a parameter's norm


def check_replicas(
    module: nn.Module, mesh: RunMesh, device: torch.device, ignored: Container[str] = ()
) -> None:
    """Raise RuntimeError, on every rank, if ranks hold different values of parameters that they hold copies of.

    Those are all parameters under DDP, and under FSDP2 what is not sharded and, with replicas (HSDP),
    each shard. A collective over their groups, of three numbers a parameter, and a read of the device.
    ``ignored`` has the names of parameters that each rank trains by itself.
    """
    copies: dict[dist.ProcessGroup, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        local = torch_internals.local_tensor(parameter)
        # A subclass of tensors may hold codes, which cannot be summed.
        is_plain = type(local) in (Tensor, nn.Parameter) and local.is_floating_point()
        if is_plain and name not in ignored:
            for group in _groups_with_copies(parameter, mesh):
                copies[group].append((name, local))
    for group, named in copies.items():
        drifted = _drifted(named, group, device)
        if drifted:
            raise RuntimeError(
                f"Ranks hold different values of {', '.join(drifted[:3])}: {len(drifted)} of {len(named)}"
                " parameters that each rank has a copy of. The strategy gives all ranks the same"
                " gradients, so other code has written them differently: with random numbers (ranks draw"
                " different ones after dropout on batches of different sizes: use a torch.Generator with"
                " the same seed on all ranks), from a rank's own data, or on one rank only."
            )


def _groups_with_copies(parameter: nn.Parameter, mesh: RunMesh) -> Iterable[dist.ProcessGroup]:
    """The groups of ranks that hold the same values as this rank."""
    if not isinstance(parameter, DTensor):
        return [group for group in mesh.groups if group.size() > 1]
    parameter_mesh = parameter.device_mesh
    return [
        parameter_mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if placement.is_replicate() and parameter_mesh.size(dim) > 1
    ]


def _drifted(named: list[tuple[str, Tensor]], group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The names of tensors whose sums of elements differ between the ranks of ``group``. A collective over it."""
    wide = wide_dtype(device)
    sums = torch.stack([tensor.detach().sum(dtype=wide) for _, tensor in named]).to(device)
    norms = torch.stack([torch.linalg.vector_norm(tensor.detach(), dtype=wide) for _, tensor in named])
    largest = torch.cat([sums, -sums, norms.to(device)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    largest_sums, negative_smallest_sums, largest_norms = largest.chunk(3)
    differs = largest_sums + negative_smallest_sums > _ROUNDING * largest_norms
    return [name for (name, _), is_different in zip(named, differs.tolist(), strict=True) if is_different]
