"""What deferral and gathered parameters are estimated to cost, and how much memory is said to be free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_automodel.sharding import memory
from tests.rank_pool import RankPool

MIB = 2**20
GIB = 2**30


def _pretend_host(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str]) -> None:
    """Let `memory` read these files instead of the machine's."""
    for name, text in files.items():
        (folder / Path(name).name).write_text(text)
    monkeypatch.setattr(memory, "Path", lambda path: folder / Path(path).name)


MEMINFO = f"MemTotal: {99 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:   {8 * 2**20} kB\n"


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({}, 8 * GIB),
        ({"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": str(GIB)}, 8 * GIB),
        (
            {"/sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{GIB}\n"},
            3 * GIB,
        ),
        (
            {"/sys/fs/cgroup/memory.max": f"{40 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{GIB}\n"},
            8 * GIB,
        ),
    ],
)
def test_host_memory_is_what_kernel_and_control_group_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: dict[str, str], free: int
) -> None:
    """The smaller of both, shared by the ranks of a node."""
    _pretend_host(monkeypatch, tmp_path, {"/proc/meminfo": MEMINFO, **limits})
    assert memory.free_bytes(torch.device("cpu"), 1) == free
    assert memory.free_bytes(torch.device("cpu"), 4) == free // 4


def test_unknown_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing tells, nothing is guessed; nor on a device without a query."""
    _pretend_host(monkeypatch, tmp_path, {})
    assert memory.free_bytes(torch.device("cpu"), 1) is None
    assert memory.free_bytes(torch.device("mps"), 1) is None


def test_this_host_has_memory() -> None:
    """The real files parse."""
    free = memory.free_bytes(torch.device("cpu"), 1)
    assert free is not None
    assert free > 2**20


@pytest.mark.parametrize(
    ("dtype", "moments"), [(torch.bfloat16, 8), (torch.float32, 8), (torch.float64, 16)]
)
def test_estimate_without_units(dtype: torch.dtype, moments: int) -> None:
    """Gradients and two moments, float32 at least, of every trainable parameter, and nothing to gather."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False).requires_grad_(False)).to(dtype)
    estimate = memory.estimate(model, torch.device("cpu"))
    state = 16 * (dtype.itemsize + moments)
    assert estimate == {"unsharded_parameters": 0, "deferred_gradients": 0, "sharded_state": state}
    # Offloaded shards take no memory of the device, nor does their state.
    assert set(memory.estimate(model, torch.device("meta")).values()) == {0}


NEEDED = {"unsharded_parameters": 30, "deferred_gradients": 40, "sharded_state": 20}  # MiB


@pytest.mark.parametrize(
    ("defer", "keep", "budget", "expected"),
    [
        ("auto", "auto", 90, (True, True)),
        ("auto", "auto", 89, (True, False)),
        ("auto", "auto", 60, (True, False)),
        ("auto", "auto", 59, (False, True)),  # without the gradients, the parameters fit
        ("auto", "auto", 50, (False, True)),
        ("auto", "auto", 49, (False, False)),
        ("auto", "auto", None, (False, False)),
        # What an option has decided counts, whether it fits or not.
        ("auto", True, 90, (True, True)),
        ("auto", True, 89, (False, True)),
        ("auto", False, 60, (True, False)),
        (True, "auto", 90, (True, True)),
        (True, "auto", 89, (True, False)),
        (False, "auto", 50, (False, True)),
        ("all_reduce", "auto", 50, ("all_reduce", True)),
        (True, True, 0, (True, True)),
        (False, False, 1000, (False, False)),
    ],
)
def test_choice(defer: Any, keep: Any, budget: int | None, expected: tuple[Any, bool]) -> None:
    """Gradients first, then parameters beside them; half of the free memory is theirs."""
    needed = {name: size * MIB for name, size in NEEDED.items()}
    choice = memory.choose(defer, keep, needed, None if budget is None else 2 * budget * MIB)
    assert (choice.defer, choice.keep) == expected
    assert choice.defer_reason.startswith("auto: ") == (defer == "auto")
    assert choice.keep_reason.startswith("auto: ") == (keep == "auto")
    figures = {
        "True": "fits into 50% of the free memory of every",
        "False": "exceeds 50% of the free memory of some",
    }
    if budget is not None and defer == "auto":
        with_parameters = NEEDED["unsharded_parameters"] if keep is True else 0
        assert f"an estimated {60 + with_parameters} MiB" in choice.defer_reason
        assert f"{figures[str(choice.defer)]} rank ({budget} MiB)" in choice.defer_reason
    if budget is None:
        assert "unknown free memory" in choice.defer_reason


def _agree_in_a_grid() -> tuple[dict[str, int], int | None]:
    """Over rows and columns of a mesh, as data-parallel and tensor-parallel ranks are."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    groups = [mesh["row"].get_group(), mesh["column"].get_group()]
    return memory.agree({"size": (3, 9, 5, 4)[rank]}, (7, 8, 6, 9)[rank], torch.device("cpu"), groups)


def test_ranks_of_two_groups_agree(pool4: RankPool) -> None:
    """The extremes of the world, which are in no group together."""
    assert pool4.run(_agree_in_a_grid) == [({"size": 9}, 6)] * 4


def _agree(free_by_rank: list[int | None]) -> tuple[dict[str, int], int | None]:
    rank = dist.get_rank()
    needed = {"first": 2**40 + rank, "second": 7 - rank}  # more than float32 or int32 could hold
    return memory.agree(needed, free_by_rank[rank], torch.device("cpu"), [dist.group.WORLD])


def test_ranks_agree_on_figures(pool2: RankPool) -> None:
    """The largest need and the smallest memory, to the byte; what one rank does not know, none knows."""
    needed = {"first": 2**40 + 1, "second": 7}
    assert pool2.run(_agree, [2**41 + 1, 2**41]) == [(needed, 2**41)] * 2
    assert pool2.run(_agree, [2**41, None]) == [(needed, None)] * 2
    assert pool2.run(_agree, [0, 5]) == [(needed, 0)] * 2
