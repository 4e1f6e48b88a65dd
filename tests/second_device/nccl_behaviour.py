"""What the collectives of `nccl_like.py` do as NCCL's do. Each function runs on two ranks and raises if they do not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from tests.second_device import device

LATE_S = 0.4


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
