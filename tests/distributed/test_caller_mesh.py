"""A mesh that the caller built: what its dimensions may be called, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_automodel.distributed.mesh import DATA, REPLICATE, SHARD, TENSOR, MeshSizes, adopt_mesh
from tests.rank_pool import RankPool

Spec = tuple[tuple[int, ...], tuple[str, ...] | None]


def adopt(spec: Spec, engine: Any = "fsdp2", type_: str = "cpu") -> Any:
    """Sizes, names and sizes of what FSDP2 takes, and ranks with different data; or the error."""
    shape, names = spec
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        adopted = adopt_mesh(mesh, type_, engine)
    except ValueError as error:
        return str(error)
    ranks = adopted.data_parallel.mesh.tolist()
    assert adopted.mesh is mesh
    assert adopted.group.size() == len(ranks) == adopted.sizes.data_parallel
    assert (adopted.tensor_parallel is None) == (TENSOR not in (names or ()))
    return adopted.sizes, adopted.fsdp.mesh_dim_names, tuple(adopted.fsdp.shape), ranks


def adopt_all(arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [adopt(*each) for each in arguments]


FITTING: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    ((((4,), (DATA,)),), (MeshSizes(1, 4), (DATA,), (4,), [0, 1, 2, 3])),
    ((((2, 2), (DATA, TENSOR)),), (MeshSizes(1, 2, 2), (DATA,), (2,), [0, 2])),
    ((((2, 2), (REPLICATE, SHARD)),), (MeshSizes(2, 2), (REPLICATE, SHARD), (2, 2), [0, 1, 2, 3])),
    ((((1, 4), (REPLICATE, SHARD)),), (MeshSizes(1, 4), (SHARD,), (4,), [0, 1, 2, 3])),
    ((((2, 1, 2), (REPLICATE, SHARD, TENSOR)),), (MeshSizes(2, 1, 2), (REPLICATE, SHARD), (2, 1), [0, 2])),
    ((((2, 2), (REPLICATE, SHARD)), "ddp"), (MeshSizes(4, 1), (REPLICATE, SHARD), (2, 2), [0, 1, 2, 3])),
]

NEEDS = (
    ", but needs 'data_parallel_replicate' and 'data_parallel_shard', or one of 'data_parallel_shard' and"
    " 'data_parallel', and after them may have 'tensor_parallel': pass such mesh_dim_names, in this order."
)
UNNAMED: list[Any] = [None, (DATA, "pp"), (DATA, SHARD), (TENSOR, DATA)]
UNFIT: list[tuple[tuple[Any, ...], str]] = [
    *[(((2, 2), names), f"device_mesh has the dimensions {names or ()}{NEEDS}") for names in UNNAMED],
    (((4,), (TENSOR,)), f"device_mesh has the dimensions {(TENSOR,)}{NEEDS}"),
    (((4,), (REPLICATE,)), f"device_mesh has the dimensions {(REPLICATE,)}{NEEDS}"),
]
REFUSED: list[tuple[tuple[Any, ...], str]] = [
    *[((spec,), message) for spec, message in UNFIT],
    (
        (((2, 2), (DATA, TENSOR)), "ddp"),
        "Tensor parallelism (size 2) does not work with data_parallel='ddp', which copies whole parameters:"
        " pass data_parallel='fsdp2', with data_parallel_replicate_size for copies.",
    ),
    (
        (((4,), (DATA,)), "fsdp2", "cuda"),
        "device_mesh is for devices of type 'cpu', but this run's are of type 'cuda': build it with"
        " init_device_mesh('cuda', ...).",
    ),
]


def test_meshes_that_fit(pool4: RankPool) -> None:
    """Names give the meaning; rank 0's view of the ranks with different data is asserted."""
    outcomes = pool4.run(adopt_all, [arguments for arguments, _ in FITTING])[0]
    assert outcomes == [expected for _, expected in FITTING]


def test_meshes_that_do_not_fit(pool4: RankPool) -> None:
    """One sentence on every rank: what was given, what would do."""
    for outcomes in pool4.run(adopt_all, [arguments for arguments, _ in REFUSED]):
        assert outcomes == [message for _, message in REFUSED]


def adopt_permuted(layouts: list[Any]) -> list[str]:
    messages = []
    for layout in layouts:
        names = (REPLICATE, SHARD)[-torch.tensor(layout).ndim :]
        with pytest.raises(ValueError, match="in their order") as raised:
            adopt_mesh(DeviceMesh("cpu", layout, mesh_dim_names=names), "cpu", "fsdp2")
        messages.append(str(raised.value))
    return messages


def test_ranks_out_of_order_are_refused(pool4: RankPool) -> None:
    """Replicas would average different shards: weights were silently wrong. So is a mesh of some ranks."""
    layouts: list[Any] = [[[3, 1], [0, 2]], [[0, 1], [3, 2]], [[0, 2], [1, 3]], [1, 0, 2, 3], [0, 1]]
    for messages in pool4.run(adopt_permuted, layouts):
        for layout, message in zip(layouts, messages, strict=True):
            assert message.startswith(f"device_mesh holds the ranks {layout}, but must hold all 4 ranks")
