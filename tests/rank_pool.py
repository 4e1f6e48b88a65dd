"""Gloo ranks that are started once and then serve the whole test run.

Starting ranks costs seconds, a call costs milliseconds: `pool.run(fn, ...)` sends a module-level function to
every rank over a pipe and returns what each of them returned. The parent process is not a rank; what a rank
does is `tests/rank_process.py`.

What a caller may rely on:
- every call starts with a working process group over loopback, all ranks in step, the environment that
  Lightning's `LightningEnvironment` reads (so a Trainer joins this group and launches nothing), and fresh
  seeds;
- an exception on a rank becomes a `RankError` that carries the rank's traceback. The failing rank aborts
  its gloo connections and leaves the process group, which frees peers that wait for it in a collective; the
  next call joins a new group in the same processes;
- between calls ranks are stopped: threads of gloo's, which outlive their groups, would wake 100 times a second;
- a rank that hangs becomes a `TimeoutError` that names it and shows where it stands, a rank that dies a
  `RankError`; both stop the whole pool, and the next call starts a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import devices
from tests.processes import forked, free_port
from tests.rank_process import LOOPBACK, Answer, Call, serve

START_TIMEOUT_S = 180.0
GRACE_AFTER_FAILURE_S = 20.0
MAX_THREADS_BY_RANKS = 16
"""Of a rank that is used again, for each rank of its pool; fits leave 17 with two ranks, 26 with four, 45 on
the second device. Those of a group that something refers to wake 100 times a second."""


class RankError(RuntimeError):
    """At least one rank failed; `failures` has tracebacks by rank, the rank that failed first in front."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(frozen=True)
class _Rank:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    log: Path


class RankPool:
    """A fixed number of gloo ranks, started at the first call of `run` and again after `stop`.

    On the device "second" or "nccl" ranks train on that of `tests/second_device`, with gloo's collectives or with
    those that behave as NCCL's; "" is CUDA or a CPU.
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

        The function stands at the top level of a module and finds its rank with `dist.get_rank()`; arguments are
        pickled. A rank that has not answered after `timeout_s` counts as hanging; RANK_TIMEOUT_S in the environment
        replaces it, for a debugger (`tests/debugger.py`).

        Raises:
            RankError: `fn` raised on a rank, its result cannot be pickled, or a rank's process died.
            TimeoutError: a rank hangs.
        """
        function = pickle.dumps((fn, args, kwargs))
        if not self._ranks:
            self._start()
        name = getattr(fn, "__qualname__", repr(fn))
        return self._exchange(function, name, float(os.environ.get("RANK_TIMEOUT_S", timeout_s)))

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
                target=serve, args=(rank, self.num_ranks, theirs, store_port, log, self.device)
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, log))
        self._exchange(pickle.dumps((dist.get_rank, (), {})), "start-up", START_TIMEOUT_S)

    def _exchange(self, function: bytes, name: str, timeout_s: float) -> list[Any]:
        try:
            call = pickle.dumps(Call(function, self._group_number, free_port()))
            self._signal(signal.SIGCONT)
            for rank in self._ranks:
                # A rank that died since the last call is reported when its answer is read.
                with contextlib.suppress(BrokenPipeError):
                    rank.pipe.send_bytes(call)
            answers = self._collect(timeout_s)
            self._raise_failures(answers, name, timeout_s)
            self._signal(signal.SIGSTOP)
        except RankError:
            self._signal(signal.SIGSTOP)
            raise
        except BaseException:
            # Also pytest-timeout and Ctrl-C: an answer that is still on its way must not meet the next call.
            self.stop()
            raise
        if not all(answer.is_in_group for answer in answers.values()):
            self._group_number += 1
        if max(answer.num_threads for answer in answers.values()) > MAX_THREADS_BY_RANKS * max(
            self.num_ranks, 2
        ):
            self.stop()
        return [pickle.loads(answers[rank].value or b"") for rank in range(self.num_ranks)]

    def _signal(self, number: int) -> None:
        """Stop the ranks, or let them go on, where they end with this process all the same."""
        for process_id in self.process_ids if sys.platform == "linux" else []:
            # One that died since the last call is reported when its answer is read.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)

    def _collect(self, timeout_s: float) -> dict[int, Answer]:
        """Answers by rank; a rank that hangs is missing."""
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {rank.pipe: index for index, rank in enumerate(self._ranks)}
        answers: dict[int, Answer] = {}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                index = waiting.pop(pipe)
                answers[index] = self._receive(index)
                if answers[index].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        return answers

    def _receive(self, index: int) -> Answer:
        rank = self._ranks[index]
        try:
            return pickle.loads(rank.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            rank.process.join(GRACE_AFTER_FAILURE_S)
            # The stack of a crash is long, and begins with the newest call.
            output = rank.log.read_text(errors="replace")[-8000:] if rank.log.exists() else ""
            return Answer(
                error=f"the process died with exit code {rank.process.exitcode}\n{output}", has_died=True
            )

    def _raise_failures(self, answers: dict[int, Answer], name: str, timeout_s: float) -> None:
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
        if silent or any(answer.has_died for answer in answers.values()):
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
