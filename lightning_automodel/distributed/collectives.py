"""Collectives outside the training step: barriers, object broadcasts, reductions."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed import heart, meeting, network, process_group
from lightning_automodel.distributed.process_group import group_rank, group_size

log = logging.getLogger(__name__)

T = TypeVar("T")


def barrier_and_log(message: str = "", *, string: str = "") -> None:
    """Wait for every rank, then log ``message`` on rank 0, at level INFO.

    ``string`` is NeMo Automodel's name for the message. A collective on the default group. If a rank does
    not call it, the others raise when the group's timeout ends. Without a process group it only logs.
    """
    if group_size() > 1:
        dist.barrier()
    if group_rank() == 0:
        log.info(message or string)


def named_barrier(name: str, timeout: timedelta) -> None:
    """Wait for every rank of the default group, if there is one. It goes through the store, not the device.

    Every rank must call it, with the same name. If one does not within the timeout, the others raise
    RankFailedError, which names the missing ranks and the barrier.
    """
    if group_size() == 1:
        return
    number = process_group.next_number("barriers")
    at = f"barrier {number} ({name!r})"
    ranks = range(group_size())
    limit_s = timeout.total_seconds()
    running = heart.current()
    if running is None:
        store = dist.PrefixStore(f"barrier/{number}", process_group.connection(timeout))
        meeting.meet(store, at, group_rank(), ranks, None, limit_s)
    else:
        running.meet(at, ranks, None, limit_s)


def host_group(timeout: timedelta) -> dist.ProcessGroup:
    """The default group if its backend is gloo, else a separate one. The first call is a collective."""
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend() == dist.Backend.GLOO:
        return world
    return _kept_group("host", timeout)


def background_group(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks that training does not use. The first call is a collective over the world."""
    return _kept_group("background", timeout)


def _kept_group(purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    kept = process_group.kept_with_world()
    if purpose not in kept:
        kept[purpose] = dist.new_group(backend="gloo", timeout=network.CONNECT_TIMEOUT)
    group: dist.ProcessGroup = kept[purpose]
    group.set_timeout(timeout)
    return group


def broadcast_object(value: Any, src: int, group: dist.ProcessGroup | None = None) -> Any:
    """The picklable ``value`` of rank ``src`` in ``group``, else in the default group. A collective over it, if any."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=src)
    return values[0]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The picklable ``value`` of each rank. A collective over ``group``, else over the default group, if any."""
    values = [value]
    if dist.is_initialized():
        values = values * dist.get_world_size(group)
        dist.all_gather_object(values, value, group)
    return values


def gather_to_first(value: T, group: dist.ProcessGroup) -> list[T]:
    """On the first rank of ``group`` the picklable ``value`` of each; none elsewhere. A collective over it."""
    values: list[T] | None = None
    if group.rank() == 0:
        values = [value] * group.size()
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


class Gathers:
    """What user code gathers from shards. Any thread may read it.

    Attributes:
        count: How often, so far.
        current: What is gathered now, or could not be, and what for.
        check: Raises where user code must not communicate.
    """

    def __init__(self) -> None:
        self.count = 0
        self.current: str | None = None
        self.check: Callable[[], None] = lambda: None


gathers = Gathers()


@contextmanager
def gathering(name: str, function: str) -> Iterator[None]:
    """Context of a gather of a sharded tensor by user code, which every rank of its mesh must reach."""
    gathers.check()
    gathers.count += 1
    gathers.current = f"{name} for {function}"
    yield
    gathers.current = None  # not after an exception: what could not be gathered is told


def disagreement(own: dict[Any, str], group: dist.ProcessGroup | None = None) -> str:
    """The first entry that differs from the first rank's, in words; empty on all ranks if they agree. A collective."""
    first = broadcast_object(own, 0, group)
    found = [
        f"{key} is {first.get(key, 'missing')} on rank 0 and {own.get(key, 'missing')} on rank {dist.get_rank(group)}"
        for key in {**first, **own}
        if first.get(key) != own.get(key)
    ]
    # Not all that was found: it would be hundreds of megabytes at a thousand ranks.
    return next(filter(None, gather_objects("".join(found[:1]), group)), "")


def full(tensor: Tensor) -> Tensor:
    """All of a ``DTensor``, detached; a collective over its mesh. Other tensors are returned unchanged."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    return tensor


def reduce_tensor(
    tensor: Tensor,
    group: dist.ProcessGroup,
    reduce_op: dist.ReduceOp | str | None,
    device: torch.device,
    num_averaged: int | None = None,
) -> Tensor:
    """Reduce ``tensor`` over ``group`` into a new one. A collective. The mean of integers is taken in float64.

    A mean is the sum divided by ``num_averaged``, or by the number of ranks. One rank has nothing to reduce.
    """
    if group.size() == 1:
        return tensor.detach().clone()
    reduced = tensor.detach().to(device, copy=True).contiguous()
    if is_mean(reduce_op):
        if not (reduced.is_floating_point() or reduced.is_complex()):
            reduced = reduced.double()
        dist.all_reduce(reduced, group=group)
        reduced /= num_averaged or group.size()
    else:
        if isinstance(reduce_op, str):
            reduce_op = getattr(dist.ReduceOp, reduce_op.upper())
        dist.all_reduce(reduced, op=reduce_op, group=group)
    return reduced.to(tensor.device)


def is_mean(reduce_op: dist.ReduceOp | str | None) -> bool:
    """Whether :func:`reduce_tensor` averages."""
    if isinstance(reduce_op, str):
        reduce_op = reduce_op.lower()
    return reduce_op in ("mean", "avg", None, dist.ReduceOp.AVG)
