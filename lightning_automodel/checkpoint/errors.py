"""What goes wrong with a checkpoint, raised on every rank at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_automodel.distributed.process_group import group_rank

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not what it should be. Nothing was loaded, no older one was touched."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was given."""


@dataclass(frozen=True)
class RankError:
    """One rank's error, in a form that can be sent to the others."""

    text: str
    is_missing: bool

    @classmethod
    def of(cls, error: BaseException) -> "RankError":
        """Describe ``error``; of a chain, the operating system's error that began it.

        ``torch.save`` lets an ``OSError`` be followed by a ``RuntimeError`` of its own, which explains nothing.
        """
        if isinstance(error, CheckpointError):
            return cls(str(error).strip(), isinstance(error, FileNotFoundError))
        earlier: BaseException | None = error
        while earlier is not None:
            error = earlier if isinstance(earlier, OSError) else error
            earlier = earlier.__context__
        text = str(error).strip() or "no message"
        return cls(f"{type(error).__name__}: {text}", isinstance(error, FileNotFoundError))


@contextmanager
def on_every_rank(what: str, group: dist.ProcessGroup | None = None, alone: bool = False) -> Iterator[None]:
    """Raise on every rank what the block raises on any of them.

    A collective over ``group``, else the default group, if there is one: every rank must come here, whatever happened
    inside, so the block must hold no collective that another rank's failure would leave waiting.

    The :class:`CheckpointError` says ``what`` failed, on which ranks, and why. Where a process acts ``alone``, whatever
    groups it is in, this is no collective.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    own = None if error is None else RankError.of(error)
    if alone:
        if own is not None:
            raise _kind([own])(f"{what}: {own.text}") from error
        return
    # Ranks that succeeded come here too: nobody else could tell them of the others.
    errors = gather(own, group)
    raise_if_any(what, {rank: each for rank, each in enumerate(errors) if each is not None}, error)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """``value`` of every rank, in their order; a collective over ``group``, else the default group, if there is one."""
    values = [value]
    if dist.is_available() and dist.is_initialized():
        values = values * dist.get_world_size()
        dist.all_gather_object(values, value, group)
    return values


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn what this rank raises, or torch.distributed.checkpoint on every rank, into a :class:`CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise_if_any(what, {group_rank(): RankError.of(error)}, error)
    except CheckpointException as failure:
        errors = {rank: RankError.of(cause) for rank, (cause, _) in failure.failures.items()}
        raise_if_any(what, errors, failure)


def raise_if_any(what: str, errors: Mapping[int, RankError], cause: BaseException | None) -> None:
    """Raise a :class:`CheckpointError` if there are ``errors``, by rank; equal ones are listed once."""
    if not errors:
        return
    ranks: dict[str, list[str]] = {}
    for rank, error in sorted(errors.items()):
        ranks.setdefault(error.text, []).append(str(rank))
    listed = "; ".join(f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(who)}: {text}" for text, who in ranks.items())
    raise _kind(list(errors.values()))(f"{what}: {listed}") from cause


def _kind(errors: list[RankError]) -> type[CheckpointError]:
    return CheckpointNotFoundError if all(error.is_missing for error in errors) else CheckpointError
