"""Errors of checkpoints, raised on every rank."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.distributed.process_group import group_rank, group_size


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Nothing was loaded, and no older checkpoint was changed."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was given."""


RankError = tuple[str, bool]
"""One rank's error, in a form that can be sent to the others: its text, and whether a file is missing."""


@contextmanager
def on_every_rank(what: str, group: dist.ProcessGroup | None = None, alone: bool = False) -> Iterator[None]:
    """Raise on every rank what the block raises on any of them.

    A collective over ``group``, else the default group, if there is one: every rank must reach the block's end, so the
    block must hold no collective that would wait for a rank that has failed in it.

    The :class:`CheckpointError` says ``what`` failed, on which ranks, and why. With ``alone`` this is not a collective,
    whatever groups the process is in.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    own = None if error is None else _described(error)
    if alone:
        if own is not None:
            raise _kind([own])(f"{what}: {own[0]}") from error
        return
    # Ranks that succeeded take part too: they have to learn of the others' errors.
    errors = {rank: each for rank, each in enumerate(gather_objects(own, group)) if each is not None}
    if errors:
        raise _combined(what, errors) from error


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn what torch.distributed.checkpoint raises on every rank, or this rank alone, into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as failure:
        errors = {rank: _described(cause) for rank, (cause, _) in failure.failures.items()}
        raise _combined(what, errors) from failure
    except Exception as error:
        raise _combined(what, {group_rank(): _described(error)}) from error


def _described(error: BaseException) -> RankError:
    """Describe ``error``, or the earliest ``OSError`` in its chain, if there is one.

    After an ``OSError``, ``torch.save`` raises a ``RuntimeError`` of its own, which explains nothing.
    """
    if isinstance(error, CheckpointError):
        return str(error).strip(), isinstance(error, FileNotFoundError)
    earlier: BaseException | None = error
    while earlier is not None:
        error = earlier if isinstance(earlier, OSError) else error
        earlier = earlier.__context__
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}", isinstance(error, FileNotFoundError)


def _combined(what: str, errors: Mapping[int, RankError]) -> CheckpointError:
    """One error for several ranks; equal messages are listed once. In a single process no rank is named."""
    if group_size() == 1:
        ((text, _),) = errors.values()
        return _kind(errors.values())(f"{what}: {text}")
    ranks: dict[str, list[str]] = {}
    for rank, (text, _) in sorted(errors.items()):
        ranks.setdefault(text, []).append(str(rank))
    listed = "; ".join(f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(who)}: {text}" for text, who in ranks.items())
    return _kind(errors.values())(f"{what}: {listed}")


def _kind(errors: Iterable[RankError]) -> type[CheckpointError]:
    return CheckpointNotFoundError if all(is_missing for _, is_missing in errors) else CheckpointError
