"""The end of a process that cannot leave by itself, and what it says before."""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def limited(seconds: float, rank: int, why: str) -> Iterator[None]:
    """End the process, with ``why``, if the block takes longer: what it calls may never return."""
    timer = threading.Timer(seconds, end_process, (rank, why))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process(rank: int, why: str) -> None:
    """Print why, and where all threads are, and end this process with status 1, whatever its threads do."""
    try:
        message = f"rank {rank} on {socket.gethostname()} stops: {why}. It was at:"
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
    finally:
        os._exit(1)
