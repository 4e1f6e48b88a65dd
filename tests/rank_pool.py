"""Gloo ranks that are started once and then serve the whole test run.

Starting ranks costs seconds, a call costs milliseconds: `pool.run(fn, ...)` sends a module-level function to
every rank over a pipe and returns what each of them returned. The parent process is not a rank.

What a caller may rely on:
- every call starts with a working process group over loopback, all ranks in step, the environment that
  Lightning's `LightningEnvironment` reads (so a Trainer joins this group and launches nothing), and fresh
  seeds;
- an exception on a rank becomes a `RankError` that carries the rank's traceback. The failing rank hangs up
  its gloo connections and leaves the process group, which frees peers that wait for it in a collective; the
  next call joins a new group in the same processes;
- a rank that hangs becomes a `TimeoutError` that names it and shows where it stands, a rank that dies a
  `RankError`; both stop the whole pool, and the next call starts a new one.
"""

from __future__ import annotations

import contextlib
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
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import devices
from tests.processes import forked

START_TIMEOUT_S = 180.0
GRACE_AFTER_FAILURE_S = 20.0
MAX_THREADS_BY_RANKS = 16
"""Of a rank that is used again, for each rank of its pool; fits leave 17 with two ranks, 26 with four, 45 on
the second device. Those of a group that something refers to wake 100 times a second."""
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class RankError(RuntimeError):
    """At least one rank failed.

    Attributes:
        failures: traceback by rank, the rank that failed first in front.
    """

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(frozen=True)
class _Call:
    """One function call as it travels to a rank; `function` is pickled so that a failing import is the rank's error."""

    function: bytes
    group_number: int
    main_port: int


@dataclass(frozen=True)
class _Answer:
    """What a rank sends back: the pickled return value or a traceback, and whether its process group is still whole.

    A rank leaves its group before it answers, so a peer that this frees may answer first: `failed_at`, in
    seconds of the machine's monotonic clock, tells who failed first. A death counts as first.
    """

    value: bytes | None = None
    error: str | None = None
    failed_at: float = 0.0
    in_group: bool = True
    died: bool = False
    num_threads: int = 0


@dataclass(frozen=True)
class _Rank:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    log: Path


class RankPool:
    """A fixed number of gloo ranks, started at the first call of `run` and again after `stop`.

    Args:
        num_ranks: size of the process group.
        device: "second" or "nccl" for ranks that train on the device of `tests/second_device`, with gloo's
            collectives or with those that behave as NCCL's; "" for CUDA or a CPU.
    """

    def __init__(self, num_ranks: int, device: str = os.environ.get(devices.VARIABLE, "")) -> None:
        self.num_ranks = num_ranks
        self.device = device
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._group_number = 0

    @property
    def process_ids(self) -> list[int]:
        """Process id by rank; empty while the pool is stopped."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in the order of the ranks.

        Args:
            fn: a function at the top level of an importable module; it finds its rank with
                `dist.get_rank()`.
            args: positional arguments, picklable, the same for all ranks.
            timeout_s: seconds until a rank that has not answered counts as hanging; RANK_TIMEOUT_S in the
                environment replaces it, for a debugger (`tests/debugger.py`).
            kwargs: keyword arguments, picklable, the same for all ranks.

        Raises:
            RankError: `fn` raised on a rank, its result cannot be pickled, or a rank's process died.
            TimeoutError: a rank hangs.
        """
        function = pickle.dumps((fn, args, kwargs))
        if not self._ranks:
            self._start()
        return self._exchange(function, fn.__qualname__, float(os.environ.get("RANK_TIMEOUT_S", timeout_s)))

    def stop(self) -> None:
        """Kill all ranks: nothing that they still hold is worth the seconds in which they would end by themselves."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_")
        # The store listens on loopback alone, on a port that is bound before anyone is told of it.
        listener = socket.create_server((LOOPBACK, 0))
        store_port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            LOOPBACK, store_port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        context = forked()
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            log = Path(self._folder.name, f"rank{rank}.log")
            # Not daemonic: a rank may start processes of its own, such as DataLoader workers.
            process = context.Process(
                target=_serve, args=(rank, self.num_ranks, theirs, store_port, log, self.device)
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, log))
        self._exchange(pickle.dumps((dist.get_rank, (), {})), "start-up", START_TIMEOUT_S)

    def _exchange(self, function: bytes, name: str, timeout_s: float) -> list[Any]:
        try:
            call = pickle.dumps(_Call(function, self._group_number, _free_port()))
            for rank in self._ranks:
                # A rank that died since the last call is reported when its answer is read.
                with contextlib.suppress(BrokenPipeError):
                    rank.pipe.send_bytes(call)
            answers = self._collect(timeout_s)
            self._raise_failures(answers, name, timeout_s)
        except RankError:
            raise
        except BaseException:
            # Also pytest-timeout and Ctrl-C: an answer that is still on its way must not meet the next call.
            self.stop()
            raise
        if not all(answer.in_group for answer in answers.values()):
            self._group_number += 1
        if max(answer.num_threads for answer in answers.values()) > MAX_THREADS_BY_RANKS * max(
            self.num_ranks, 2
        ):
            self.stop()
        return [pickle.loads(answers[rank].value or b"") for rank in range(self.num_ranks)]

    def _collect(self, timeout_s: float) -> dict[int, _Answer]:
        """Answers by rank; a rank that hangs is missing."""
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {rank.pipe: index for index, rank in enumerate(self._ranks)}
        answers: dict[int, _Answer] = {}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                index = waiting.pop(pipe)
                answers[index] = self._receive(index)
                if answers[index].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        return answers

    def _receive(self, index: int) -> _Answer:
        rank = self._ranks[index]
        try:
            return pickle.loads(rank.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            rank.process.join(GRACE_AFTER_FAILURE_S)
            output = rank.log.read_text(errors="replace")[-2000:] if rank.log.exists() else ""
            return _Answer(
                error=f"the process died with exit code {rank.process.exitcode}\n{output}", died=True
            )

    def _raise_failures(self, answers: dict[int, _Answer], name: str, timeout_s: float) -> None:
        in_time_order = sorted(answers.items(), key=lambda item: item[1].failed_at)
        failures = {rank: answer.error for rank, answer in in_time_order if answer.error is not None}
        silent = [rank for rank in range(self.num_ranks) if rank not in answers]
        stacks = "".join(f"\nrank {rank} stands at:\n{self._stack(rank)}" for rank in silent)
        if not failures and not silent:
            return
        if not failures:
            raise TimeoutError(
                f"{name}: ranks {silent} of {self.num_ranks} hang after {timeout_s:g} s{stacks}"
            )
        if silent or any(answer.died for answer in answers.values()):
            self.stop()
        self._group_number += 1
        message = f"{name}: ranks {list(failures)} of {self.num_ranks} failed"
        message += f", ranks {silent} hang" if silent else ""
        message += "".join(f"\nrank {rank}: {error}" for rank, error in failures.items())
        raise RankError(message + stacks, failures)

    def _stack(self, index: int) -> str:
        """The Python stack of a hanging rank's main thread."""
        rank = self._ranks[index]
        known = rank.log.stat().st_size if rank.log.exists() else 0
        if rank.process.pid is None or not rank.process.is_alive():
            return "the process has ended"
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return rank.log.read_bytes()[known:].decode(errors="replace") if rank.log.exists() else ""


def _free_port() -> int:
    """A port for code under test that leaves the pool's process group and joins one through MASTER_PORT."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return listener.getsockname()[1]


def _serve(rank: int, num_ranks: int, pipe: Connection, store_port: int, log: Path, device: str) -> None:
    """The main function of a rank's process: answer calls until the parent closes the pipe."""
    _redirect_output(log)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
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
    def intact(self) -> bool:
        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._group

    def join(self, number: int) -> None:
        if self._number == number and self.intact:
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

    def hang_up(self) -> None:
        """Leave the group after a failure, such that a peer in a collective notices.

        Destroying a group closes nothing while something refers to it, and torch's own caches refer to every
        mesh that `fully_shard` has seen. So the connections themselves are shut down: every TCP connection
        of this process except those to the pool's store.
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


def _answer(call: _Call, membership: _Membership) -> _Answer:
    try:
        membership.join(call.group_number)
        with _clean_slate(call.main_port):
            fn, args, kwargs = pickle.loads(call.function)
            value = _pickled(fn(*args, **kwargs))
        num_threads = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0
        return _Answer(value=value, in_group=membership.intact, num_threads=num_threads)
    except BaseException:
        error = traceback.format_exc()
        failed_at = time.monotonic()
        membership.hang_up()
        return _Answer(error=error, failed_at=failed_at, in_group=False)
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
