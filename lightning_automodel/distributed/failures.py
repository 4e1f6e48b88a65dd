"""What one rank reports of its failure, and how that is written to the process group's store for the other ranks."""

import json
import socket
from dataclasses import asdict, dataclass

import torch.distributed as dist

MAX_MESSAGE_CHARACTERS = 4000
LAUNCHER = -1
PROCESS_ENDED = "process ended"
MISSED_HEARTBEATS = "missed heartbeats"
STUCK = "stuck"
RUN_ON_ALL_RANKS = (
    "What communicates must run on all ranks, never below `if trainer.is_global_zero` or @rank_zero_only: calling,"
    " saving or exporting a sharded model, self.log(..., sync_dist=True), self.all_gather. And the same parameters must"
    " be trainable on all ranks."
)
COMMUNICATION = ("gloo", "NCCL", "XCCL", "monitoredBarrier")


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank, as every other rank reports it.

    ``error`` is the type of an exception; ``PROCESS_ENDED`` if another process saw this one end; ``MISSED_HEARTBEATS``;
    or ``STUCK`` for a rank that is alive but does not go on.
    """

    rank: int  # in the default group; LAUNCHER for the process that started the ranks
    host: str
    where: str  # the hook or block that the rank was in
    error: str
    message: str  # that of the exception, cut after some thousand characters

    @classmethod
    def from_exception(cls, exception: BaseException, rank: int, where: str) -> "RankFailure":
        """Describe ``exception``, which this process, rank ``rank``, raised in ``where``."""
        message = f"exit status {exception.code}" if isinstance(exception, SystemExit) else _text(exception)
        return cls(rank, socket.gethostname(), where, type(exception).__name__, message[:MAX_MESSAGE_CHARACTERS])

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankFailure":
        """The inverse of :meth:`to_bytes`."""
        return cls(**json.loads(data))

    def to_bytes(self) -> bytes:
        """Encode the failure for the store."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        ending = f": {self.message}" if self.message else ""
        if self.rank == LAUNCHER:
            return f"the launcher, {self.message}"
        if self.error == PROCESS_ENDED:
            seen = f" was last seen in {self.where}" if self.where else ""
            return f"rank {self.rank} on {self.host}{seen}{ending}"
        if self.error == MISSED_HEARTBEATS:
            return f"rank {self.rank} on {self.host} missed heartbeats, last seen in {self.where}{ending}"
        if self.error == STUCK:
            return f"rank {self.rank} on {self.host} is stuck in {self.where}{ending}"
        if self.error == KeyboardInterrupt.__name__:
            return f"rank {self.rank} on {self.host} was interrupted in {self.where}"
        return f"rank {self.rank} on {self.host} failed in {self.where}: {self.error}{ending}"


class RankFailedError(RuntimeError):
    """Raised on every rank that has to stop because another rank failed.

    Attributes:
        failure: What happened, and where.
    """

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[type["RankFailedError"], tuple[RankFailure]]:
        return type(self), (self.failure,)


def failure_of(error: BaseException, rank: int, where: str) -> RankFailure:
    """The failure to post for the other ranks: another rank's, if ``error`` reports one, else ``error`` itself."""
    return error.failure if isinstance(error, RankFailedError) else RankFailure.from_exception(error, rank, where)


def is_communication_error(exception: BaseException) -> bool:
    """Whether ``exception``, or one in its chain of causes, says that another rank did not answer."""
    seen: set[int] = set()
    current: BaseException | None = exception
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, dist.DistError):
            return True
        if isinstance(current, RuntimeError) and any(name in _text(current) for name in COMMUNICATION):
            return True
        current = current.__cause__ or current.__context__
    return False


def _text(exception: BaseException) -> str:
    # An exception whose own `__str__` raises must reach the other ranks all the same.
    try:
        return str(exception)
    except Exception as error:
        return f"(its __str__ raised {type(error).__name__})"
