"""Heartbeat records and failures of ranks, and how other ranks read them."""

import re
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch.distributed as dist

MAX_MESSAGE_CHARACTERS = 4000
MISSED_BEATS = 8
LONGEST_LIST = 16
LAUNCHER = -1
PROCESS_ENDED = "process ended"
MISSED_HEARTBEATS = "missed heartbeats"
STUCK = "stuck"
RUN_ON_ALL_RANKS = (
    "What communicates must run on all ranks, never below `if trainer.is_global_zero` or @rank_zero_only:"
    " calling, saving or exporting a sharded model, self.log(..., sync_dist=True), self.all_gather. And the"
    " same parameters must be trainable on all ranks."
)
COMMUNICATION = re.compile(r"\b(gloo|NCCL|XCCL|monitoredBarrier)\b")
GLOO_SOURCE = re.compile(r"\bgloo/\S+\.(cc|h|cpp|hpp):\d+")
COMMUNICATING = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/_ops.py",
    "/torch/autograd/graph.py",  # runs a backward, within which DDP reduces
)


class Device(StrEnum):
    """What is known of a rank's accelerator."""

    NONE = "none"  # or none that communicates
    UNSEEN = "not looked at"  # because its host goes on
    IDLE = "idle"  # it has done all that its host has queued
    BUSY = "busy"
    FAILED = "failed"


@dataclass(frozen=True)
class Record:
    """What a rank tells of itself."""

    beat: int = 0  # number of the heartbeat
    host: str = "an unknown host"
    where: str = "set-up"  # the hook or block that it is in
    step: int = 0  # the newest training step that it began
    position: str = ""  # lines of user code that its main thread is at, or that called the failed collective
    waits: bool = False  # whether the main thread is in a collective there
    stood_s: float = 0.0  # for how long it has been there
    has_failed: bool = False  # whether its collective failed, so that it waits for the verdict
    has_ended: bool = False  # whether it has come to the end of its run, where it waits for the others
    has_left: bool = False  # whether it needs the board no more
    device: str = Device.NONE  # what its accelerator does
    device_step: int = 0  # the newest step that this has come to, of those that the host has begun
    device_stood_s: float = 0.0  # for how long it has been busy, without progress of host or device
    queued: Mapping[str, int] = field(default_factory=dict)  # collectives, by group of accelerators


@dataclass(frozen=True)
class Sighting:
    """What a reader has seen of a rank."""

    record: Record | None  # its newest one; None if it has written none
    changed_at: float  # when the reader first saw that, on the reader's clock
    missed: int = 0  # how often the reader has found it unchanged since
    beats: int = 0  # how many records the reader has seen after the first
    busy: int = 0  # how many of them in a row, up to the newest, showed the rank outside of a collective
    gap_s: float = 0.0  # the longest time between two of them

    def then(self, record: Record | None, now: float) -> "Sighting":
        """What is seen after ``record`` was read."""
        if record is None or record == self.record:
            return replace(self, missed=self.missed + 1)
        busy = self.busy + 1
        if record.waits or record.has_failed or record.has_ended:
            busy = 0
        gap_s = max(self.gap_s, now - self.changed_at)
        return Sighting(record, now, 0, self.beats + 1, busy, gap_s)

    @property
    def known(self) -> Record:
        """The record, or one that says that nothing is known."""
        return self.record or Record()

    def is_silent(self, now: float, limit_s: float) -> bool:
        """Whether the rank has sent no heartbeat for ``limit_s`` seconds and for several of the reader's."""
        # If the machine is so busy that the reader itself hardly gets its turn, seconds say little.
        has_missed = self.missed >= MISSED_BEATS and now - self.changed_at > limit_s
        return has_missed and not self.known.has_ended


UNSEEN = Sighting(None, 0.0)


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank, as every other rank reports it."""

    rank: int  # in the default group; LAUNCHER for the process that started the ranks
    host: str
    where: str  # the hook or block that the rank was in
    error: str  # an exception's type, PROCESS_ENDED (another process saw it end), MISSED_HEARTBEATS or STUCK
    message: str  # that of the exception, cut after some thousand characters

    @classmethod
    def from_exception(cls, exception: BaseException, rank: int, where: str) -> "RankFailure":
        """The failure that ``exception``, raised in ``where`` on this rank, reports: another rank's or its own."""
        if isinstance(exception, RankFailedError):
            return exception.failure
        message = message_of(exception)
        if isinstance(exception, SystemExit):
            message = f"exit status {exception.code}"
        message = message[:MAX_MESSAGE_CHARACTERS]
        return cls(rank, socket.gethostname(), where, type(exception).__name__, message)

    def __str__(self) -> str:
        if self.rank == LAUNCHER:
            return f"the launcher, {self.message}"
        seen = ""
        if self.where:
            seen = f" was last seen in {self.where}"
        # Whole sentences, so that whoever meets one finds it here.
        sentences = {
            PROCESS_ENDED: f"rank {self.rank} on {self.host}{seen}",
            MISSED_HEARTBEATS: f"rank {self.rank} on {self.host} missed heartbeats, last seen in {self.where}",
            STUCK: f"rank {self.rank} on {self.host} is stuck in {self.where}",
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
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[type["RankFailedError"], tuple[RankFailure]]:
        return type(self), (self.failure,)


def message_of(exception: BaseException) -> str:
    """``str(exception)``, or why there is none: a cause must not be lost because its own text fails."""
    try:
        return str(exception)
    except Exception as error:
        return f"(the exception has no text: its __str__ raises {type(error).__name__})"


def is_communication_error(exception: BaseException) -> bool:
    """Whether ``exception``, or one in its chain of causes, says that another rank did not answer."""
    seen: set[int] = set()
    current: BaseException | None = exception
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, dist.DistError):
            return True
        if isinstance(current, RuntimeError) and _tells_of_communication(current):
            return True
        current = current.__cause__ or current.__context__
    return False


def _tells_of_communication(exception: RuntimeError) -> bool:
    """Whether it was raised where ranks communicate, and says so: its text alone may name a file `gloo.jpg`."""
    message = message_of(exception)
    if GLOO_SOURCE.search(message):
        # Raised in `wait()`, whose caller may be anybody.
        return True
    frames = traceback.extract_tb(exception.__traceback__)
    if not frames or not COMMUNICATION.search(message):
        return False
    innermost = frames[-1]
    return any(part in innermost.filename for part in COMMUNICATING)


def list_ranks(ranks: Sequence[int], notes: Mapping[int, str] | None = None) -> str:
    """The first of ``ranks``, each with its note, and how many more there are."""
    listed = ", ".join(f"{rank}{(notes or {}).get(rank, '')}" for rank in ranks[:LONGEST_LIST])
    if len(ranks) > LONGEST_LIST:
        listed += f" and {len(ranks) - LONGEST_LIST} more"
    return listed


def list_seen(ranks: Sequence[int], seen: Mapping[int, Sighting]) -> str:
    """Like :func:`list_ranks`, with the host and the place of each rank that was ``seen``."""
    known = {rank: seen[rank].known for rank in ranks[:LONGEST_LIST]}
    return list_ranks(
        ranks, {rank: f" ({record.host}, in {record.where})" for rank, record in known.items()}
    )


def did_not_arrive(
    missing: Sequence[int], seen: Mapping[int, Sighting], is_alive: bool, reader: str, unseen: str
) -> RankFailure:
    """The failure to report for the ranks ``missing``: that of the first one, which may be alive elsewhere.

    ``reader`` says who has waited for how long, and ``unseen`` where a rank is that has written no record.
    """
    first = seen[missing[0]]
    where = first.known.where
    if first.record is None:
        where = unseen
    error = MISSED_HEARTBEATS
    why = "stopped, dead, cut off, or not arrived yet"
    if is_alive:
        error = STUCK
        why = "alive, but did not arrive"
    message = f"{reader} for ranks {list_seen(missing, seen)}: {why}"
    return RankFailure(missing[0], first.known.host, where, error, message)


def missed_heartbeats(
    rank: int, record: Record, reader: int, silent_s: float, more: str = ""
) -> RankFailure:
    """The failure to report for a rank of which ``reader`` has heard nothing for ``silent_s`` seconds."""
    message = f"rank {reader} has heard nothing of it{more} for {silent_s:.1f} s: stopped, killed or cut off"
    return RankFailure(rank, record.host, record.where, MISSED_HEARTBEATS, message)
