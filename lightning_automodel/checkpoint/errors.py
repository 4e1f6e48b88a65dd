"""Checkpoint errors, and how every rank comes to raise them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.distributed.process_group import group_rank, group_size


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. No older checkpoint was changed.

    A checkpoint that is missing or damaged, or of other optimizers, has changed nothing in the run. One of
    another model raises once torch has loaded what fits, on every rank.
    """


@contextmanager
def on_every_rank(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise a :class:`CheckpointError` about ``what`` on every rank if the block raises on any.

    A collective over ``group``, or else over the default group if there is one. Every rank must reach the
    end of the block, so the block must not contain a collective: it would wait for a rank that has failed in
    the block.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    # Ranks that succeeded take part too, to learn of the others' errors.
    errors = gather_objects(None if error is None else describe(error), group)
    if failed := {rank: text for rank, text in enumerate(errors) if text is not None}:
        raise _combined(what, failed) from error


@contextmanager
def on_this_rank(what: str) -> Iterator[None]:
    """Turn an exception from the block into a :class:`CheckpointError`. Not a collective.

    The exception of torch.distributed.checkpoint, which every rank raises, names the ranks that failed.
    """
    try:
        yield
    except CheckpointException as failure:
        failed = {rank: describe(cause) for rank, (cause, _) in failure.failures.items()}
        raise _combined(what, failed) from failure
    except Exception as error:
        raise _combined(what, {group_rank(): describe(error)}) from error


def describe(error: BaseException) -> str:
    """The text of ``error``, or the earliest ``OSError`` in its chain if there is one.

    After an ``OSError``, ``torch.save`` raises a ``RuntimeError`` that explains nothing.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    earlier: BaseException | None = error
    while earlier is not None:
        if isinstance(earlier, OSError):
            error = earlier
        earlier = earlier.__context__
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def _combined(what: str, failed: Mapping[int, str]) -> CheckpointError:
    """One error for the ``failed`` ranks; equal messages are listed once. A single process names no rank."""
    if group_size() == 1:
        return CheckpointError(f"{what}: {next(iter(failed.values()))}")
    ranks_by_text: dict[str, list[str]] = {}
    for rank, text in sorted(failed.items()):
        ranks_by_text.setdefault(text, []).append(f"rank {rank}")
    listed = [f"{', '.join(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    return CheckpointError(f"{what}: {'; '.join(listed)}")
