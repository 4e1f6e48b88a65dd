"""What goes wrong with a checkpoint, told on every rank at once."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_automodel.distributed.process_group import group_rank as get_rank_safe


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not what it should be. Nothing was loaded, no older one was touched."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was given."""


@contextmanager
def on_every_rank(what: str, group: dist.ProcessGroup | None = None, alone: bool = False) -> Iterator[None]:
    """Raise on every rank of ``group`` what the block raises on any of them.

    A collective over the group where torch.distributed is initialised: every rank must come here, whatever happened
    inside, so the block must hold no collective that another rank's failure would leave waiting.

    Args:
        what: What the block is about to do, for the message.
        group: None for the default group.
        alone: Not a collective: this process acts by itself, whatever groups it is in.

    Raises:
        CheckpointError: Names the ranks that failed, and why.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if alone:
        if error is not None:
            cause = _Told.of(error)
            raise _kind([cause])(f"{what}: {cause.text}") from error
        return
    told: list[_Told | None] = [None if error is None else _Told.of(error)]
    if dist.is_available() and dist.is_initialized():
        told = told * dist.get_world_size(group)
        dist.all_gather_object(told, told[0], group)
    raise_if_any(what, {rank: cause for rank, cause in enumerate(told) if cause is not None}, error)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn what this rank raises, or torch.distributed.checkpoint on every rank, into a :class:`CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise_if_any(what, {get_rank_safe(): _Told.of(error)}, error)
    except CheckpointException as failure:
        causes = {rank: _Told.of(cause) for rank, (cause, _) in failure.failures.items()}
        raise_if_any(what, causes, failure)


@dataclass(frozen=True)
class _Told:
    """What one rank tells the others of its error."""

    text: str
    is_missing: bool

    @classmethod
    def of(cls, error: BaseException) -> "_Told":
        text = str(error).strip() or "no message"
        is_ours = isinstance(error, CheckpointError)
        return cls(text if is_ours else f"{type(error).__name__}: {text}", isinstance(error, FileNotFoundError))


def raise_if_any(what: str, causes: dict[int, _Told], error: BaseException | None) -> None:
    """Raise a :class:`CheckpointError` if there are ``causes``, by rank; equal ones are told once."""
    if not causes:
        return
    ranks: dict[str, list[str]] = {}
    for rank, cause in sorted(causes.items()):
        ranks.setdefault(cause.text, []).append(str(rank))
    told = "; ".join(f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(who)}: {cause}" for cause, who in ranks.items())
    raise _kind(causes.values())(f"{what}: {told}") from error


def _kind(causes: Collection[_Told]) -> type[CheckpointError]:
    return CheckpointNotFoundError if all(cause.is_missing for cause in causes) else CheckpointError
