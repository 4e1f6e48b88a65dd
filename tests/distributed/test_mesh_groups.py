"""A mesh makes few groups: the default one serves all ranks, and nothing connects where a rank is alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

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
