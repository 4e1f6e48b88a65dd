"""What the second device does as an accelerator does.

Each function runs on the ranks of a pool and raises if not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel.gradients.rescale_clip import clip_gradients, scale_gradients_
from lightning_automodel.sharding.activation_checkpointing import offloaded_activations
from tests.second_device import device

HERE = f"{device.TYPE}:0"


def _event() -> torch.Event:
    return torch.accelerator.current_stream(HERE).record_event()


def streams_wait_for_each_other() -> None:
    """Or reading what the other writes raises; a copy back reads what has not arrived yet."""
    tensor = torch.ones(4, device=HERE)
    side = torch.Stream(HERE)
    with side, pytest.raises(RuntimeError, match="without having waited for it"):
        tensor + 1
    pinned = torch.zeros(4, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        pinned.copy_(tensor, non_blocking=True)
    assert pinned.to(HERE, non_blocking=True).isnan().all()
    torch.accelerator.current_stream().wait_stream(side)
    assert pinned.to(HERE, non_blocking=True).tolist() == [1.0] * 4


def waits_are_told() -> None:
    """Each with its line; what does not wait is not told."""
    tensor = torch.arange(4.0, device=HERE)
    page = torch.ones(2)
    calls: dict[str, Callable[[], Any]] = {
        "item": lambda: tensor.sum().item(),
        "nonzero": lambda: tensor.nonzero(),
        "masked_select": lambda: tensor.masked_select(tensor > 1),
        "copy to the host": lambda: tensor.to("cpu"),
        "copy to pageable memory": lambda: torch.empty(4).copy_(tensor, non_blocking=True),
        "copy from the host": lambda: page.to(HERE),
        device.PAGEABLE: lambda: page.to(HERE, non_blocking=True),
        "device.synchronize": torch.accelerator.synchronize,
        "stream.synchronize": torch.accelerator.current_stream(HERE).synchronize,
        "event.synchronize": _event().synchronize,
    }
    for name, call in calls.items():
        with device.recorded_waits() as waits:
            call()
        assert [what for what, _ in waits] == [name], (name, waits)
        assert all("behaviour.py:" in line for _, line in waits), (name, waits)
    pinned = page.pin_memory()
    positions = torch.tensor([0, 1], device=HERE)
    with device.recorded_waits() as waits:
        pinned.to(HERE, non_blocking=True)
        (tensor * 2).softmax(0).sort()
        tensor[positions] = 3.0
    assert not waits


def activations_leave_and_come_back() -> None:
    """Without a wait, and with the same gradients."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64).to(HERE) for _ in range(8)]
    start = torch.randn(1024, 64, device=HERE)

    def gradients(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> tuple[list[Tensor], int]:
        before = torch.accelerator.memory_allocated(0)
        hidden = start
        for layer in layers:
            with context():
                hidden = layer(hidden.sin())
        kept = torch.accelerator.memory_allocated(0) - before
        return list(torch.autograd.grad(hidden.square().sum(), [layer.weight for layer in layers])), kept

    expected, _ = gradients(torch.autograd.graph.save_on_cpu)
    with device.recorded_waits() as waits:
        found, kept = gradients(offloaded_activations)
    assert not waits
    assert all(map(torch.equal, found, expected))
    assert kept <= 3 * start.nbytes + 1024


def kernels_do_not_grow_with_the_parameters() -> None:
    """Scaling and clipping launch as many for thirty gradients as for three, but in half precision."""

    def launched(dtype: torch.dtype, number: int) -> Counter[str]:
        parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype, device=HERE)) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        factor = torch.tensor(0.5, dtype=torch.float64, device=HERE)
        with device.recorded_waits() as waits, device.recorded_kernels() as found:
            scale_gradients_(parameters, factor)
            clip_gradients(parameters, 1.0)
        assert not waits
        operators: Counter[str] = Counter()
        for (_, _, operator), count in found.items():
            operators[operator] += count
        return operators

    for dtype in (torch.float32, torch.float64):
        many = launched(dtype, 30)
        assert many == launched(dtype, 3)
        on_lists = {name: count for name, count in many.items() if name.startswith("_foreach_")}
        assert on_lists == {"_foreach_mul_": 2, "_foreach_norm": 1}
    assert launched(torch.bfloat16, 30) != launched(torch.bfloat16, 3)
