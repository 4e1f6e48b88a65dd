"""Workers: ranks started by a launching process that is no rank. It reads their reports, and waits for them."""

import logging
import os
import signal
import socket
import time
import traceback
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.multiprocessing import ProcessContext, ProcessExitedException, ProcessRaisedException

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.process_group import patched_signal
from lightning_automodel.failure.supervisor import SIGTERM_STATUS
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.launch.results import RESULTS

log = logging.getLogger(__name__)

# An `on_exception` hook may write a checkpoint; after Ctrl-C the user wants the prompt back.
TIME_TO_END_S = 60.0
TIME_TO_END_AFTER_INTERRUPT_S = 10.0
WHY_ENDED = {
    "SIGKILL": (
        ', usually by the kernel as memory ran out: look for "out of memory" in dmesg, and for limits of the job'
    ),
    "SIGSEGV": (
        ', a fault in compiled code, often of an extension: look for "Fatal Python error" above, where its line'
        " is"
    ),
    "SIGBUS": (
        ", often as /dev/shm is full: give the container more of it (docker run --shm-size), or take fewer"
        " num_workers"
    ),
}


def describe_exit(status: int, backend: str) -> str:
    """The exit status of a rank's process, which used ``backend``, in words; below 0, it is minus a signal."""
    names = {known.value: known.name for known in signal.Signals}
    if status == -signal.SIGABRT:
        return f"was ended by SIGABRT, {_why_aborted(backend)} {failures.RUN_ON_ALL_RANKS}"
    if status < 0:
        name = names.get(-status, f"signal {-status}")
        return f"was ended by {name}{WHY_ENDED.get(name, '')}"
    return f"ended with exit status {status}"


def _why_aborted(backend: str) -> str:
    """What aborts a process whose groups have this backend, and how to tell which it was."""
    if backend.lower() in ("gloo", "cpu:gloo"):
        return "as gloo does where ranks call different collectives."
    name = backend.rpartition(":")[2].upper()
    return (
        f"as the watchdog of {name} does after an error in a kernel (its log then has the device's error),"
        " or where a"
        ' collective has waited for the strategy\'s timeout ("Watchdog caught collective operation timeout"), since a'
        " rank did not come to it."
    )


def share_cores(num_processes: int) -> None:
    """Give this process its part of the node's cores, as Lightning does, unless the user has said how many."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        share = max(1, cores // num_processes)
        os.environ["OMP_NUM_THREADS"] = str(share)
        torch.set_num_threads(share)


def write_failure(folder: Path, exception: BaseException, trainer: "pl.Trainer") -> None:
    """Report the exception that ends this worker, once. SIGTERM is not reported: it is the exit status."""
    path = folder / f"{trainer.global_rank}.failure"
    if path.exists() or isinstance(exception, lightning_internals.SIGTERMException):
        return
    stage = trainer.state.stage or trainer.state.fn
    where = lightning_internals.failing_hook(exception) or (stage.value if stage is not None else "set-up")
    failure = failures.RankFailure.from_exception(exception, trainer.global_rank, where)
    text = f"rank {trainer.global_rank} left with:\n{''.join(traceback.format_exception(exception))}"
    # It appears whole or not at all, whatever ends the process.
    torch.save((failure, trainer.global_rank, text), path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def wait_for_workers(context: ProcessContext, folder: Path, first_rank: int, backend: str) -> None:
    """Wait until all workers, whose groups have this ``backend``, have ended.

    There is no time limit for training. Once a worker has ended, the others have a minute. If it has failed,
    they then get SIGTERM, and another minute. SIGTERM to this process is passed on to them. They also get it
    if this process leaves earlier.

    RankFailedError, chained to the traceback of the rank that failed; SIGTERMException if SIGTERM stopped
    all.
    """
    processes = context.processes
    is_asked_to_stop = False

    def pass_sigterm_on(*_: object) -> None:
        """Pass on the first SIGTERM, so that the ranks agree on a last step. At the second one, leave."""
        nonlocal is_asked_to_stop
        if is_asked_to_stop:
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        is_asked_to_stop = True
        for process in processes:
            process.terminate()

    try:
        with patched_signal(signal.SIGTERM, pass_sigterm_on):
            _join_all(context)
    except (ProcessExitedException, ProcessRaisedException) as error:  # torch has ended the others
        _raise_failure(error, folder, first_rank, backend)
    except BaseException:
        _terminate(context)
        raise
    finally:
        for process in processes:
            process.kill()
            process.join()
    if not (folder / RESULTS).exists():
        ended = ProcessExitedException(describe_exit(0, backend), 0, processes[0].pid or 0, 0)
        _raise_failure(ended, folder, first_rank, backend)


def _join_all(context: ProcessContext) -> None:
    """Wait until all workers have ended, or those that are left do not end after the others."""
    num_running = len(context.processes)
    limit_s = None
    while not context.join(limit_s, TIME_TO_END_S):
        if num_running == len(context.sentinels):
            log.warning("Some of the workers have finished, and the others do not end: they are killed.")
            return
        num_running = len(context.sentinels)
        limit_s = TIME_TO_END_S


def _terminate(context: ProcessContext) -> None:
    """Ask the workers to end, and give them some seconds."""
    for process in context.processes:
        process.terminate()
    wait_until = time.monotonic() + TIME_TO_END_AFTER_INTERRUPT_S
    for process in context.processes:
        process.join(max(0.0, wait_until - time.monotonic()))


def _raise_failure(
    error: ProcessExitedException | ProcessRaisedException, folder: Path, first_rank: int, backend: str
) -> None:
    """Raise why the workers failed. ``error`` is how the first one ended."""
    rank = first_rank + error.error_index
    status = getattr(error, "exit_code", 1)
    reports = [torch.load(path, weights_only=False) for path in folder.glob("*.failure")]
    if not reports and status == SIGTERM_STATUS:
        raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
    message = f"its process {describe_exit(status, backend)}"
    silent = failures.RankFailure(rank, socket.gethostname(), "", failures.PROCESS_ENDED, message)
    if not reports:
        raise failures.RankFailedError(silent) from error
    # Prefer the report of the rank that failed to those of the ranks that left because of it.
    failure, reporter, text = min(reports, key=lambda report: report[0].rank != report[1])
    is_silent = failure.error in (failures.PROCESS_ENDED, failures.MISSED_HEARTBEATS)
    if failure.rank == rank != reporter and is_silent:
        # The other ranks know no more than that it is silent.
        failure = replace(silent, host=failure.host, where=failure.where)
    raise failures.RankFailedError(failure) from ProcessRaisedException(
        f"\n\n{text}", error.error_index, error.error_pid
    )
