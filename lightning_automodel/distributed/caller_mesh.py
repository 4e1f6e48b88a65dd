"""Adopts a device mesh that the caller built: each dimension's role is found by its name."""

from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel.distributed import process_group
from lightning_automodel.distributed.mesh import (
    DATA,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshSizes,
    RunMesh,
    refuse_tensor_parallel_ddp,
    view_mesh,
)

NAMES = {
    REPLICATE: (REPLICATE, "dp_replicate", "replicate"),
    SHARD: (SHARD, "dp_shard", "fsdp", "shard"),
    DATA: (DATA, "dp", "data"),
    TENSOR: (TENSOR, "tp", "tensor"),
}
"""Accepted names of each role. FSDP2 shards over the last data-parallel dimension; under DDP all of them replicate."""

SHARDED = ((REPLICATE, SHARD), (SHARD,), (DATA,))
"""The data-parallel dimensions that FSDP2 accepts; DDP also accepts the replicate dimension alone."""


def adopt_mesh(
    mesh: DeviceMesh, device_type: str, data_parallel: Literal["fsdp2", "ddp"], told: Mapping[str, Any]
) -> RunMesh:
    """Check a mesh that the caller built, and find the role of each dimension by its name.

    A mesh has ``data_parallel_replicate`` and ``data_parallel_shard``, or one of them, or only ``data_parallel``, and
    may have ``tensor_parallel``; :data:`NAMES` lists the other names of each. A 1-D mesh needs no names. Dimensions of
    other names must have size 1. The mesh's groups keep their timeouts, and are neither destroyed nor aborted.

    A collective over the world where there are two data-parallel dimensions: flattening them makes a group.

    Raises:
        ValueError: If the mesh does not fit this run, or contradicts ``told``, the sizes that the user passed by
            keyword; the message says what is valid.
    """
    process_group.kept_with_world()
    if mesh.device_type != device_type:
        raise ValueError(
            f"device_mesh is for devices of type {mesh.device_type!r}, but this run's are of type {device_type!r}:"
            f" build it with init_device_mesh({device_type!r}, ...)."
        )
    ranks = mesh.mesh
    ascend = all(bool((ranks.diff(dim=dimension) > 0).all()) for dimension in range(ranks.ndim))
    if not ascend or sorted(ranks.flatten().tolist()) != list(range(dist.get_world_size())):
        # Torch sorts the ranks of each group: in another order, a rank would not have its coordinate in the mesh.
        raise ValueError(
            f"device_mesh holds the ranks {ranks.tolist()}, but must hold each of the {dist.get_world_size()} ranks of"
            " the world once, ascending along each dimension: init_device_mesh lays them out so."
        )
    names = _names_by_role(mesh, data_parallel)
    size = {role: mesh.shape[(mesh.mesh_dim_names or ("",)).index(name)] for role, name in names.items()}
    replicate, shard, tensor = size.get(REPLICATE, 1), size.get(SHARD) or size.get(DATA, 1), size.get(TENSOR, 1)
    sizes = MeshSizes(replicate, shard, tensor)
    if data_parallel == "ddp":
        refuse_tensor_parallel_ddp(tensor)
        sizes = MeshSizes(replicate * shard, 1)
    actual = {
        "data_parallel_size": sizes.data_parallel,
        "data_parallel_replicate_size": sizes.replicate,
        "tensor_parallel_size": sizes.tensor,
        "context_parallel_size": sizes.context,
    }
    for keyword, value in told.items():
        if value not in ("auto", actual[keyword]):
            raise ValueError(f"{keyword}={value} contradicts device_mesh, where it is {actual[keyword]}: leave it out.")
    data = tuple(name for role, name in names.items() if role != TENSOR)
    return view_mesh(mesh, sizes, data, names.get(TENSOR))


def _names_by_role(mesh: DeviceMesh, data_parallel: str) -> dict[str, str]:
    """The mesh's name of each dimension by role, in the mesh's order."""
    if mesh.mesh_dim_names is None and mesh.ndim == 1:
        return {DATA: ""}
    found = []
    for name, size in zip(mesh.mesh_dim_names or [None] * mesh.ndim, mesh.shape, strict=True):
        role = next((role for role, known in NAMES.items() if name in known), None)
        if role is not None or size > 1:
            found.append((role, name))
    roles = tuple(role for role, _ in found)
    data = roles[:-1] if roles[-1:] == (TENSOR,) else roles
    if data not in (*SHARDED, (REPLICATE,)):
        others = ", ".join(other for known in NAMES.values() for other in known[1:])
        raise ValueError(
            f"device_mesh has the dimensions {_shown(mesh)}, but needs {REPLICATE!r} and {SHARD!r}, or one of them, or"
            f" {DATA!r}, and after them may have {TENSOR!r} (other names are {others}): pass such mesh_dim_names, in"
            " this order; other dimensions must have size 1."
        )
    if data_parallel == "fsdp2" and data not in SHARDED:
        raise ValueError(
            f"device_mesh has the dimensions {_shown(mesh)}, none of which FSDP2 could shard over: add one called"
            f" {SHARD!r}, or pass data_parallel='ddp'."
        )
    return {role: name for role, name in found if role is not None and name is not None}


def _shown(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ["no name"] * mesh.ndim
    return ", ".join(f"{name!r} ({size})" for name, size in zip(names, mesh.shape, strict=True))
