"""Collectives of the second device that behave as NCCL's, in a process whose `TEST_DEVICE` is "nccl".

Numbers are gloo's, to the bit. Where gloo's collectives block and raise, these do neither. `nccl_like.cpp`
has them, `pending.cpp` what waits for them.

What comes from the sources of torch 2.13: lines of ProcessGroupNCCL.hpp, which is installed with torch, and
functions of ProcessGroupNCCL.cpp, which is not, as read in a version of the same classes:

- A collective is queued on a stream of the backend's own, and the call returns (line 286). One that is not
  asynchronous is queued on the current stream (`collective`, by `asyncOp`). `Work.wait` makes the current
  stream wait, not the host, but for a barrier, for which it synchronizes the stream (`WorkNCCL::wait`, line
  427). `getFuture` is completed at once, with events. So the host blocks in reads, and where it
  synchronizes.
- A thread looks at the oldest collective every 100 ms (line 1279). When it is not done after `timeout` since
  it was queued, or when its event raises, as an event does after an error in a kernel (line 109), the
  process is aborted (lines 171 and 1263; `WorkNCCL::checkTimeout`, `handleException`). Before that, torch
  dumps its flight recorder, for 15 s at most (`HeartbeatMonitor`): here, nothing is dumped.
- A group connects in the thread that calls its first collective (lines 1077 and 1079: `initNCCLComm`, before
  the collective becomes work that the watchdog sees), or at once where a device is bound (line 987;
  `_new_process_group_helper`, distributed_c10d.py:2333), or when it is split from such a group
  (device_mesh.py:564). Ranks wait for rank 0's unique id until the store's timeout, and raise then
  (`broadcastUniqueNCCLID`); then for all. A communicator can be aborted only once it is made (line 1346), so
  `abort` does not end that wait.
- `shutdown`, which `destroy_process_group` calls, waits in NCCL for what is queued, under a lock (line 981).
  `abort` needs that lock: it runs in a thread of its own, is waited for until `timeout`, and raises then
  (lines 985 and 1267). The destructor aborts, as distributed_c10d.py keeps groups until the program ends.
- Sequence numbers are counted by the backend (line 950). `ProcessGroup` knows only those of torch's own
  backends.

What is an assumption:

- A peer that dies, or does another collective, is noticed by nobody. So it is on one machine, where NCCL
  writes to shared memory; over a network its transport may report an error, which the watchdog would make an
  abort.
- A rank that is lost while a group connects makes the others wait without a limit. NCCL's sockets may report
  it.
- `shutdown` waits until the others come to it, too: NCCL's documentation calls it collective.
- Whether `abort` frees a blocked host with an error could not be settled: `ABORT` chooses.
- An error in a kernel raises in the call that launches it, not in a later one: kernels run at once here.
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
