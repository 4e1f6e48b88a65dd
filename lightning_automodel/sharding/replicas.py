"""Replicas of one parameter that differ: each rank has written its own values, or has a part of the gradient."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.distributed.mesh import EXPERT, RunMesh
from lightning_automodel.gradients.token_loss import wide_dtype
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access

_ROUNDING = 1e-3  # of a parameter's norm


def copies(
    named: Iterable[tuple[str, Tensor]], mesh: RunMesh
) -> dict[dist.ProcessGroup, list[tuple[str, Tensor]]]:
    """What this rank holds of each tensor, by the groups whose ranks shall hold the same values."""
    found: dict[dist.ProcessGroup, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in named:
        local = torch_internals.local_tensor(tensor)
        for group in _groups_with_copies(tensor, mesh):
            found[group].append((name, local))
    return found


def _groups_with_copies(tensor: Tensor, mesh: RunMesh) -> list[dist.ProcessGroup]:
    """The groups that together span the ranks with the same values as this one."""
    if not isinstance(tensor, DTensor):
        return mesh.groups
    own = tensor.device_mesh
    placements = enumerate(tensor.placements)
    groups = [own.get_group(dim) for dim, placement in placements if placement.is_replicate()]
    if own == mesh.tensor_parallel:
        groups.append(mesh.group)
    elif own.mesh_dim_names == (EXPERT,) and mesh.expert_fsdp is not None:
        groups += mesh.expert_fsdp.get_all_groups()
        groups += mesh.groups[1:]
    elif own == mesh.fsdp:
        groups += mesh.groups[1:]
    return groups


def check_replicas(
    module: nn.Module, mesh: RunMesh, device: torch.device, ignored: Container[str] = ()
) -> None:
    """Raise RuntimeError, on every rank, if ranks hold different values of parameters that they hold copies of.

    Under DDP ranks hold copies of all parameters, under FSDP2 of what is not sharded and, with replicas (HSDP),
    of each shard. A collective over their groups, of three numbers a parameter, and a read of the device.
    ``ignored`` has the names of parameters that each rank trains by itself.
    """
    # A subclass of tensors may hold codes, which cannot be summed.
    summed = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if name not in ignored
        and parameter.is_floating_point()
        and type(torch_internals.local_tensor(parameter)) in (Tensor, nn.Parameter)
    ]
    drifted = _drifted(copies(summed, mesh), device)
    if drifted:
        raise RuntimeError(
            f"Ranks hold different values of {', '.join(drifted[:3])}: {len(drifted)} of {len(summed)}"
            " parameters. The strategy gives all ranks the same gradients, so other code has written them differently:"
            " with random numbers (ranks draw different ones after dropout on batches of different sizes: use a"
            " torch.Generator with the same seed on all ranks), from a rank's own data, or on one rank only."
        )


def check_gradients_of_peers(module: nn.Module, mesh: RunMesh, device: torch.device) -> None:
    """Raise RuntimeError, on every rank, if tensor-parallel peers differ in gradients of what each has a copy of.

    A collective over the world, if there are any peers, and a read of the device.
    """
    peers = mesh.tensor_group
    if peers is None:
        return
    with plain_access():
        gradients = [
            (name, torch_internals.local_tensor(parameter.grad))
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
            and parameter.is_floating_point()  # sums of complex numbers have no order
            and peers in _groups_with_copies(parameter, mesh)
        ]
    differing = _drifted({peers: gradients}, device)
    if differing:
        raise RuntimeError(
            f"Tensor-parallel ranks have different gradients of {', '.join(differing[:3])}: {len(differing)} parameters"
            " that each has a copy of. What computes on a part of the features, between a column-wise and a row-wise"
            " layer, gets a part of its gradient there: give a norm a style in the plan,"
            " SequenceParallel(sequence_dim=<that of the features>, use_local_output=True); of anything else sum the"
            " gradient over self.device_mesh['tensor_parallel'] in on_after_backward, each time that it is final."
        )


def _drifted(held: Mapping[dist.ProcessGroup, list[tuple[str, Tensor]]], device: torch.device) -> list[str]:
    """The names of tensors whose sums of elements differ between the ranks of a group. A collective over the world.

    Only some groups may see it: each holds a part.
    """
    wide = wide_dtype(device)
    own: list[str] = []
    for group, named in held.items():
        if group.size() == 1 or not named:
            continue
        values = [tensor.detach() for _, tensor in named]
        sums = torch.stack([value.sum(dtype=wide) for value in values])
        norms = torch.stack([torch.linalg.vector_norm(value, dtype=wide) for value in values])
        largest = torch.stack([sums, -sums, norms]).to(device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        differs = largest[0] + largest[1] > _ROUNDING * largest[2]
        own += [
            name for (name, _), is_different in zip(named, differs.tolist(), strict=True) if is_different
        ]
    return list(dict.fromkeys(name for of_rank in gather_objects(own) for name in of_rank))
