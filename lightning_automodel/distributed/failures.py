"""What ranks say of themselves and of each other: heartbeat records, and failures in one sentence each."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed import processes
from lightning_automodel.distributed.store import launcher_hosts_store

MAX_MESSAGE_CHARACTERS = 4000
LONGEST_LIST = 16
LAUNCHER = -1
PROCESS_ENDED = "process ended"
MISSED_HEARTBEATS = "missed heartbeats"
MISSING = "missing"
WAITED = "waited in vain"
RUN_ON_ALL_RANKS = (
    "What communicates must run on all ranks, never below `if trainer.is_global_zero` or @rank_zero_only:"
    " calling, saving or exporting a sharded model, self.log(..., sync_dist=True), self.all_gather. And the"
    " same parameters must be trainable on all ranks."
)
COMMUNICATION = re.compile(r"\b(gloo|NCCL|XCCL|monitoredBarrier|pair closure)\b")


@dataclass
class Record:
    """What is true of a rank, in its own words; a new one is also its heartbeat.

    The rank's main thread writes the fields from ``training`` on, its heart the others, and the heart alone reads
    them for the store, one after the other. In this order, a rank that has ended is never given a step of before.
    """

    beat: int = 0  # number of the heartbeat; 0 if nothing was heard of the rank
    host: str = "an unknown host"
    process: str = ""  # what :func:`processes.own_process` says there
    where: str = "set-up"  # the hook or block that it is in
    position: str = ""  # lines of user code that its main thread is at, or that called the failed collective
    waits: bool = False  # whether the main thread is in a collective there
    stood_s: float = 0.0  # for how long it has been in this hook without beginning a step
    training: int = 1  # which stretch of training it is in, or has ended: validations and tuners part them
    has_ended: bool = False  # whether it waits for the others at the end of its training or run
    pauses: bool = False  # whether it waits for the others before a validation within its training
    step: int = 0  # the newest training step that it began
    has_left: bool = False  # whether its watch is over


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank, as every other rank reports it."""

    rank: int  # in the default group; LAUNCHER for the process that started the ranks
    host: str
    where: str  # the hook or block that the rank was in
    error: (
        str  # an exception's type; else one of the constants above, as others saw it (WAITED: it saw itself)
    )
    message: str  # that of the exception, cut after some thousand characters

    @classmethod
    def from_exception(cls, exception: BaseException, rank: int, where: str) -> "RankFailure":
        """The failure that ``exception``, raised in ``where`` on this rank, reports: another rank's or its own."""
        if isinstance(exception, RankFailedError):
            return exception.failure
        message = message_of(exception)[:MAX_MESSAGE_CHARACTERS]
        return cls(rank, socket.gethostname(), where, type(exception).__name__, message)

    def __str__(self) -> str:
        if self.rank == LAUNCHER:
            return f"the launcher, {self.message}"
        # Whole sentences, so that whoever meets one finds it here.
        sentences = {
            PROCESS_ENDED: f"rank {self.rank} on {self.host} was last seen in {self.where}",
            MISSED_HEARTBEATS: f"rank {self.rank} on {self.host} missed heartbeats, last seen in {self.where}",
            MISSING: f"rank {self.rank} on {self.host} is missing, last seen in {self.where}",
            WAITED: f"rank {self.rank} on {self.host} waited in vain in {self.where}",
            KeyboardInterrupt.__name__: f"rank {self.rank} on {self.host} was interrupted in {self.where}",
        }
        failed = f"rank {self.rank} on {self.host} failed in {self.where}: {self.error}"
        sentence = sentences.get(self.error, failed)
        if self.message:
            sentence += f": {self.message}"
        return sentence


class RankFailedError(RuntimeError):
    """Raised on every rank that has to stop because another rank failed; ``failure`` says where, and how."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure)
        self.failure = failure


def message_of(exception: BaseException) -> str:
    """``str(exception)``, or why there is none: a cause must not be lost because its own text fails."""
    try:
        return str(exception)
    except Exception as error:
        return f"(the exception has no text: its __str__ raises {type(error).__name__})"


def is_communication_error(exception: BaseException) -> bool:
    """Whether ``exception``, or one in its chain of causes, says that another rank did not answer.

    Its text tells. If that names these libraries for another reason, the other ranks hear of it some seconds later.
    """
    seen: list[BaseException] = []
    current: BaseException | None = exception
    while current is not None and current not in seen:
        seen.append(current)
        if isinstance(current, dist.DistError):
            return True
        if isinstance(current, RuntimeError) and COMMUNICATION.search(message_of(current)):
            return True
        current = current.__cause__ or current.__context__
    return False


def list_first(items: Sequence[Any], most: int = LONGEST_LIST) -> str:
    """The first ``most`` of ``items``, and how many more there are."""
    first = ", ".join(map(str, items[:most]))
    if len(items) > most:
        return f"{first} and {len(items) - most} more"
    return first


def missing_ranks(
    missing: Sequence[int], first: Record, reader: int, at: str, waited_s: float
) -> RankFailure:
    """The failure to report for ranks that have not come to the meeting ``at``: that of the ``first`` one."""
    message = (
        f"rank {reader} waited {waited_s:.1f} s at {at} for ranks {list_first(missing)}: stopped, dead, cut off, or"
        " not arrived yet"
    )
    where = first.where
    if first.position:
        where += f", at {first.position}"
    return RankFailure(missing[0], first.host, where, MISSING, message)


def silence(rank: int, record: Record, reader: int) -> RankFailure | None:
    """The failure to report for a rank of which ``reader`` hears nothing; None if it sees that its process lives."""
    state = processes.state_of(record.process)
    if state == processes.ALIVE:
        return None
    if state == processes.GONE:
        message = (
            f"its process has ended without a word (killed, out of memory, os._exit), as rank {reader} sees"
        )
        return RankFailure(rank, record.host, record.where, PROCESS_ENDED, message)
    why = "stopped, killed or cut off"
    if state == processes.STOPPED:
        why = f"its process {state}"
    message = f"rank {reader} has heard nothing of it: {why}"
    return RankFailure(rank, record.host, record.where, MISSED_HEARTBEATS, message)


def left_behind(rank: int, record: Record, other: int, step: int) -> RankFailure:
    """The failure to report for a rank that stopped training before a step that another one takes."""
    what = "began a validation" if record.pauses else "ended its run"
    message = (
        f"it {what} after training step {record.step}, but rank {other} is in step {step}: give all ranks"
        " equally many batches, and set trainer.should_stop on all of them or on none"
    )
    return RankFailure(rank, record.host, "fit", "RuntimeError", message)


def lost_store(host: Record, what: str) -> RankFailure:
    """The failure to report if the store does not answer: of the process that holds it, rank 0's or the launcher's."""
    message = f"which holds the store of the process group, {what}"
    if launcher_hosts_store():
        return RankFailure(LAUNCHER, socket.gethostname(), "", MISSED_HEARTBEATS, message)
    return RankFailure(0, host.host, host.where, MISSED_HEARTBEATS, f"its process, {message}")


def how_lost(error: Exception) -> str:
    """What is known of a store of which a call raised ``error``."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"ended or is out of reach ({type(error).__name__}: {first_line})"
