"""What a rank can see of another rank's process on its own node, without a heartbeat.

A heartbeat that does not come says little: the process may have ended, be stopped, or be in a call that keeps
Python's lock for long. Linux tells these apart at once, for processes of the same machine and container.
"""

import functools
import os
from pathlib import Path

UNSEEN = ""  # on another node, or not on Linux
GONE = "has ended"
STOPPED = "is stopped"
ALIVE = "is alive, but runs no Python"


@functools.cache
def _here() -> str:
    """This machine since it was started, and its table of processes; empty where there is none to read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The process's state and what follows it in the kernel's table; OSError if it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def own_process() -> str:
    """What tells this process from all others: its machine, its number, and when it was started."""
    if not _here():
        return ""
    return f"{_here()} {os.getpid()} {_stat(os.getpid())[19]}"


def state_of(process: str) -> str:
    """What the process does, of which :func:`own_process` said ``process``: one of the constants above."""
    if not process.startswith(f"{_here()} "):
        return UNSEEN
    _, pid, started = process.split()
    try:
        stat = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:  # this process has no file left to open, say: a peer that lives must not be named
        return UNSEEN
    if stat[19] != started or stat[0] in "ZX":
        return GONE
    if stat[0] in "Tt":
        return STOPPED
    return ALIVE
