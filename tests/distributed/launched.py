"""Processes that call a function with the environment of a rank, forked from a server that has imported everything."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightning_automodel.distributed.failures import RankFailedError
from tests.processes import NOT_FROM_OUTSIDE, forked
from tests.rank_process import LOOPBACK, LOOPBACK_INTERFACE

PATIENCE_S = 60.0


def place(port: int, rank: int, world_size: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }


@dataclass(frozen=True)
class Outcome:
    """What a process did: its result or error text, and for how long."""

    value: Any
    error: str
    seconds: float


class Launched:
    """A process that calls a function with an environment of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any, **environment: str) -> None:
        self._pipe, theirs = forked().Pipe()
        # A barrier among them is gone for the process, too, once nobody here refers to it.
        self._args = args
        self.process = forked().Process(target=_child, args=(theirs, function, args, environment))
        self.process.start()
        theirs.close()

    def outcome(self) -> Outcome:
        """Wait for it to end."""
        if not self._pipe.poll(PATIENCE_S):
            self.process.kill()
            return Outcome(None, "it hangs", PATIENCE_S)
        outcome = self._pipe.recv()
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == 0
        return outcome


def _child(
    pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]
) -> None:
    for name in (*NOT_FROM_OUTSIDE, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ.update({"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, **environment})
    if not os.environ["GLOO_SOCKET_IFNAME"]:
        del os.environ["GLOO_SOCKET_IFNAME"]
    torch.set_num_threads(1)
    started_at = time.monotonic()
    try:
        value = function(*args)
        error = ""
    except Exception as exception:
        value = None
        error = str(exception) if type(exception) is RankFailedError else traceback.format_exc()
    pipe.send(Outcome(value, error, time.monotonic() - started_at))
