"""The end of a process that cannot leave by itself, and what it says before."""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from lightning_automodel.distributed import device_groups
from lightning_automodel.internals import process_groups

LONGEST_DUMP_S = 3.0


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
        recorded = _dump_flight_records(rank)
        message = f"rank {rank} on {socket.gethostname()} stops: {why}.{recorded} It was at:"
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
    finally:
        os._exit(1)


def _dump_flight_records(rank: int) -> str:
    """Write the newest collectives to the file that torch would use at the timeout; returns a sentence on it.

    Only with groups of accelerators: gloo records its groups without names, and no tool reads that.
    """
    path = Path(f"{_file_prefix()}{rank}")
    written: list[Path] = []

    def write() -> None:
        with contextlib.suppress(Exception):
            if device_groups.exist():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(process_groups.flight_records())
                written.append(path)

    # In a thread, since it may wait for a lock that a stuck thread holds.
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(LONGEST_DUMP_S)
    if not written:
        return ""
    return f" Its newest collectives are in {path}, which torchfrtrace reads."


def _file_prefix() -> str:
    """What torch puts before the rank: the user's variable, else a file in the cache."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    given = next((os.environ[name] for name in names if os.environ.get(name)), None)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return given or str(Path(cache) / "torch" / "comm_lib_trace_rank_")
