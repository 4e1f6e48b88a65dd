"""Processes that start at once, forked from a server that has imported everything, and programs that start anew."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

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

IMPORTED = (
    "lightning.pytorch",
    "torch.distributed.fsdp",
    "lightning_automodel",
    "tests.entry_points",
    "tests.launch.launched",
    "tests.frozen",
)
"""Slow to import, and needed by all: whoever starts the server decides what it imports, for the whole test run."""


def forked() -> ForkServerContext:
    """What makes such processes; they have the environment that the server was started with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


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
