"""What the ranks of `test_first_rank.py` run that have no process group; `main` names the cases."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from lightning_automodel.first_rank import FirstRankPerNode


def repeat() -> None:
    """Enter three blocks in a row; rank 0 is slow to destroy the groups, so the other may come back too early."""
    num_threads = threading.active_count()
    if os.environ["RANK"] == "0":
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda group=None: (time.sleep(1), destroy(group))
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
                time.sleep(2.5)
                raise OSError("disk full")
    except Exception as error:
        print(f"{type(error).__name__}: {error}, initialised: {dist.is_initialized()}", flush=True)
        os._exit(1)


def wait_for_nobody() -> None:
    """Enter a block that other ranks never come to."""
    try:
        with FirstRankPerNode(timeout=timedelta(seconds=1)):
            print("inside")
    except Exception as error:
        print(f"{type(error).__name__}: {error}, initialised: {dist.is_initialized()}")


def lose(fault: str) -> None:
    """Stop or kill rank 0 in its block, once the other rank waits for it."""
    dist.init_process_group("gloo")
    try:
        with FirstRankPerNode(timeout=timedelta(seconds=6)) as is_first:
            if is_first:
                time.sleep(1)
                os.kill(os.getpid(), getattr(signal, fault))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


def main() -> None:
    """Run the case that the first argument names, with the other one."""
    case, *arguments = sys.argv[1:]
    if case == "repeat":
        repeat()
    elif case == "wait":
        wait_for_nobody()
    elif case == "fail":
        fail(int(arguments[0]))
    else:
        lose(arguments[0])


if __name__ == "__main__":
    main()
