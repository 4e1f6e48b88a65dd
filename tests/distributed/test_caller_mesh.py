"""A mesh that the caller built: what its dimensions may be called, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_automodel.distributed.mesh import MeshSizes, adopt_mesh
from tests.rank_pool import RankPool

Spec = tuple[tuple[int, ...], tuple[str, ...] | None]


def adopt(spec: Spec, engine: Any = "fsdp2", told: dict[str, Any] | None = None, type_: str = "cpu") -> Any:
    """Sizes, names and sizes of what FSDP2 takes, and ranks with different data; or the error."""
    shape, names = spec
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        adopted = adopt_mesh(mesh, type_, engine, told or {})
    except ValueError as error:
        return str(error)
    ranks = adopted.data_parallel.mesh.tolist()
    assert adopted.mesh is mesh
    assert adopted.group.size() == len(ranks) == adopted.sizes.data_parallel
    assert (adopted.tensor_parallel is None) == ("tp" not in " ".join(names or ()))
    return adopted.sizes, adopted.fsdp.mesh_dim_names, tuple(adopted.fsdp.shape), ranks


def adopt_all(arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [adopt(*each) for each in arguments]


ALL = [0, 1, 2, 3]
FITTING: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    ((((4,), None),), (MeshSizes(1, 4), None, (4,), ALL)),
    ((((4,), ("dp",)),), (MeshSizes(1, 4), ("dp",), (4,), ALL)),
    ((((2, 2), ("dp", "tp")),), (MeshSizes(1, 2, 2), ("dp",), (2,), [0, 2])),
    (
        (((2, 2), ("dp_replicate", "dp_shard")),),
        (MeshSizes(2, 2), ("dp_replicate", "dp_shard"), (2, 2), ALL),
    ),
    ((((1, 4), ("replicate", "fsdp")),), (MeshSizes(1, 4), ("fsdp",), (4,), ALL)),
    (
        (((1, 2, 2, 1), ("pp", "dp_replicate", "shard", "tp")),),
        (MeshSizes(2, 2), ("dp_replicate", "shard"), (2, 2), ALL),
    ),
    (
        (((2, 1, 2), ("dp_replicate", "dp_shard", "tp")),),
        (MeshSizes(2, 1, 2), ("dp_replicate", "dp_shard"), (2, 1), [0, 2]),
    ),
    ((((2, 2), ("replicate", "shard")), "ddp"), (MeshSizes(4, 1), ("replicate", "shard"), (2, 2), ALL)),
    ((((4,), ("replicate",)), "ddp"), (MeshSizes(4, 1), ("replicate",), (4,), ALL)),
    (
        (((2, 2), ("dp", "tp")), "fsdp2", {"tensor_parallel_size": 2, "data_parallel_size": "auto"}),
        (MeshSizes(1, 2, 2), ("dp",), (2,), [0, 2]),
    ),
]

NEEDS = ", but needs 'data_parallel_replicate' and 'data_parallel_shard', or "
UNFIT: list[tuple[tuple[Any, ...], str]] = [
    ((((2, 2), None),), f"device_mesh has the dimensions 'no name' (2), 'no name' (2){NEEDS}"),
    *(
        (((shape, names),), f"device_mesh has the dimensions {has}{NEEDS}")
        for shape, names, has in (
            ((2, 2), ("dp", "pp"), "'dp' (2), 'pp' (2)"),
            ((2, 2), ("dp", "data"), "'dp' (2), 'data' (2)"),
            ((4,), ("tp",), "'tp' (4)"),
            ((2, 2), ("tp", "dp"), "'tp' (2), 'dp' (2)"),
            ((4,), ("replicate",), "'replicate' (4)"),
        )
    ),
    (
        (((2, 2), ("dp", "tp")), "ddp"),
        "Tensor parallelism (size 2) does not work with data_parallel='ddp'",
    ),
    (
        (((2, 2), ("dp", "tp")), "fsdp2", {"tensor_parallel_size": 4}),
        "tensor_parallel_size=4 contradicts device_mesh, where it is 2: leave it out.",
    ),
    (
        (((4,), ("dp",)), "fsdp2", {}, "cuda"),
        "device_mesh is for devices of type 'cpu', but this run's are of type 'cuda': build it with",
    ),
]


def test_meshes_that_fit(pool4: RankPool) -> None:
    """Names give the meaning; rank 0's view of the ranks with different data is asserted."""
    outcomes = pool4.run(adopt_all, [arguments for arguments, _ in FITTING])[0]
    assert outcomes == [expected for _, expected in FITTING]


def test_meshes_that_do_not_fit(pool4: RankPool) -> None:
    """One sentence on every rank: what was given, what would do."""
    for outcomes in pool4.run(adopt_all, [arguments for arguments, _ in UNFIT]):
        for outcome, (_, message) in zip(outcomes, UNFIT, strict=True):
            assert outcome.startswith(message), outcome


def adopt_ranks(layouts: list[Any]) -> list[str]:
    messages = []
    for layout in layouts:
        names = ("replicate", "shard") if isinstance(layout[0], list) else ("shard",)
        with pytest.raises(ValueError, match="in their order") as raised:
            adopt_mesh(DeviceMesh("cpu", layout, mesh_dim_names=names), "cpu", "fsdp2", {})
        messages.append(str(raised.value))
    return messages


def test_ranks_out_of_order_or_missing_are_refused(pool4: RankPool) -> None:
    """Replicas would average different shards: weights were silently wrong."""
    layouts: list[Any] = [[[3, 1], [0, 2]], [[0, 1], [3, 2]], [[0, 2], [1, 3]], [1, 0, 2, 3], [0, 1]]
    for messages in pool4.run(adopt_ranks, layouts):
        for layout, message in zip(layouts, messages, strict=True):
            assert message.startswith(f"device_mesh holds the ranks {layout}, but must hold all 4 ranks")
