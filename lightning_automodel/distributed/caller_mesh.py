"""A device mesh that the caller built: which of its dimensions means what."""

from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel import torch_internals
from lightning_automodel.distributed import connections
from lightning_automodel.distributed.mesh import (
    DATA,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshSizes,
    RunMesh,
    forget_former_world,
    refuse_tensor_parallel_ddp,
)

NAMES = {
    REPLICATE: (REPLICATE, "dp_replicate", "replicate"),
    SHARD: (SHARD, "dp_shard", "fsdp", "shard"),
    DATA: (DATA, "dp", "data"),
    TENSOR: (TENSOR, "tp", "tensor"),
}
"""What a dimension may be called. FSDP2 shards over the last data-parallel one; under DDP all of them hold copies."""


def adopt_mesh(
    mesh: DeviceMesh, device_type: str, data_parallel: Literal["fsdp2", "ddp"], told: Mapping[str, Any]
) -> RunMesh:
    """Take a mesh that the caller built, and tell its dimensions apart by their names.

    A mesh has ``data_parallel_replicate`` and ``data_parallel_shard``, or one of them, or only ``data_parallel``, and
    may have ``tensor_parallel``; :data:`NAMES` lists the other names of each. A 1-D mesh needs no names. Dimensions of
    other names must have size 1. The mesh's groups keep their timeouts, and are neither destroyed nor aborted.

    A collective over the world: where two data-parallel dimensions have to be flattened, that makes a group.

    Args:
        mesh: Over all ranks of the default group.
        device_type: Type of this rank's device.
        data_parallel: The engine.
        told: Sizes that the user gave as well, by keyword; they must agree.

    Raises:
        ValueError: If the mesh does not fit; the message says what would.
    """
    forget_former_world()
    _check_extent(mesh, device_type)
    names = _names_by_role(mesh)
    sizes = _read_sizes(mesh, names, data_parallel)
    _check_told(told, sizes)
    data = tuple(names[role] for role in (REPLICATE, SHARD, DATA) if role in names)
    data_parallel_view = fsdp = _view(mesh, data)
    if len(data) == 2:
        with connections.recording():
            data_parallel_view = torch_internals.flatten_mesh(fsdp, DATA)
        fsdp = fsdp if sizes.replicate > 1 else _view(mesh, data[-1:])
    return RunMesh(
        mesh=mesh,
        sizes=sizes,
        data_parallel=data_parallel_view,
        fsdp=fsdp,
        tensor_parallel=_view(mesh, (names[TENSOR],)) if TENSOR in names else None,
    )


def _check_extent(mesh: DeviceMesh, device_type: str) -> None:
    if mesh.device_type != device_type:
        raise ValueError(
            f"device_mesh is for devices of type {mesh.device_type!r}, but this run's are of type {device_type!r}:"
            f" build it with init_device_mesh({device_type!r}, ...)."
        )
    if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ValueError(
            f"device_mesh holds the ranks {mesh.mesh.tolist()}, but must hold each of the {dist.get_world_size()} ranks"
            " of the world once."
        )
    ranks = mesh.mesh
    if any(bool((ranks.diff(dim=dimension) < 0).any()) for dimension in range(ranks.ndim)):
        raise ValueError(
            f"device_mesh holds the ranks {ranks.tolist()}, but ranks must ascend along each dimension: torch sorts the"
            " ranks of each group, so that others would hold what the mesh says; init_device_mesh lays them out so."
        )


def _names_by_role(mesh: DeviceMesh) -> dict[str, str]:
    if mesh.mesh_dim_names is None:
        if mesh.ndim == 1:
            return {DATA: ""}
        raise ValueError(
            f"device_mesh has {mesh.ndim} dimensions without names: pass mesh_dim_names, {_valid_names()}."
        )
    names: dict[str, str] = {}
    for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True):
        role = next((role for role, known in NAMES.items() if name in known), None)
        if role is None and size > 1:
            raise ValueError(
                f"device_mesh has a dimension {name!r} of size {size}, of which this strategy knows no meaning: name"
                f" dimensions {_valid_names()}; others must have size 1."
            )
        if role in names:
            raise ValueError(f"device_mesh has two dimensions that mean the same, {names[role]!r} and {name!r}.")
        if role is not None:
            names[role] = name
    _check_order(mesh, names)
    return names


def _check_order(mesh: DeviceMesh, names: dict[str, str]) -> None:
    data = [role for role in (REPLICATE, SHARD, DATA) if role in names]
    if not data or (DATA in data and len(data) > 1):
        raise ValueError(
            f"device_mesh has the dimensions {_shown(mesh)}, but exactly one that holds different data is needed, or"
            f" replicas and shards: {_valid_names()}; for no data parallelism, one of size 1."
        )
    in_order = [names[role] for role in (*data, TENSOR) if role in names]
    if sorted(in_order, key=list(mesh.mesh_dim_names or ()).index) != in_order:
        raise ValueError(
            f"device_mesh has the dimensions {_shown(mesh)}, but needs them in the order {', '.join(in_order)}."
        )


def _read_sizes(mesh: DeviceMesh, names: dict[str, str], data_parallel: str) -> MeshSizes:
    dimensions = mesh.mesh_dim_names or ("",)
    size = {role: mesh.shape[dimensions.index(name)] for role, name in names.items()}
    replicate, tensor = size.get(REPLICATE, 1), size.get(TENSOR, 1)
    shard = size.get(SHARD) or size.get(DATA)
    if data_parallel == "ddp":
        refuse_tensor_parallel_ddp(tensor)
        return MeshSizes(replicate=replicate * (shard or 1), shard=1)
    if shard is None:
        raise ValueError(
            f"device_mesh has the dimensions {_shown(mesh)}, none of which FSDP2 could shard over: add one called"
            f" {SHARD!r}, or pass data_parallel='ddp'."
        )
    return MeshSizes(replicate=replicate, shard=shard, tensor=tensor)


def _check_told(told: Mapping[str, Any], sizes: MeshSizes) -> None:
    actual = {
        "data_parallel_size": sizes.data_parallel,
        "data_parallel_replicate_size": sizes.replicate,
        "tensor_parallel_size": sizes.tensor,
    }
    for name, size in told.items():
        if size not in ("auto", actual[name]):
            raise ValueError(f"{name}={size} contradicts device_mesh, where it is {actual[name]}: leave it out.")


def _view(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh if mesh.ndim == len(names) else mesh[names]


def _shown(mesh: DeviceMesh) -> str:
    return ", ".join(f"{name!r} ({size})" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _valid_names() -> str:
    return ", ".join(repr(name) for name in NAMES) + " (or " + ", ".join(n for k in NAMES.values() for n in k[1:]) + ")"
