"""Workers: ranks started by a launching process that is no rank; what they report, and waiting for all of them."""

import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.multiprocessing import ProcessContext, ProcessRaisedException

from lightning_automodel import lightning_internals
from lightning_automodel.distributed.failures import (
    MISSED_HEARTBEATS,
    PROCESS_ENDED,
    RUN_ON_ALL_RANKS,
    RankFailedError,
    RankFailure,
    failure_of,
)
from lightning_automodel.distributed.process_group import patched_signal
from lightning_automodel.failure.supervisor import SIGTERM_STATUS

log = logging.getLogger(__name__)

# An `on_exception` hook may write a checkpoint; after Ctrl-C the user wants the prompt back.
TIME_TO_END_S = 60.0
TIME_TO_END_AFTER_INTERRUPT_S = 10.0


def describe_exit(status: int) -> str:
    """The exit status of a process in words; a negative one is the number of a signal."""
    names = {known.value: known.name for known in signal.Signals}
    if status == -signal.SIGABRT:
        return f"was ended by SIGABRT, as gloo does where ranks call different collectives. {RUN_ON_ALL_RANKS}"
    if status < 0:
        return f"was ended by {names.get(-status, f'signal {-status}')}"
    return f"ended with exit status {status}"


def share_cores(num_processes: int) -> None:
    """Give this process its part of the node's cores, as Lightning does, unless the user has said how many."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // num_processes))
        torch.set_num_threads(max(1, cores // num_processes))


def write_report(folder: Path, local_rank: int, **report: Any) -> None:
    """Write what this worker reports, unless it has reported before.

    A file, since it appears whole or not at all, whatever ends the process.
    """
    path = folder / f"{local_rank}.pt"
    if not path.exists():
        torch.save(report, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


def write_failure(folder: Path, exception: BaseException, trainer: "pl.Trainer") -> None:
    """Report the exception that ends this worker; no failure if all ranks stop together after SIGTERM."""
    failure = None
    if not isinstance(exception, lightning_internals.SIGTERMException):
        stage = trainer.state.stage or trainer.state.fn
        where = lightning_internals.failing_hook(exception) or (stage.value if stage is not None else "set-up")
        failure = failure_of(exception, trainer.global_rank, where)
    text = "".join(traceback.format_exception(exception))
    try:
        write_report(folder, trainer.strategy.local_rank, failure=failure, traceback=text)  # type: ignore[attr-defined]
    except Exception:
        # No space is left, for example: what ended this worker is printed at least.
        print(text, file=sys.stderr)


def wait_for_workers(context: ProcessContext, folder: Path, first_rank: int) -> Any:
    """Wait until all workers have ended; return the results of the first one.

    There is no time limit for training. Once one worker has ended, the others have a minute. SIGTERM is passed on to
    them, and sent if this process leaves earlier.

    Args:
        context: The processes, by local rank.
        folder: Where they write their reports.
        first_rank: Global rank of the first one.

    Raises:
        RankFailedError: If a rank failed, chained to the traceback that it reported.
        SIGTERMException: If all ranks stopped together after one of them received SIGTERM.
    """
    processes, is_asked_to_stop = context.processes, False

    def pass_sigterm_on(signum: int, frame: Any) -> None:
        """Pass on the first SIGTERM, so that the ranks agree on a last step. At the second one, leave."""
        nonlocal is_asked_to_stop
        if is_asked_to_stop:
            raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
        is_asked_to_stop = True
        _terminate(processes)

    try:
        with patched_signal(signal.SIGTERM, pass_sigterm_on):
            ended = _wait_for_ends(processes, first_rank)
    except BaseException:
        _terminate(processes)
        wait_until = time.monotonic() + TIME_TO_END_AFTER_INTERRUPT_S
        for process in processes:
            process.join(max(0.0, wait_until - time.monotonic()))
        raise
    finally:
        for process in processes:
            process.kill()
            process.join()
    paths = {index: folder / f"{index}.pt" for index in range(len(processes))}
    reports = {index: torch.load(path, "cpu", weights_only=False) for index, path in paths.items() if path.exists()}
    for index, report in reports.items():
        if "results" in report and (status := processes[index].exitcode):
            log.warning("Rank %s has finished its run, but its process %s.", first_rank + index, describe_exit(status))
    _raise_failure(processes, reports, ended, first_rank)
    return reports[0]["results"]


def _wait_for_ends(processes: Sequence[BaseProcess], first_rank: int) -> list[int]:
    """Wait for all workers, and return their local ranks in the order in which they ended."""
    ended: list[int] = []
    while running := {each.sentinel: index for index, each in enumerate(processes) if index not in ended}:
        ready = wait(list(running), TIME_TO_END_S if ended else None)
        for sentinel in ready:
            index = running[sentinel]  # type: ignore[index]
            processes[index].join()
            ended.append(index)
        for index in [] if ready else running.values():
            log.warning("Rank %s does not end: its process is killed.", first_rank + index)
            processes[index].kill()
    return ended


def _terminate(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()


def _raise_failure(
    processes: Sequence[BaseProcess], reports: Mapping[int, Mapping[str, Any]], ended: list[int], first_rank: int
) -> None:
    """Raise why the workers failed, if one did."""
    failures = {index: report["failure"] for index, report in reports.items() if report.get("failure") is not None}
    # A process that ends without a report (`os._exit(0)`) has failed, whatever its status.
    unexplained = [index for index in ended if index not in reports]
    cause: ProcessRaisedException | None = None
    if failures:
        # Prefer the report of the rank that failed to those of the ranks that left because of it.
        index = min(failures, key=lambda index: failures[index].rank != first_rank + index)
        text = f"\n\nrank {first_rank + index} left with:\n{reports[index]['traceback']}"
        failure, cause = failures[index], ProcessRaisedException(text, index, processes[index].pid or 0)
    elif any("traceback" in report for report in reports.values()):
        raise lightning_internals.SIGTERMException(SIGTERM_STATUS)
    elif unexplained:
        failure = RankFailure(first_rank + unexplained[0], socket.gethostname(), "", PROCESS_ENDED, "")
    else:
        return
    index = failure.rank - first_rank
    if index in unexplained and failure.error in (PROCESS_ENDED, MISSED_HEARTBEATS):
        status = processes[index].exitcode or 0
        # The other ranks may know no more than that it is silent. This process has killed those that did not end.
        if not failures or index == ended[0] or status != -signal.SIGKILL:
            failure = replace(failure, error=PROCESS_ENDED, message=f"its process {describe_exit(status)}")
    raise RankFailedError(failure) from cause
