"""What the second device does as an accelerator does, and its collectives as NCCL's.

Each function runs on the ranks of a pool and raises if not.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from lightning_automodel.gradients.rescale_clip import clip_gradients, gradient_factor, scale_gradients_
from lightning_automodel.gradients.token_loss import TokenWeighting, sums_of
from lightning_automodel.sharding.activation_checkpointing import offloaded_activations
from tests.second_device import device

HERE = f"{device.TYPE}:0"
NEIGHBOUR = f"{device.TYPE}:1"
LATE_S = 0.4


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


def devices_are_told_apart() -> None:
    """Mixing them raises, also with the CPU; a tensor is on the device that was current."""
    own = torch.ones(4, device=HERE)
    for other in (torch.ones(4), torch.ones(4, device=NEIGHBOUR)):
        for mix in (torch.add, torch.dot, lambda first, second: torch.cat([first, second])):
            with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
                mix(own, other)
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(own, own, out=torch.ones(4))
    assert (own + torch.tensor(1.0)).tolist() == [2.0] * 4
    torch.accelerator.set_device_index(1)
    assert torch.ones(1, device=device.TYPE).device.index == 1
    assert (own + own).device.index == 0
    torch.accelerator.set_device_index(0)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device=HERE, generator=torch.Generator())


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


def negative_counts_do_not_get_lost() -> None:
    """Though nobody reads them: beside counts that are right, gradients of their window are NaN."""
    told = torch.tensor(-3, device=HERE), torch.tensor(8, device=HERE)
    loss = torch.ones((), device=HERE)
    with device.recorded_waits() as waits:
        counts = [TokenWeighting().count(None, {"num_label_tokens": count}) for count in told]
        totals = torch.stack([sums_of(loss, count) for count in counts]).sum(0)
        factor = gradient_factor(totals[0], 2)
    assert not waits
    assert factor.isnan()


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


# --- Where collectives behave as NCCL's -------------------------------------------------------------------------------


def _here() -> torch.device:
    return torch.device(device.TYPE, dist.get_rank())


def _ones(size: int = 4) -> Tensor:
    return torch.ones(size, device=_here())


@contextlib.contextmanager
def _seconds() -> Iterator[Callable[[], float]]:
    start = time.monotonic()
    yield lambda: time.monotonic() - start


def collectives_are_queued() -> None:
    """The call returns, waiting for it makes the stream wait, and the host waits where it reads, or synchronizes."""
    reads: list[Callable[[Tensor], Any]] = [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.cpu(),
        lambda tensor: torch.accelerator.synchronize(),
        lambda tensor: torch.accelerator.current_stream().synchronize(),
        lambda tensor: torch.get_device_module(_here()).empty_cache(),
        lambda tensor: torch.zeros(4, pin_memory=True).copy_(tensor, non_blocking=True),
    ]
    dist.all_reduce(_ones())
    for read in reads:
        dist.barrier()
        tensor = _ones()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        with _seconds() as passed:
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            event = torch.accelerator.current_stream().record_event()
            if dist.get_rank() == 0:
                assert not work.is_completed()
                assert not event.query()
                assert not torch.accelerator.current_stream().query()
            assert passed() < LATE_S / 2
            read(tensor)
            assert dist.get_rank() == 1 or passed() > LATE_S / 2
        assert event.query()
        assert tensor.tolist() == [2.0] * 4


def reads_must_wait() -> None:
    """A stream that has not waited for a collective cannot read its result, only view it."""
    tensor = _ones()
    work = dist.all_reduce(tensor, async_op=True)
    halves = tensor.view(2, 2)
    with pytest.raises(RuntimeError, match="without having waited for it"):
        halves + 1
    work.wait()
    assert (halves + 1).sum().item() == 12.0
    gathered = functional.all_gather_single(tensor, 0, dist.group.WORLD)
    assert gathered.view(2, 4).sum().item() == 16.0
