"""What the collectives of `nccl_like.py` do as NCCL's do. Each function runs on two ranks and raises if they do not."""

from __future__ import annotations

import contextlib
import datetime
import threading
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


def _connected(timeout_s: float = 60.0) -> tuple[dist.ProcessGroup, Any]:
    """A group of its own, and its backend."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    dist.all_reduce(_ones(), group=group)
    return group, group._get_backend(_here())


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


def groups_connect_on_the_host() -> None:
    """The first collective of a group blocks the host until all have come; the second one does not."""
    group = dist.new_group()
    for is_first in (True, False):
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        with _seconds() as passed:
            dist.all_reduce(_ones(), group=group)
            assert dist.get_rank() == 1 or (passed() > LATE_S / 2) == is_first


def mismatches_hang_until_the_abort() -> None:
    """Nobody is told. The abort frees the host, as if the work were done or with an error; then collectives raise."""
    for size in ((3, 4), (4, 4)):
        for raises in (False, True):
            device.extension.raise_after_abort(raises)
            group, backend = _connected()
            tensor = _ones(size[dist.get_rank()])
            dist.all_reduce(tensor, group=group)
            if size == (4, 4) and dist.get_rank() == 0:
                dist.broadcast(tensor, 0, group=group)
            elif size == (4, 4):
                dist.all_reduce(tensor, group=group)
            threading.Timer(LATE_S, backend.abort).start()
            with _seconds() as passed:
                if raises:
                    with pytest.raises(RuntimeError, match="was aborted while the host waited"):
                        tensor.sum().item()
                else:
                    tensor.sum().item()
                assert passed() > LATE_S / 2
            with pytest.raises(dist.DistBackendError, match="aborted"):
                dist.all_reduce(tensor, group=group)
            dist.destroy_process_group(group)
    device.extension.raise_after_abort(False)


def shutdown_waits_for_the_others() -> None:
    """And an abort waits for it, until the timeout; the watchdog does not see it."""
    group, backend = _connected(timeout_s=LATE_S)
    dist.barrier()
    if dist.get_rank() == 0:
        leaving = threading.Thread(target=dist.destroy_process_group, args=(group,))
        leaving.start()
        time.sleep(LATE_S / 4)
        with _seconds() as passed, pytest.raises(dist.DistBackendError, match="timed out"):
            backend.abort()
        assert passed() > LATE_S - 0.01
        assert leaving.is_alive()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    else:
        leaving.join(30)
        assert not leaving.is_alive()
