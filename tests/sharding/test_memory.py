"""What deferral and gathered parameters are estimated to cost, and how much memory is said to be free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_automodel.sharding import memory

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
        ({"/sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{GIB}\n"}, 3 * GIB),
        ({"/sys/fs/cgroup/memory.max": f"{40 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{GIB}\n"}, 8 * GIB),
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


@pytest.mark.parametrize(("dtype", "moments"), [(torch.bfloat16, 8), (torch.float32, 8), (torch.float64, 16)])
def test_estimate_without_units(dtype: torch.dtype, moments: int) -> None:
    """Gradients and two moments, float32 at least, of every trainable parameter, and nothing to gather."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False).requires_grad_(False)).to(dtype)
    estimate = memory.estimate(model, defers_gradients=True)
    state = 16 * (dtype.itemsize + moments)
    assert estimate == {"unsharded_parameters": 0, "deferred_gradients": 0, "sharded_state": state}
