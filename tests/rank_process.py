"""One rank of a pool: its process, which answers the pool's calls until the pool closes the pipe.

The life of a rank: `serve` joins the group of each call's number, calls the function with a clean slate, and
sends back its value. If the function raises, the rank aborts its connections, which frees peers that wait for
it in a collective, leaves the group, and sends the traceback; the next call has another number.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import pickle
import random
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import devices

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Call:
    """One function call as it travels to a rank; `function` is pickled so that a failing import is the rank's error."""

    function: bytes
    group_number: int
    main_port: int


@dataclass(frozen=True)
class Answer:
    """What a rank sends back: the pickled return value or a traceback, and whether its process group is still whole.

    A peer that a failure frees may answer first: `failed_at` tells who failed first. A death counts as first.
    """

    value: bytes | None = None
    error: str | None = None
    failed_at: float = 0.0
    is_in_group: bool = True
    has_died: bool = False
    num_threads: int = 0


def serve(rank: int, num_ranks: int, pipe: Connection, store_port: int, log: Path, device: str) -> None:
    """The main function of a rank's process: answer calls until the parent closes the pipe."""
    _redirect_output(log)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if sys.platform == "linux":  # even while it is stopped: PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.chdir(log.parent)
    # As in a user's program: else what a rank starts, such as DataLoader workers, would import everything
    # anew.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux. Ranks that move between two cores take a fifth longer.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(
        GLOO_SOCKET_IFNAME=LOOPBACK_INTERFACE,
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR=LOOPBACK,
        **{devices.VARIABLE: device},
    )
    store = dist.TCPStore(LOOPBACK, store_port, is_master=False)
    membership = _Membership(rank, num_ranks, store)
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            membership.leave()
            return
        pipe.send_bytes(pickle.dumps(_answer(call, membership)))


class _Membership:
    """A rank's place in the pool's process group, renewed under a new store prefix for each group number."""

    def __init__(self, rank: int, num_ranks: int, store: dist.TCPStore) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._store = store
        self._store_port = store.port
        self._number: int | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def is_intact(self) -> bool:
        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._group

    def join(self, number: int) -> None:
        if self._number == number and self.is_intact:
            return
        self.leave()
        store = dist.PrefixStore(f"group{number}", self._store)
        backend = devices.backend(self._num_ranks)
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._num_ranks)
        self._number = number
        self._group = dist.group.WORLD

    def leave(self) -> None:
        self._group = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort_connections(self) -> None:
        """Leave the group after a failure, such that a peer in a collective notices.

        Destroying a group closes nothing while something refers to it, as torch's caches refer to every mesh.
        So every TCP connection of this process is shut down, except those to the pool's store.
        """
        for descriptor in map(int, os.listdir("/dev/fd")):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if (
                        connection.family == socket.AF_INET
                        and connection.getpeername()[1] != self._store_port
                    ):
                        connection.shutdown(socket.SHUT_RDWR)
        if devices.is_nccl_like():
            # Else leaving waits for the others.
            for group in dist.distributed_c10d._world.pg_map:
                group.abort()
        self.leave()


def _answer(call: Call, membership: _Membership) -> Answer:
    try:
        membership.join(call.group_number)
        with _clean_slate(call.main_port):
            fn, args, kwargs = pickle.loads(call.function)
            value = _pickled(fn(*args, **kwargs))
        num_threads = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0
        return Answer(value=value, is_in_group=membership.is_intact, num_threads=num_threads)
    except BaseException:
        error = traceback.format_exc()
        failed_at = time.monotonic()
        membership.abort_connections()
        return Answer(error=error, failed_at=failed_at, is_in_group=False)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class _Pickler(pickle.Pickler):
    """Takes tensors to the host: the parent need not have their device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


@contextlib.contextmanager
def _clean_slate(main_port: int) -> Iterator[None]:
    """Same seeds at the start of every call; environment, folder, dtype and warning filters as before at its end."""
    environment = os.environ.copy()
    folder = Path.cwd()
    dtype = torch.get_default_dtype()
    os.environ["MASTER_PORT"] = str(main_port)
    random.seed(0)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(), torch.set_grad_enabled(True):
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)


def _redirect_output(log: Path) -> None:
    """Send what this process prints to `log`, and its Python stack as well when it receives SIGUSR1."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=False)


def _leave_with_parent() -> None:
    """End this process with its parent, even if the parent was killed while this rank hangs in a collective."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
