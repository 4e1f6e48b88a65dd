"""Joining and leaving the process group, and this process's rank in it.

What this process knows of its default group:

    _kept, _kept_for    what lasts as long as the default group: its meshes, other groups, this process's connection to
                        its store, and, until this process has left, how it has joined, if not the caller made the group
    _counted            how many runs, barriers and blocks there were in a group, the same on all ranks
    _has_failed         a run of several ranks has failed, so that this process joins no other group
"""

import contextlib
import gc
import logging
import multiprocessing.util
import os
import re
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_automodel.distributed import heart, join, network
from lightning_automodel.distributed.failures import is_communication_error
from lightning_automodel.distributed.store import another_connection
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import process_groups

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistInfo:
    """This process in the default process group."""

    backend: str  # or mixed backends: "gloo", "cpu:gloo,cuda:nccl"
    rank: int
    world_size: int
    device: torch.device  # by the local rank
    is_main: bool  # rank 0


def get_rank_safe() -> int:
    """Rank of this process in the default group; before joining, RANK, SLURM_PROCID or LOCAL_RANK, else 0.

    Not a collective, nor are the three below. Raises ValueError if the variable is not a whole number.
    """
    if dist.is_initialized():
        return group_rank()
    return _first_number("RANK", "SLURM_PROCID", "LOCAL_RANK")


def get_world_size_safe() -> int:
    """Size of the default group; before joining, WORLD_SIZE or, in a SLURM step, SLURM_NTASKS, else 1."""
    if dist.is_initialized():
        return group_size()
    # An interactive allocation also sets SLURM_NTASKS, but a process outside of a step is not a task.
    names = ["WORLD_SIZE"]
    if "SLURM_PROCID" in os.environ:
        names.append("SLURM_NTASKS")
    return _first_number(*names, default=1)


def get_local_rank_preinit() -> int:
    """Rank of this process on its machine, joined or not: LOCAL_RANK, else SLURM_LOCALID, else 0."""
    return _first_number("LOCAL_RANK", "SLURM_LOCALID")


def get_local_world_size_preinit() -> int:
    """Ranks on this machine, joined or not: LOCAL_WORLD_SIZE, else what SLURM says of the job or the step, else 1."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        if number := join.number_in_environment(name, at_least=1):
            return number
    # "4(x2),3": 4 on each of two nodes, and 3 on the next.
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    by_node = [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]
    return by_node[_first_number("SLURM_NODEID")]


def group_rank() -> int:
    """Rank of this process in the default group; 0 without one."""
    if dist.is_initialized():
        return dist.get_rank()
    return 0


def group_size() -> int:
    """Number of ranks in the default group; 1 without one."""
    if dist.is_initialized():
        return dist.get_world_size()
    return 1


def _first_number(*names: str, default: int = 0) -> int:
    numbers = (join.number_in_environment(name, at_least=default) for name in names)
    return next((number for number in numbers if number is not None), default)


def parse_timeout(timeout: timedelta | float, name: str = "timeout") -> timedelta:
    """Read a timeout, a ``timedelta`` or minutes; ValueError unless it is one of them, positive and finite."""
    parsed = timedelta(0)
    with contextlib.suppress(TypeError, OverflowError, ValueError):
        parsed = timeout if isinstance(timeout, timedelta) else timedelta(minutes=timeout)
    if parsed <= timedelta(0):
        raise ValueError(
            f"{name} must be a positive and finite timedelta or number of minutes, got {timeout!r}, e.g. 30."
        )
    return parsed


def choose_backend(device: torch.device, requested: str | None, cpu_offload: bool) -> str:
    """Backend of the default group: the requested one, else the device's; under CPU offload also gloo."""
    if requested is not None:
        return requested
    backend = dist.get_default_backend_for_device(device)
    if cpu_offload and device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"
    return backend


def choose_device(backend: str, local_rank: int) -> torch.device:
    """The CPU for gloo alone, or without an accelerator; else the only accelerator, or one by local rank."""
    current = torch.accelerator.current_accelerator()
    # Gloo can copy from an accelerator, but is for the CPU.
    if current is None or backend.lower() in ("gloo", "cpu:gloo"):
        return torch.device("cpu")
    if torch.accelerator.device_count() == 1:
        local_rank = 0
    return torch.device(current.type, local_rank)


_kept: dict[object, Any] = {}
_counted: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_kept_for: dist.ProcessGroup | None = None
_has_failed = False

OnJoined = Callable[[int, int, dist.Store], None]


def initialize_distributed(
    backend: str,
    timeout_minutes: timedelta | float = 1,
    *,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> DistInfo:
    """Join the default process group, and set the current accelerator device. A collective over all ranks.

    Without arguments or environment variables this is a single process, which needs no network. A group that
    exists already is used as it is, and ``destroy_global_state`` will not destroy it. If its owner destroys it and
    makes another one, that needs another port: a sharded model keeps the old store open, under plain FSDP2 too,
    and ranks that find it there hang.

    Args:
        backend: ``"gloo"`` for the CPU, ``"nccl"`` for CUDA, ``"xccl"`` for XPU, ``"cpu:gloo,cuda:nccl"``
            for both, or any that is registered with torch.
        timeout_minutes: The longest time for joining, and for a collective on the group: ``timedelta`` or
            minutes.
        init_method: ``env://``, ``tcp://address:port`` or ``file:///path``. None: MASTER_ADDR and
            MASTER_PORT.
        rank: Rank of this process. None: RANK.
        world_size: Number of ranks. None: WORLD_SIZE.

    Raises:
        ValueError: If an argument or environment variable is missing or out of range.
        RankFailedError: On every rank that has joined, if others are missing, two have the same rank, or the
            address cannot be used. The message names ranks, address and waiting time.
    """
    timeout = parse_timeout(timeout_minutes)
    device = choose_device(backend, get_local_rank_preinit())
    if dist.is_initialized():
        backend = _use_existing(backend)
    else:
        found = join.locate(init_method, rank, world_size)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        _join(found, backend, timeout, lambda: None, lambda *_: None)
    return DistInfo(backend, group_rank(), group_size(), device, group_rank() == 0)


def join_process_group(
    cluster_environment: ClusterEnvironment,
    backend: str,
    timeout: timedelta,
    init_method: str | None,
    check: Callable[[], None],
    on_joined: OnJoined,
) -> None:
    """Join like :func:`initialize_distributed`, as Lightning's cluster environment says; call ``check`` meanwhile.

    As soon as all ranks have come, and before they connect to each other, ``on_joined`` is called with the
    rank, the number of ranks and a connection to the store; at once where the group exists already.
    """
    lightning_internals.reset_seed()
    if dist.is_initialized():
        _use_existing(backend)
        on_joined(dist.get_rank(), dist.get_world_size(), connection(timeout))
        return
    address = cluster_environment.main_address
    if ":" in address:
        address = f"[{address}]"
    url = f"tcp://{address}:{cluster_environment.main_port}"
    rank = cluster_environment.global_rank()
    found = join.locate(init_method or url, rank, cluster_environment.world_size())
    _join(found, backend, timeout, check, on_joined)


def _refuse_after_failure() -> None:
    if _has_failed:
        raise RuntimeError(
            "A run of these ranks has failed, and its connections are gone: end all processes and start them again,"
            " with fit(..., ckpt_path='last') to go on from the newest checkpoint."
        )


def _use_existing(backend: str) -> str:
    """The backend of the default group, with a warning if another one is asked for."""
    _refuse_after_failure()
    network.choose_interface(os.environ.get("MASTER_ADDR", ""))  # for the groups that are still to be made
    actual = dist.get_backend()
    served = str(dist.distributed_c10d.get_backend_config())  # "cpu:gloo,cuda:gloo" for gloo alone
    if backend.lower() not in served:
        message = "The default process group exists already, with backend %s: %s has no effect."
        log.warning(message, actual, backend)
    return actual


def _join(
    found: join.Rendezvous,
    backend: str,
    timeout: timedelta,
    check: Callable[[], None],
    on_joined: OnJoined,
) -> None:
    """Make the default group. An accelerator connects in its first collective."""
    if found.world_size > 1:
        _refuse_after_failure()
    destroy_global_state()
    store, own_connection = join.meet(found, backend, timeout, check)
    is_gloo = backend.lower() == dist.Backend.GLOO
    try:
        on_joined(found.rank, found.world_size, own_connection)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=found.rank,
            world_size=found.world_size,
            timeout=network.CONNECT_TIMEOUT if is_gloo else timeout,
        )
    except BaseException as error:
        if is_communication_error(error):
            error.add_note(network.ADVICE)
        if heart.current() is None:  # else the run's supervisor tells the others first, and then leaves
            join.leave(found, store)
        raise
    if is_gloo and dist.group.WORLD is not None:
        dist.group.WORLD.set_timeout(timeout)
    kept_with_world().update({_own("joined"): (found, store), _own("connection"): own_connection})
    # Unlike `atexit`, it also runs in children of `multiprocessing`, and from 0 on before they are joined.
    multiprocessing.util.Finalize(None, _leave, kwargs={"is_exiting": True}, exitpriority=0)


def _own(what: str) -> tuple[str, int]:
    """The key of what this process keeps for itself: a forked child inherits the others."""
    return what, os.getpid()


def kept_with_world() -> dict[object, Any]:
    """Meshes and groups that last as long as the default group, by purpose. Not a collective.

    If the default group has changed, those of the old one are dropped, and so are DTensor's caches of its
    meshes: there a mesh over the new group equals the old one, and they would return destroyed groups.
    """
    global _kept_for
    if _kept_for is not dist.group.WORLD:
        forget_world()
        process_groups.forget_meshes()
        _kept_for = dist.group.WORLD
    return _kept


def connection(timeout: timedelta) -> dist.Store:
    """This process's own connection to the default group's store, for hearts and meetings. Not a collective.

    Their calls do not wait in it, so that one serves all of them. A forked child opens another one. Raises
    DistError or OSError if the store is gone.
    """
    kept = kept_with_world()
    key = _own("connection")
    if key not in kept:
        world = dist.group.WORLD
        assert world is not None
        kept[key] = another_connection(
            dist.PrefixStore("lightning_automodel", world.get_group_store()), timeout
        )
    opened: dist.Store = kept[key]
    return opened


def next_number(what: str) -> int:
    """1, 2, ... in the default group: the same on ranks that have asked for ``what`` equally often.

    Without the store, whose host may be stopped while no watch runs.
    """
    counted = _counted.setdefault(dist.group.WORLD, Counter())
    counted[what] += 1
    return counted[what]


def note_failure() -> None:
    """From now on join no other group, if this package has made the one of the run that has failed, or stopped."""
    global _has_failed
    _has_failed = _has_failed or _own("joined") in kept_with_world()


def leave_after_failure(aborts: bool) -> None:
    """Destroy this package's group after a failed run, or a stop of all.

    ``aborts``: after a failure it waits for nobody. Groups of an accelerator would wait for what they have queued,
    and so for ranks that are gone.
    """
    _leave(aborts)
    forget_world()


def destroy_global_state() -> None:
    """Destroy the process group that this package made, subgroups first. Do nothing if it made none.

    Not a collective, though every rank should call it: the rank that hosts the store waits some seconds for
    the others' last reads. It may be called twice, in an exception handler, and at exit, where it runs anyway.
    Threads and sockets of groups that the caller refers to remain.
    """
    _leave()


def forget_world() -> None:
    """Drop references to the default group and its meshes: they would keep its connections open."""
    global _kept_for
    _kept_for = None
    _kept.clear()


def _leave(aborts: bool = False, is_exiting: bool = False) -> None:
    joined = kept_with_world().pop(_own("joined"), None)
    if joined is None:
        return
    found, store = joined
    with patched_signal(signal.SIGINT, signal.SIG_IGN):
        try:
            forget_world()
            if not is_exiting:
                # Dropped models and meshes refer to each other in cycles. Now, as collecting them fills
                # the caches again; not at exit, which frees them sooner: in a forked process, collecting
                # copies the heap.
                gc.collect()
                process_groups.forget_meshes()
            try:
                _destroy_groups(aborts)
            except Exception:
                log.warning("The process groups could not be destroyed.", exc_info=True)
            if not is_exiting:
                # A mesh that was in use until now refers to the group, in a cycle with other meshes.
                gc.collect()
        finally:
            join.leave(found, store, aborts)


def _destroy_groups(aborts: bool) -> None:
    if aborts and process_groups.accelerator_backends():
        with contextlib.suppress(Exception):  # a backend that cannot be aborted
            process_groups.abort_process_groups()
            return
    dist.destroy_process_group()


@contextlib.contextmanager
def patched_signal(signum: int, handler: Any) -> Iterator[None]:
    """Patch a signal's handler, then restore it; only in the main thread, unless the former one was set in C."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signum) is None:
        yield
        return
    previous = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, previous)
