"""Processes that start at once: they are forked from a server that has imported everything."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ("lightning.pytorch", "torch.distributed.fsdp", "lightning_automodel", "tests.trainer.launched")
"""Slow to import, and needed by all: whoever starts the server decides what it imports, for the whole test run."""


def forked() -> ForkServerContext:
    """What makes such processes; they have the environment that the server was started with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context
