"""Joining the process group, and asking where in it this process stands."""

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor

from lightning_automodel import _compat

log = logging.getLogger(__name__)


def get_rank_safe() -> int:
    """Rank of this process in the default group; 0 without one. Not a collective."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size_safe() -> int:
    """Number of ranks in the default group; 1 without one. Not a collective."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def barrier_and_log(message: str) -> None:
    """Wait for every rank, then log ``message`` on rank 0.

    A collective on the default group: every rank must call it. If a rank does not come, the others raise when the
    group's timeout ends. Without an initialised process group there is nobody to wait for, and it only logs.

    Args:
        message: What rank 0 logs, at level INFO, once everybody has arrived.
    """
    if get_world_size_safe() > 1:
        dist.barrier()
    if get_rank_safe() == 0:
        log.info(message)


def parse_timeout(timeout: timedelta | float) -> timedelta:
    """Read a timeout given as ``timedelta`` or as minutes.

    Raises:
        ValueError: If it is not positive.
        TypeError: If it is neither a ``timedelta`` nor a number.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (timedelta, int, float)):
        raise TypeError(f"timeout must be a timedelta or a number of minutes, got {timeout!r}.")
    try:
        parsed = timeout if isinstance(timeout, timedelta) else timedelta(minutes=timeout)
    except (OverflowError, ValueError):
        parsed = timedelta(0)
    if parsed <= timedelta(0):
        raise ValueError(
            f"timeout must be positive and finite, got {timeout!r}; pass a timedelta or a number of minutes, e.g. 30."
        )
    return parsed


def choose_backend(device: torch.device, requested: str | None, cpu_offload: bool) -> str:
    """Backend of the default group: the requested one, else the device's own, with gloo beside it for CPU offload."""
    if requested is not None:
        return requested
    backend = _compat.default_backend_for_device(device)
    return f"cpu:gloo,{device.type}:{backend}" if cpu_offload and device.type != "cpu" else backend


def join_process_group(
    cluster_environment: ClusterEnvironment, backend: str, timeout: timedelta, device: torch.device
) -> None:
    """Join the default process group, or use the one that exists. A collective over the whole world.

    Args:
        cluster_environment: Tells rank, world size, address and port.
        backend: Backend or mixed backends, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        timeout: How long a collective, and the joining itself, may wait.
        device: Device of this rank; bound to the group eagerly where it is not the CPU.
    """
    _compat.reset_seed()
    device_id = device if device.type != "cpu" else None
    _compat.init_dist_connection(cluster_environment, backend, timeout=timeout, device_id=device_id)


def process_barrier(device: torch.device) -> None:
    """Wait for every rank of the default group; nothing without one. A collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    if "nccl" in dist.get_backend():
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def broadcast_object(value: Any, src: int) -> Any:
    """Rank ``src``'s picklable value, on every rank. A collective on the default group; without one, the value."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    values = [value]
    dist.broadcast_object_list(values, src)
    return values[0]


def reduce_tensor(
    tensor: Tensor, group: dist.ProcessGroup, reduce_op: dist.ReduceOp | str | None, device: torch.device
) -> Tensor:
    """Reduce ``tensor`` over ``group`` into a new one. A collective on the group: one all-reduce.

    Args:
        tensor: Any shape; every rank's must agree.
        group: Ranks to reduce over.
        reduce_op: ``"mean"``, ``"avg"``, ``"sum"`` or a ``ReduceOp``. The mean of integers is taken in float64.
        device: Where the group can reduce.

    Returns:
        The reduced tensor, on the device of ``tensor``.
    """
    op = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    averages = op in ("mean", "avg", None, dist.ReduceOp.AVG)
    reduced = tensor.detach().to(device, copy=True).contiguous()
    if averages and not reduced.is_floating_point():
        reduced = reduced.double()
    if isinstance(op, str) and not averages:
        op = getattr(dist.ReduceOp, op.upper())
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM if averages else op, group=group)
    if averages:
        reduced /= group.size()
    return reduced.to(tensor.device)
