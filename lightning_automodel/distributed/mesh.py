"""Sizes and "auto" become a validated device mesh with named dimensions."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_automodel import torch_internals
from lightning_automodel.distributed import connections, process_group

REPLICATE = "data_parallel_replicate"
SHARD = "data_parallel_shard"
TENSOR = "tensor_parallel"
DATA = "data_parallel"


@dataclass(frozen=True)
class MeshSizes:
    """How many ranks stand along each dimension.

    Attributes:
        replicate: Ranks that hold copies of the same shard.
        shard: Ranks that one copy of the parameters is sharded over.
        tensor: Ranks that compute one micro-batch together.
    """

    replicate: int
    shard: int
    tensor: int = 1

    @property
    def data_parallel(self) -> int:
        """Ranks that hold different data: the divisor of the engine's gradient average."""
        return self.replicate * self.shard


def resolve_sizes(
    data_parallel: Literal["fsdp2", "ddp"],
    data_parallel_size: int | Literal["auto"],
    data_parallel_replicate_size: int | Literal["auto"],
    tensor_parallel_size: int,
    world_size: int,
    num_nodes: int,
) -> MeshSizes:
    """Settle the sizes once the world is known.

    Data-parallel ranks include replicas, and ``"auto"`` is what tensor parallelism leaves. ``"auto"`` replicas are as
    many as nodes; under DDP all data-parallel ranks are replicas.

    Raises:
        ValueError: If the sizes do not multiply to the world size, with the values that would.
    """
    tensor = tensor_parallel_size
    if world_size % tensor:
        raise ValueError(
            f"tensor_parallel_size={tensor} does not divide the world size {world_size};"
            f" valid sizes are {_divisors(world_size)}."
        )
    size = world_size // tensor if data_parallel_size == "auto" else data_parallel_size
    if size * tensor != world_size:
        times = f" times tensor_parallel_size={tensor}" if tensor > 1 else ""
        raise ValueError(
            f"data_parallel_size={size}{times} does not match the world size {world_size}:"
            f" pass data_parallel_size={world_size // tensor} or 'auto', or start {size * tensor} processes."
        )
    if data_parallel == "ddp":
        refuse_tensor_parallel_ddp(tensor)
        return MeshSizes(replicate=size, shard=1)
    replicate = num_nodes if data_parallel_replicate_size == "auto" else data_parallel_replicate_size
    if size % replicate:
        raise ValueError(
            f"data_parallel_replicate_size={replicate} does not divide the {size} data-parallel ranks;"
            f" valid sizes are {_divisors(size)}."
        )
    return MeshSizes(replicate=replicate, shard=size // replicate, tensor=tensor)


def refuse_tensor_parallel_ddp(tensor_parallel_size: int) -> None:
    """Raise ValueError unless each rank computes its micro-batches alone, as ``DistributedDataParallel`` needs it."""
    if tensor_parallel_size > 1:
        raise ValueError(
            f"Tensor parallelism (size {tensor_parallel_size}) does not go with data_parallel='ddp', which copies whole"
            " parameters: pass data_parallel='fsdp2', with data_parallel_replicate_size for copies."
        )


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)


@dataclass(frozen=True)
class RunMesh:
    """The mesh of a run and the views of it that the other rooms need.

    Attributes:
        mesh: All dimensions.
        sizes: How many ranks stand along them.
        data_parallel: 1-D view over the ranks that hold different data.
        fsdp: What ``fully_shard`` takes: 1-D, or 2-D (replicate, shard) where there are replicas.
        tensor_parallel: 1-D view over the ranks that compute one micro-batch together; None without that dimension.
    """

    mesh: DeviceMesh
    sizes: MeshSizes
    data_parallel: DeviceMesh
    fsdp: DeviceMesh
    tensor_parallel: DeviceMesh | None

    @property
    def group(self) -> dist.ProcessGroup:
        """Group of the ranks that hold different data."""
        return self.data_parallel.get_group()

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups that together span the world: this rank's data-parallel group, then its tensor-parallel one."""
        return [self.group] if self.tensor_group is None else [self.group, self.tensor_group]

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that compute one micro-batch together; None where each computes alone."""
        is_alone = self.tensor_parallel is None or self.sizes.tensor == 1
        return None if is_alone else self.tensor_parallel.get_group()  # type: ignore[union-attr]

    def sizes_by_name(self) -> dict[str, int]:
        """Ranks along each named dimension."""
        names = self.mesh.mesh_dim_names or (DATA,)
        return dict(zip(names, self.mesh.shape, strict=True)) | {DATA: self.sizes.data_parallel}


_built: dict[tuple[str, MeshSizes], RunMesh] = {}
_built_over: dist.ProcessGroup | None = None


@process_group.at_leaving
def _forget() -> None:
    global _built_over
    _built_over = None
    _built.clear()


def forget_former_world() -> None:
    """Where the default group is another than before, drop its meshes and what DTensor remembers of them.

    A mesh that is laid over the new group equals the old one to DTensor's caches, which then lead to groups that are
    gone. Not a collective.
    """
    global _built_over
    if _built_over is not dist.group.WORLD:
        _forget()
        torch_internals.forget_meshes()
        _built_over = dist.group.WORLD


def build_mesh(device_type: str, sizes: MeshSizes, timeout: timedelta) -> RunMesh:
    """Lay the mesh over the default group, or take the equal one that was laid over it before.

    Every mesh has process groups of its own, with threads and connections that last as long as the default group: a
    process that fits often must not pile them up. A collective over the world: every rank must call it, with the same
    arguments and after the same calls before.

    Tensor-parallel peers are neighbours, then the shards of one replica. ``timeout`` is for collectives on its groups.
    """
    forget_former_world()
    if (device_type, sizes) not in _built:
        shape = (sizes.replicate, sizes.shard, sizes.tensor)
        with connections.recording():
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD, TENSOR))
        _built[device_type, sizes] = view_mesh(mesh, sizes, (REPLICATE, SHARD), TENSOR)
    built = _built[device_type, sizes]
    for group in {*built.mesh.get_all_groups(), built.group} - {_built_over}:
        group.set_timeout(timeout)
    return built


def view_mesh(mesh: DeviceMesh, sizes: MeshSizes, data: tuple[str, ...], tensor: str | None) -> RunMesh:
    """The views of a mesh by the names of its dimensions: those that hold different data, and the tensor-parallel one.

    A collective over the world where there are two of the first, to be flattened.
    """

    def view(*names: str) -> DeviceMesh:
        return mesh if mesh.ndim == len(names) else mesh[names]

    data_parallel = fsdp = view(*data)
    if len(data) == 2:
        with connections.recording():
            data_parallel = torch_internals.flatten_mesh(fsdp, DATA)
        fsdp = fsdp if sizes.replicate > 1 else view(data[-1])
    return RunMesh(mesh, sizes, data_parallel, fsdp, None if tensor is None else view(tensor))
