"""Errors of checkpoints, raised on every rank."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.distributed.process_group import group_rank, group_size


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Nothing was loaded, and no older checkpoint was changed."""


@contextmanager
def on_every_rank(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise a :class:`CheckpointError` on every rank if the block raises on any: ``what`` failed, where and why.

    A collective over ``group``, else the default group, if there is one: every rank must reach the block's end, so the
    block must hold no collective that would wait for a rank that has failed in it.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    # Ranks that succeeded take part too: they have to learn of the others' errors.
    texts = gather_objects(None if error is None else _described(error), group)
    if failed := {rank: text for rank, text in enumerate(texts) if text is not None}:
        raise _combined(what, failed) from error


@contextmanager
def on_this_rank(what: str) -> Iterator[None]:
    """Turn what the block raises into a :class:`CheckpointError`. Not a collective.

    What torch.distributed.checkpoint raises, on every rank, names the ranks that have failed.
    """
    try:
        yield
    except CheckpointException as failure:
        raise _combined(what, {rank: _described(cause) for rank, (cause, _) in failure.failures.items()}) from failure
    except Exception as error:
        raise _combined(what, {group_rank(): _described(error)}) from error


def _described(error: BaseException) -> str:
    """Describe ``error``, or the earliest ``OSError`` in its chain, if there is one.

    After an ``OSError``, ``torch.save`` raises a ``RuntimeError`` of its own, which explains nothing.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    earlier: BaseException | None = error
    while earlier is not None:
        error = earlier if isinstance(earlier, OSError) else error
        earlier = earlier.__context__
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def _combined(what: str, failed: Mapping[int, str]) -> CheckpointError:
    """One error for several ranks; equal messages are listed once. In a single process no rank is named."""
    if group_size() == 1:
        return CheckpointError(f"{what}: {next(iter(failed.values()))}")
    ranks: dict[str, list[str]] = {}
    for rank, text in sorted(failed.items()):
        ranks.setdefault(text, []).append(str(rank))
    listed = "; ".join(f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(who)}: {text}" for text, who in ranks.items())
    return CheckpointError(f"{what}: {listed}")
