"""Processes that start at once, forked from a server that has imported everything, and programs that start anew."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import subprocess
import threading
from collections.abc import Sequence
from multiprocessing import connection, forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOT_FROM_OUTSIDE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "GROUP_RANK",
)
"""What a launcher tells its ranks by the environment."""

PORTS = range(12_000, 32_000)
"""Below those that Linux gives to connections: one of them could get a port between its choice and its use."""

IMPORTED = (
    "lightning.pytorch",
    "torch.distributed.fsdp",
    "tests.entry_points",
    "tests.internals.before",
    "lightning_automodel",
    "tests.launch.launched",
    "tests.frozen",
)
"""Slow to import, and needed by all: whoever starts the server decides what it imports, for the whole test run."""


class _Popen(popen_forkserver.Popen):
    """Reads the exit status once: Python's, asked by two threads at once, says 255 to one of them.

    `Process.start` asks for all processes, whichever thread has started them.
    """

    def __init__(self, process: Any) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG:
            connection.wait([self.sentinel])
        with self._reading:
            return super().poll(os.WNOHANG)


class _Process(ForkServerProcess):
    _Popen = staticmethod(_Popen)


class _Context(ForkServerContext):
    Process = _Process


_CONTEXT = _Context()


def forked() -> ForkServerContext:
    """What makes such processes; they have the environment that the server was started with."""
    _CONTEXT.set_forkserver_preload(list(IMPORTED))
    return _CONTEXT


_numbers = itertools.count(random.SystemRandom().randrange(len(PORTS)))


def free_port() -> int:
    """One of :data:`PORTS` that nobody listens at, another one with each call."""
    while True:
        port = PORTS[next(_numbers) % len(PORTS)]
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def start_importing() -> None:
    """Start the server ahead of the first process, so that it imports while tests are collected."""
    forked()
    forkserver.ensure_running()


def fresh_environment() -> dict[str, str]:
    """That of a program that no launcher has started."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_FROM_OUTSIDE}
    return {**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


def run_anew(command: Sequence[str], folder: Path, timeout_s: float) -> tuple[int, str]:
    """Exit status of a program that no launcher has started, in `folder`, and what it prints on both streams."""
    done = subprocess.run(
        command,
        env=fresh_environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout
