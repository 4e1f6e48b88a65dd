"""Kernels that are launched in the steady state of a fit, by who launches them: this package, FSDP2, an optimizer.

On a GPU each costs the host some microseconds, and small models wait for those.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.second_device.device import extension

PACKAGE = "lightning_automodel"
LAUNCHERS = {f"/{PACKAGE}/": PACKAGE, "/torch/distributed/fsdp/": "FSDP2", "/torch/optim/": "optimizer"}
"""Who launches a kernel, by a part of the path of the innermost file that has such a part."""
FORWARDS = ("sharding/shards.py", "sharding/parts.py", "sharding/whole_copies.py")
"""They pass operators of others on."""

Launched = tuple[str, str, str]  # launcher, line in the package (else ""), operator


@contextlib.contextmanager
def recorded_kernels() -> Iterator[Counter[Launched]]:
    """Counts what operators launch on the second device in this block."""
    found: Counter[Launched] = Counter()

    def record(operator: str, number: int) -> None:
        found[(*_launcher(), operator)] += number

    extension.set_on_kernel(record)
    try:
        yield found
    finally:
        extension.set_on_kernel(None)


def _launcher() -> tuple[str, str]:
    frame = sys._getframe(1).f_back  # None in a thread of torch, which calls back itself
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(FORWARDS):
            frame = frame.f_back
            continue
        for part, launcher in LAUNCHERS.items():
            if part in path:
                line = f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno}"
                return launcher, line if launcher == PACKAGE else ""
        if "/torch/" not in path:
            return "model", ""
        frame = frame.f_back
    return "model", ""
