"""Collectives of the second device that behave as NCCL's, in a process whose `TEST_DEVICE` is "nccl".

WORK IN PROGRESS: sources are cited later.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist

ABORT = "TEST_NCCL_ABORT"
"""Environment variable: "raises" if the host is freed with an error from work that was aborted."""
RUN_AHEAD = "TEST_NCCL_RUN_AHEAD"
"""Environment variable: a file. Once it exists, the host runs ahead of collectives that do not come."""

ENDLESS = datetime.timedelta(days=7)


def configure(extension: Any, device_type: str) -> None:
    """Let the device behave by this process's environment."""
    # As for CUDA: a gloo group that is made while the default group is bound to a device is asked for that device's.
    dist.Backend.backend_capability[dist.Backend.GLOO].append(device_type)
    extension.enable_sticky_errors()
    extension.raise_after_abort(os.environ.get(ABORT) == "raises")
    extension.run_ahead_once_exists(os.environ.get(RUN_AHEAD, ""))


def make_backend(extension: Any, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """A backend for `dist.Backend.register_backend`. Not a collective: the first collective connects."""
    return extension.NcclLike(_connect, store, rank, size, timeout)


def _connect(store: dist.Store, rank: int, size: int) -> dist.ProcessGroupGloo | None:
    """Wait for rank 0 until the store's timeout, as NCCL's ranks do for its unique id; then for all, without limit."""
    if rank == 0:
        store.set("unique id", "")
    try:
        store.get("unique id")
    except RuntimeError as error:
        raise dist.DistBackendError("rank 0 has not set the unique id of its communicator") from error
    try:
        return dist.ProcessGroupGloo(store, rank, size, ENDLESS)
    except RuntimeError:
        return None
