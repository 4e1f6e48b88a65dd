"""A mesh makes few groups, and connects nothing where a rank is alone; what a mesh of the caller may look like."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_automodel.distributed.mesh import MeshSizes, RunMesh, adopt_mesh, build_mesh
from tests.rank_pool import RankPool

TIMEOUT = timedelta(seconds=30)


@pytest.fixture(scope="module")
def pool4() -> Iterator[RankPool]:
    """Four ranks whose groups no other test has made."""
    pool = RankPool(4)
    yield pool
    pool.stop()


def _made(sizes: MeshSizes, times: int = 1) -> tuple[list[tuple[int, ...]], list[float]]:
    """Ranks of the groups that building a mesh has made, and sums of the ranks' numbers over each of its views."""
    dist.barrier()
    before = set(dist.distributed_c10d._world.pg_map)
    with mock.patch.dict("lightning_automodel.distributed.process_group._kept", clear=True):
        for _ in range(times):
            mesh = build_mesh("cpu", sizes, TIMEOUT)
        made = set(dist.distributed_c10d._world.pg_map) - before
        return [tuple(dist.get_process_group_ranks(group)) for group in made], _sums(mesh)


def _sums(mesh: RunMesh) -> list[float]:
    sums = []
    for view in (mesh.data_parallel, mesh.tokens, mesh.fsdp, mesh.tensor_parallel, mesh.context_parallel):
        for axis in range(0 if view is None else view.ndim):
            number = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(number, group=view.get_group(axis))
            ranks = dist.get_process_group_ranks(view.get_group(axis))
            assert number.item() == sum(ranks)
            gathered = [torch.empty(()) for _ in ranks]
            dist.all_gather(gathered, torch.tensor(float(dist.get_rank())), group=view.get_group(axis))
            assert [int(each) for each in gathered] == ranks
            assert view.size(axis) == len(ranks)
            sums.append(number.item())
    return sums


@pytest.mark.parametrize(
    ("sizes", "num_pairs"),
    [
        (MeshSizes(1, 4), 0),
        (MeshSizes(2, 2), 2),
        (MeshSizes(1, 2, tensor=2), 3),
        (MeshSizes(1, 2, context=2), 3),
        (MeshSizes(2, 1, context=2), 3),
    ],
    ids=["FSDP2", "HSDP", "TP x FSDP2", "CP x FSDP2", "CP x replicas"],
)
@pytest.mark.every_case
def test_few_groups(pool4: RankPool, sizes: MeshSizes, num_pairs: int) -> None:
    """Of all ranks it is the default group. A dimension of size one has a group without a peer.

    A third pair is what ``mesh["data_parallel"]`` has, in whose place the dimension of the same ranks is used.
    """
    for made, sums in pool4.run(_made, sizes):
        by_size = Counter(map(len, made))
        assert by_size[4] == 0
        assert by_size[2] == num_pairs
        assert by_size[1] <= 2
        assert sums


def _fit_often() -> list[int]:
    counts = []
    for sizes in (MeshSizes(2, 2), MeshSizes(1, 2, tensor=2), MeshSizes(2, 2), MeshSizes(1, 2, tensor=2)):
        before = len(dist.distributed_c10d._world.pg_map)
        _sums(build_mesh("cpu", sizes, TIMEOUT))
        counts.append(len(dist.distributed_c10d._world.pg_map) - before)
    return counts


def test_a_later_mesh_of_the_same_sizes_uses_the_same_groups(pool4: RankPool) -> None:
    """However many runs there are in a process."""
    for first, other, *again in pool4.run(_fit_often):
        assert min(first, other) > 0
        assert again == [0, 0]


def _data_parallel(sizes: MeshSizes) -> list[int]:
    mesh = build_mesh("cpu", sizes, TIMEOUT).mesh["data_parallel"]
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh.get_group())
    ranks: list[int] = mesh.mesh.tolist()
    assert total.item() == sum(ranks)
    return ranks


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [(MeshSizes(1, 2, tensor=2), [[0, 2], [1, 3]]), (MeshSizes(2, 2, expert=2), [[0, 1, 2, 3]] * 2)],
    ids=["TP", "experts"],
)
def test_user_code_finds_data_parallel_ranks_by_name(
    pool4: RankPool, sizes: MeshSizes, expected: list[list[int]]
) -> None:
    """Where a dimension of another name has the same ranks, too."""
    assert pool4.run(_data_parallel, sizes) == expected * 2


def _adopted() -> tuple[int, list[float]]:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    before = len(dist.distributed_c10d._world.pg_map)
    adopted = adopt_mesh(mesh, "cpu", "fsdp2", {})
    return len(dist.distributed_c10d._world.pg_map) - before, _sums(adopted)


def test_views_of_a_callers_mesh_make_no_second_group(pool4: RankPool) -> None:
    """Its shards and its data-parallel ranks are the same."""
    assert [made for made, _ in pool4.run(_adopted)] == [0] * 4


def _shard_group_waits(seconds: float) -> None:
    mesh = build_mesh("cpu", MeshSizes(replicate=2, shard=2), timedelta(seconds=seconds))
    if dist.get_rank() % 2 == 1:
        time.sleep(1)
        return
    with pytest.raises(RuntimeError, match="Timed out waiting 300ms"):
        dist.all_reduce(torch.ones(1), group=mesh.mesh["data_parallel_shard"].get_group())


def test_timeout_reaches_the_groups_of_the_mesh(pool4: RankPool) -> None:
    """Not only the default group, which has the timeout of whoever made it."""
    pool4.run(_shard_group_waits, 0.3)
    # The groups' short timeout and their broken connections must not reach the tests that come after.
    pool4.stop()


# --- A mesh that the caller built: what its dimensions may be called --------------------------------------------------


def adopt(
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    engine: Any = "fsdp2",
    told: dict[str, Any] | None = None,
    type_: str = "cpu",
) -> Any:
    """Sizes, names and sizes of what FSDP2 takes, and ranks with different data; or the error."""
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
SAME = {"tensor_parallel_size": 2, "data_parallel_size": "auto"}
FITTING: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    (((4,), None), (MeshSizes(1, 4), None, (4,), ALL)),
    (((4,), ("dp",)), (MeshSizes(1, 4), ("dp",), (4,), ALL)),
    (((2, 2), ("dp", "tp")), (MeshSizes(1, 2, 2), ("dp",), (2,), [0, 2])),
    (((2, 2), ("dp_replicate", "fsdp")), (MeshSizes(2, 2), ("dp_replicate", "fsdp"), (2, 2), ALL)),
    (((1, 4), ("replicate", "fsdp")), (MeshSizes(1, 4), ("fsdp",), (4,), ALL)),
    (
        ((1, 2, 2, 1), ("pp", "dp_replicate", "shard", "tp")),
        (MeshSizes(2, 2), ("dp_replicate", "shard"), (2, 2), ALL),
    ),
    (
        ((2, 1, 2), ("dp_replicate", "dp_shard", "tp")),
        (MeshSizes(2, 1, 2), ("dp_replicate", "dp_shard"), (2, 1), [0, 2]),
    ),
    (((2, 2), ("replicate", "shard"), "ddp"), (MeshSizes(4, 1), ("replicate", "shard"), (2, 2), ALL)),
    (((4,), ("replicate",), "ddp"), (MeshSizes(4, 1), ("replicate",), (4,), ALL)),
    (((2, 2), ("dp", "tp"), "fsdp2", SAME), (MeshSizes(1, 2, 2), ("dp",), (2,), [0, 2])),
]
HAS = "device_mesh has the dimensions "
NEEDS = ", but needs 'data_parallel_replicate' and 'data_parallel_shard', or "
CONTRADICTS = "tensor_parallel_size=4 contradicts device_mesh, where it is 2: leave it out."
OTHER = "device_mesh is for devices of type 'cpu', but this run's are of type 'cuda': build it with"
UNFIT: list[tuple[tuple[Any, ...], str]] = [
    (((2, 2), None), f"{HAS}'no name' (2), 'no name' (2){NEEDS}"),
    (((2, 2), ("dp", "pp")), f"{HAS}'dp' (2), 'pp' (2){NEEDS}"),
    (((2, 2), ("dp", "data")), f"{HAS}'dp' (2), 'data' (2){NEEDS}"),
    (((4,), ("tp",)), f"{HAS}'tp' (4){NEEDS}"),
    (((2, 2), ("tp", "dp")), f"{HAS}'tp' (2), 'dp' (2){NEEDS}"),
    (((4,), ("replicate",)), f"{HAS}'replicate' (4){NEEDS}"),
    (((2, 2), ("dp", "tp"), "ddp"), "Tensor parallelism (size 2) does not work with data_parallel='ddp'"),
    (((2, 2), ("dp", "tp"), "fsdp2", {"tensor_parallel_size": 4}), CONTRADICTS),
    (((4,), ("dp",), "fsdp2", {}, "cuda"), OTHER),
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


def refuse_ranks(layouts: list[Any]) -> None:
    for layout in layouts:
        names = ("replicate", "shard") if isinstance(layout[0], list) else ("shard",)
        message = f"^device_mesh holds the ranks {re.escape(str(layout))}, but must hold all 4 ranks.*in their order"
        with pytest.raises(ValueError, match=message):
            adopt_mesh(DeviceMesh("cpu", layout, mesh_dim_names=names), "cpu", "fsdp2", {})


def test_ranks_out_of_order_or_missing_are_refused(pool4: RankPool) -> None:
    """Replicas would average different shards: weights were silently wrong."""
    pool4.run(refuse_ranks, [[[3, 1], [0, 2]], [[0, 1], [3, 2]], [[0, 2], [1, 3]], [1, 0, 2, 3], [0, 1]])
