"""Sizes and "auto", or a mesh that the caller built, become a validated device mesh with named dimensions."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed import process_group
from lightning_automodel.internals import process_groups

REPLICATE = "data_parallel_replicate"
SHARD = "data_parallel_shard"
CONTEXT = "context_parallel"
TENSOR = "tensor_parallel"
DATA = "data_parallel"
EXPERT = "expert_parallel"
EXPERT_SHARD = "expert_data_parallel_shard"

NAMES = {
    REPLICATE: (REPLICATE, "dp_replicate", "replicate"),
    SHARD: (SHARD, "dp_shard", "fsdp", "shard"),
    DATA: (DATA, "dp", "data"),
    TENSOR: (TENSOR, "tp", "tensor"),
}
"""Names of each role in a mesh that the caller built."""


@dataclass(frozen=True)
class MeshSizes:
    """Number of ranks along each dimension."""

    replicate: int  # ranks that hold copies of the same shard
    shard: int  # ranks that one copy of the parameters is sharded over
    tensor: int = 1  # ranks that compute one micro-batch together
    context: int = 1  # ranks that share each batch and hold a slice of its sequence each
    expert: int = 1  # ranks, of those in ``shard``, that hold different experts

    @property
    def data_parallel(self) -> int:
        """Ranks that are given different batches."""
        return self.replicate * self.shard

    @property
    def divisor(self) -> int:
        """Ranks that hold different tokens: what the engine averages gradients over."""
        return self.data_parallel * self.context


def resolve_sizes(
    *,
    data_parallel: Literal["fsdp2", "ddp"],
    data_parallel_size: int | Literal["auto"],
    data_parallel_replicate_size: int | Literal["auto"],
    tensor_parallel_size: int,
    world_size: int,
    num_nodes: int,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
) -> MeshSizes:
    """Resolve ``"auto"``, once the world size is known; ValueError if the sizes do not multiply to that.

    ``data_parallel_size`` includes replicas; ``"auto"`` is the world size over the tensor and context sizes.
    For replicas ``"auto"`` is the number of nodes; under DDP all data-parallel ranks are replicas.
    Expert-parallel ranks are some of those that parameters are sharded over.
    """
    peers = tensor_parallel_size * context_parallel_size
    size = world_size // peers or 1 if data_parallel_size == "auto" else data_parallel_size
    if size * peers != world_size:
        raise ValueError(
            f"data_parallel_size={size} times tensor_parallel_size={tensor_parallel_size} times"
            f" context_parallel_size={context_parallel_size} does not match the world size {world_size}: start"
            f" {size * peers} processes, or pass sizes that multiply to {world_size}; 'auto' finds"
            " data_parallel_size where the others divide it."
        )
    if data_parallel == "ddp":
        if tensor_parallel_size > 1:
            raise ValueError(
                f"Tensor parallelism (size {tensor_parallel_size}) does not work with data_parallel='ddp',"
                " which copies whole parameters: pass data_parallel='fsdp2', with"
                " data_parallel_replicate_size for copies."
            )
        return MeshSizes(replicate=size, shard=1, context=context_parallel_size)
    replicate = num_nodes if data_parallel_replicate_size == "auto" else data_parallel_replicate_size
    check_divides("data_parallel_replicate_size", replicate, size, "data-parallel ranks")
    shard = size // replicate
    check_divides(
        "expert_parallel_size", expert_parallel_size, shard, "ranks that parameters are sharded over"
    )
    return MeshSizes(replicate, shard, tensor_parallel_size, context_parallel_size, expert_parallel_size)


def check_divides(keyword: str, size: int, number: int, of_what: str) -> None:
    """Raise ValueError, with the sizes that are valid, unless the ``size`` of an option divides a number."""
    if number % size:
        valid = ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
        raise ValueError(
            f"{keyword}={size} does not divide the {number} {of_what}: valid sizes are {valid}."
        )


@dataclass(frozen=True)
class RunMesh:
    """The mesh of a run and the views of it that other modules use, 1-D but for ``fsdp``."""

    mesh: DeviceMesh  # all dimensions
    sizes: MeshSizes
    data_parallel: DeviceMesh  # ranks that are given different batches
    tokens: DeviceMesh  # ranks that hold different tokens: data-parallel ranks times context peers
    fsdp: DeviceMesh  # for ``fully_shard``, with context peers: 2-D (replicate, shard) where there are replicas
    # Ranks that compute one micro-batch together; None without that dimension.
    tensor_parallel: DeviceMesh | None
    # Ranks that share a batch; None where each has batches of its own.
    context_parallel: DeviceMesh | None = None
    # As ``fsdp``, of ranks with the same experts; None if none are spread.
    expert_fsdp: DeviceMesh | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Group of the ranks that hold different tokens; tokens are counted and gradients averaged over it."""
        return self.tokens.get_group()

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """This rank's groups that together span the world: :attr:`group`, then :attr:`tensor_group`, if any."""
        return [group for group in (self.group, self.tensor_group) if group is not None]

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that compute one micro-batch together; None where each computes alone."""
        if self.tensor_parallel is None or self.sizes.tensor == 1:
            return None
        return self.tensor_parallel.get_group()

    def sizes_by_name(self) -> dict[str, int]:
        """Ranks along each named dimension."""
        names = self.mesh.mesh_dim_names or (DATA,)
        sizes = dict(zip(names, self.mesh.shape, strict=True)) | {DATA: self.sizes.data_parallel}
        if self.expert_fsdp is not None:
            sizes[SHARD] = self.sizes.shard
        return sizes


@dataclass(frozen=True)
class Placement:
    """Where this rank computes, and with whom.

    Attributes:
        mesh: The run's.
        device: This rank's.
        local_ranks: How many ranks share the memory of this node.
        host_group: All ranks, for what is exchanged on their hosts.
    """

    mesh: RunMesh
    device: torch.device
    local_ranks: int
    host_group: dist.ProcessGroup


def num_expert_ranks(tensor: Tensor) -> int:
    """Number of ranks that ``tensor`` spreads experts over; 1 for other tensors.

    Its mesh has a dimension of that name, whose ranks hold different tokens and different experts.
    """
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        if EXPERT in names:
            return tensor.device_mesh.size(names.index(EXPERT))
    return 1


def build_mesh(device_type: str, sizes: MeshSizes, timeout: timedelta) -> RunMesh:
    """Build the mesh over the default group, or return the equal one that was built before.

    A collective over the world. Process groups last as long as the default group, which is that of a dimension
    of all ranks. Tensor-parallel peers are neighbours, then context peers, then ranks with different experts,
    then the other shards of one replica. ``timeout`` is for collectives on the mesh's groups.
    """
    kept = process_group.kept_with_world()
    if (device_type, sizes) not in kept:
        shards = {SHARD: sizes.shard}
        if sizes.expert > 1:
            shards = {EXPERT_SHARD: sizes.shard // sizes.expert, EXPERT: sizes.expert}
        context = {}
        if sizes.context > 1:
            context = {CONTEXT: sizes.context}
        dimensions = {REPLICATE: sizes.replicate, **shards, **context, TENSOR: sizes.tensor}
        ranks = torch.arange(dist.get_world_size(), device="cpu").view(*dimensions.values())
        # `init_device_mesh` would ask the store for each group of one rank on all ranks.
        groups = [
            process_groups.make_group(ranks.movedim(axis, -1).reshape(-1, size).tolist())
            for axis, size in enumerate(ranks.shape)
        ]
        mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(dimensions))
        views = view_mesh(mesh, sizes, (REPLICATE, SHARD), TENSOR)
        # For user code that names it so, as under ModelParallelStrategy. Where torch makes a second group of
        # the same ranks, that connects to nothing before it is used.
        process_groups.flatten_mesh(views.data_parallel, DATA)
        kept[device_type, sizes] = views
    built: RunMesh = kept[device_type, sizes]
    for view in (built.mesh, built.tokens, built.fsdp, built.expert_fsdp or built.fsdp):
        for group in view.get_all_groups():
            if group is not dist.group.WORLD:
                group.set_timeout(timeout)
    return built


def view_mesh(mesh: DeviceMesh, sizes: MeshSizes, data: tuple[str, ...], tensor: str | None) -> RunMesh:
    """Make the views of a mesh; ``data`` names its data-parallel dimensions and ``tensor`` its tensor-parallel one.

    A collective over the world for two data-parallel dimensions or context peers: flattening makes groups.
    """

    def view(*names: str) -> DeviceMesh:
        if mesh.ndim == len(names):
            return mesh
        with warnings.catch_warnings():
            # torch would rather have callers keep flattened meshes: so there is none of two dimensions.
            warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
            return mesh[names]

    def flatten(*names: str) -> DeviceMesh:
        larger = [name for name in names if view(name).size() > 1] or names[-1:]
        if len(larger) == 1:
            return view(*larger)  # which has a group of these ranks
        name = DATA if names == data else "_".join(larger)
        return process_groups.flatten_mesh(view(*larger), name)

    def with_replicas(shards: DeviceMesh) -> DeviceMesh:
        if sizes.replicate == 1 or len(data) == 1:
            return shards
        return view(data[0], *shards.mesh_dim_names or ())

    *replicas, _ = data
    shards = data[-1:]
    experts = None
    context: tuple[str, ...] = ()
    if sizes.context > 1:
        context = (CONTEXT,)
    if sizes.expert > 1:
        process_groups.flatten_mesh(view(EXPERT_SHARD, EXPERT), SHARD)
        experts = with_replicas(flatten(EXPERT_SHARD, *context))
        if context:  # a flattened dimension cannot be flattened again
            shards = EXPERT_SHARD, EXPERT
    return RunMesh(
        mesh,
        sizes,
        flatten(*data),
        flatten(*replicas, *shards, *context),
        with_replicas(flatten(*shards, *context)),
        view(tensor) if tensor else None,
        view(CONTEXT) if context else None,
        experts,
    )


def adopt_mesh(
    mesh: DeviceMesh, device_type: str, data_parallel: Literal["fsdp2", "ddp"], requested: Mapping[str, Any]
) -> RunMesh:
    """Check a mesh that the caller built, and find the role of each dimension by its name.

    FSDP2 shards over the last data-parallel dimension; under DDP all of them replicate. The mesh's groups
    keep their timeouts. A collective like :func:`view_mesh`. ValueError if the mesh does not fit this run,
    or contradicts ``requested``, the sizes by keyword.
    """
    process_group.kept_with_world()
    if mesh.device_type != device_type:
        raise ValueError(
            f"device_mesh is for devices of type {mesh.device_type!r}, but this run's are of type"
            f" {device_type!r}: build it with init_device_mesh({device_type!r}, ...)."
        )
    world_size = dist.get_world_size()
    if mesh.mesh.flatten().tolist() != list(range(world_size)):
        # Torch sorts the ranks of each group: in another order, a rank would not be at its coordinate.
        raise ValueError(
            f"device_mesh holds the ranks {mesh.mesh.tolist()}, but must hold all {world_size} ranks of the"
            " world, in their order: init_device_mesh lays them out so."
        )
    names = mesh.mesh_dim_names or (DATA,)
    roles = _roles(mesh, data_parallel)
    size = {roles.get(name): size for name, size in zip(names, mesh.shape, strict=True)}
    sizes = resolve_sizes(
        data_parallel=data_parallel,
        data_parallel_size="auto",
        data_parallel_replicate_size=size.get(REPLICATE, 1),
        tensor_parallel_size=size.get(TENSOR, 1),
        world_size=world_size,
        num_nodes=1,
    )
    actual = {
        "data_parallel_size": sizes.data_parallel,
        "data_parallel_replicate_size": sizes.replicate,
        "tensor_parallel_size": sizes.tensor,
    }
    for keyword, value in requested.items():
        if value not in ("auto", actual[keyword]):
            raise ValueError(
                f"{keyword}={value} contradicts device_mesh, where it is {actual[keyword]}: leave it out."
            )
    data = tuple(name for name, role in roles.items() if role != TENSOR)
    tensor = next((name for name, role in roles.items() if role == TENSOR), None)
    return view_mesh(mesh, sizes, data, tensor)


def _roles(mesh: DeviceMesh, data_parallel: str) -> dict[str, str]:
    """The role of each dimension by the mesh's name of it, in the mesh's order."""
    names = mesh.mesh_dim_names or ("no name",) * mesh.ndim
    if names == ("no name",):
        names = (DATA,)
    dimensions = list(zip(names, mesh.shape, strict=True))
    known = {name: role for role, those in NAMES.items() for name in those}
    roles = {name: known.get(name, "") for name, size in dimensions if name in known or size > 1}
    data = list(roles.values())
    if data[-1:] == [TENSOR]:
        del data[-1]
    if data not in ([REPLICATE, SHARD], [SHARD], [DATA], *([[REPLICATE]] if data_parallel == "ddp" else [])):
        shown = ", ".join(f"{name!r} ({size})" for name, size in dimensions)
        others = ", ".join(other for those in NAMES.values() for other in those[1:])
        raise ValueError(
            f"device_mesh has the dimensions {shown}, but needs {REPLICATE!r} and {SHARD!r}, or {SHARD!r},"
            f" or {DATA!r}, or under data_parallel='ddp' {REPLICATE!r} alone, and after them may have"
            f" {TENSOR!r} (other names are {others}): pass such mesh_dim_names, in this order; other"
            " dimensions must have size 1."
        )
    return roles
