"""What the ranks of `test_first_rank.py` run that have no process group; `CASES` names the cases."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_automodel.distributed.first_rank import FirstRankPerNode


def repeat() -> None:
    """Enter three blocks in a row; rank 0 is slow to destroy the groups, so the other may come back too early."""
    num_threads = threading.active_count()
    if os.environ["RANK"] == "0":
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda group=None: (time.sleep(0.2), destroy(group))
    for _ in range(3):
        with FirstRankPerNode() as is_first:
            print(f"first={is_first} inside={dist.is_initialized()}")
        print(f"after={dist.is_initialized()}")
    print(f"left_over={threading.active_count() - num_threads}")


def fail(failing_rank: int) -> None:
    """Fail on one rank when the other has waited so long that it looks seldom, and end at once."""
    try:
        with FirstRankPerNode():
            if dist.get_rank() == failing_rank:
                time.sleep(1.5)
                raise OSError("disk full")
    except Exception as error:
        print(f"{type(error).__name__}: {error}, initialised: {dist.is_initialized()}", flush=True)
        os._exit(1)


CASES: dict[str, Callable[..., None]] = {"repeat": repeat, "fail": fail}


def run_case(log: Path, environment: dict[str, str], case: str, *arguments: Any) -> None:
    """Run a case as a rank that finds itself in the environment; what it prints goes to `log`, errors beside it."""
    for descriptor, path in ((1, log), (2, log.with_suffix(".errors"))):
        with open(path, "wb", buffering=0) as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, closefd=False) for descriptor in (1, 2))
    os.environ.update(environment)
    torch.set_num_threads(1)
    CASES[case](*arguments)
