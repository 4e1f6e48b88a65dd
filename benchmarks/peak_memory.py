"""Peak memory of a process: on CUDA from torch's allocator, else from `/proc` (Linux).

`MALLOC` in the environment of the process makes blocks of a megabyte go back to the system when they are
freed, so that what the process holds is what its tensors hold.
"""

from pathlib import Path

import torch

MEBIBYTE = 1 << 20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(MEBIBYTE)}


def start_peak(device: str) -> int:
    """Starts a new high-water mark, and returns the bytes held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(device: str) -> int:
    """Bytes of the high-water mark."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
