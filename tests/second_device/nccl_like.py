"""Collectives of the second device that behave as NCCL's, in a process whose `TEST_DEVICE` is "nccl".

Numbers are gloo's, to the bit. Where gloo's collectives block and raise, these do neither. `nccl_like.cpp`
has them, `pending.cpp` what waits for them. From ProcessGroupNCCL.hpp and .cpp of torch 2.13:

- A collective is queued on a stream of the backend's own, and the call returns. `Work.wait` makes the current
  stream wait, not the host, but for a barrier. `getFuture` is completed at once, with events. So the host
  blocks in reads, and where it synchronizes.
- A thread looks at the oldest collective every 100 ms. When it is not done after `timeout` since it was
  queued, or when its event raises, the process is aborted. (Torch dumps its flight recorder before that.)
- A group connects in the thread that calls its first collective, or at once where a device is bound or it is
  split from such a group. Ranks wait for rank 0's unique id until the store's timeout; then for all, which
  `abort` does not end.
- `shutdown`, which `destroy_process_group` calls, waits for what is queued, under a lock. `abort` needs that
  lock: it is waited for until `timeout`, and raises then.
- Sequence numbers are counted by the backend.

What is an assumption:

- A peer that dies, or does another collective, is noticed by nobody, also while a group connects: so it is on
  one machine, where NCCL writes to shared memory.
- `shutdown` waits until the others come to it, too: NCCL's documentation calls it collective.
- Whether `abort` frees a blocked host with an error could not be settled: `ABORT` chooses.
- An error in a kernel raises in the call that launches it: kernels run at once here.
- CUDA's allocator waits for the device where its cache is emptied.
- The host runs ahead of a device by a thousand kernels. Here it waits in the first kernel that needs a
  collective, unless `RUN_AHEAD` says that the collective will not come.
- The operations of one communicator between two ranks are done in one order with its collectives.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist

ABORT = "TEST_NCCL_ABORT"
"""Environment variable: "raises" if the host is freed with an error from work that was aborted."""
RUN_AHEAD = "TEST_NCCL_RUN_AHEAD"
"""Environment variable: a file. Once it exists, the host runs ahead of collectives that do not come.

A fault writes it. The numbers of what runs ahead are wrong: if the collective comes after all, that is
printed.
"""
TRACE = "TEST_NCCL_TRACE"
"""Environment variable: a file, which gets a line for each collective that will never be done, and why."""

ENDLESS = datetime.timedelta(days=7)


def configure(extension: Any, device_type: str) -> None:
    """Let the device behave by this process's environment."""
    # As for CUDA: a gloo group that is made while the default group is bound to a device is asked for that
    # device's.
    dist.Backend.backend_capability[dist.Backend.GLOO].append(device_type)
    extension.enable_sticky_errors()
    extension.raise_after_abort(os.environ.get(ABORT) == "raises")
    extension.run_ahead_once_exists(os.environ.get(RUN_AHEAD, ""))


def make_backend(
    extension: Any, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
) -> Any:
    """A backend for `dist.Backend.register_backend`. Not a collective: the first collective connects."""
    return extension.NcclLike(_connect, store, rank, size, timeout)


def _connect(store: dist.Store, rank: int, size: int) -> dist.ProcessGroupGloo | None:
    """What does the work. None if a rank is lost: then the caller waits for ever, which Python code could not."""
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
