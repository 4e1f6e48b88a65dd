"""The space of training runs that the search draws from; `drawing.py` draws from it, by seed and number.

A case is small: `as_dict` holds only what differs from the defaults, and `Case(**that)` is the case again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. The defaults are the simplest run there is."""

    seed: int = 0  # of the initial weights and of the data
    engine: str = "fsdp2"  # "ddp", or "hsdp" on four ranks
    experts: int = 0  # ranks that the experts of each block are spread over; 4 brings four ranks
    task: str = "tokens"  # what is predicted: also "rows"
    container: str = "list"  # how the module holds its blocks, and how it calls them
    output: str = "tensor"  # what a block returns
    norm: str | None = None  # in front of the head; "batch" is one of micro-batches
    parts: tuple[str, ...] = ()  # extra parameters: see `Net`
    counter: str | None = None  # a buffer that counts forwards and scales the output
    frozen: str | None = None  # what is not trained
    thaw: str | None = None  # when a part that was frozen is unfrozen, or the other way round
    penalty: str | None = None  # a loss on weights in `training_step`
    batch: str = "dict"  # what a batch looks like
    num_batches: int = 3  # micro-batches of an epoch on each rank
    more_batches: int = 0  # that rank 0 has
    stream: bool = False  # the loader does not know its length
    gap: str | None = None  # what has no label token: some "micro_batches", one "rank" or one "window"
    epochs: int = 1
    accumulation: tuple[int, ...] = (
        1,
    )  # micro-batches a window; several: a `GradientAccumulationScheduler`
    tell: str = "labels"  # how the strategy learns the count; "equal" is `per_token_loss=False`
    weighted: bool = False  # the loss has class weights, and the count is their sum
    loss_reduction: str = "mean"
    label_shift: int = 0
    aux: bool = False  # the loss holds a part that is no token loss
    forwards: int = 1  # for one loss
    optimizer: str = "sgd"
    schedule: str | None = None  # of the learning rate
    clip: str | None = None  # the Trainer's clipping
    hooks: tuple[str, ...] = ()  # what the module's hooks do: see `Searched`
    skip: tuple[int, ...] = ()  # batches whose `training_step` returns None
    manual: str | None = None  # manual optimization, see `reference.py`; None is automatic
    manual_clip: str | None = None  # how it clips
    callbacks: tuple[str, ...] = ()
    stops: tuple[int, ...] = ()  # micro-batches after which the fit is stopped and resumed
    fits: tuple[str, ...] = ()  # what an estimate says that fits unsharded: of each fit between stops
    strategy: tuple[tuple[str, Any], ...] = ()  # more options of the strategy
    trainer: tuple[tuple[str, Any], ...] = ()  # more options of the Trainer

    # What users write beside training: `user_code.py`. Many values are "WHAT@WHERE".
    foreign: tuple[str, ...] = ()  # gradients computed and thrown away in a hook
    inner: str | None = None  # a gradient that the loss is made of
    writes: tuple[str, ...] = ()  # to weights: in the step, the forward or a hook
    alias: str | None = None  # how a parameter is reached past the module tree, and whose parameter
    backward: str | None = None  # what changes gradients in the backward
    changed: str | None = None  # what becomes of the module's structure, in which hook
    soft: bool = False  # labels are distributions over classes
    negative: bool = False  # rank 1 tells its counts with a minus
    over_ranks: bool = False  # the loss that is returned is already the mean over ranks
    rows: str | None = None  # how a hook changes some rows of a gradient, or draws random numbers for it
    snippet: str | None = None  # of `tests/sharding/snippets.py`, run before each step but the first
    functional: str | None = None  # `functional_call` of a block: with weights of its "own", or "made"

    @property
    def num_ranks(self) -> int:
        """Processes, each with its own data."""
        return 4 if self.engine == "hsdp" or self.experts == 4 else 2

    def accumulates(self, epoch: int) -> int:
        """Micro-batches of a window in this epoch."""
        return self.accumulation[min(epoch, len(self.accumulation) - 1)]

    def num_batches_of(self, rank: int) -> int:
        """Micro-batches of an epoch on a rank."""
        return self.num_batches + (self.more_batches if rank == 0 else 0)

    def as_dict(self) -> dict[str, Any]:
        """What differs from the defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(type(self), name)}


def has(case: Case, option: str, *values: Any) -> bool:
    """Whether the strategy or the Trainer is given this option (with one of these values)."""
    given = {**dict(case.strategy), **dict(case.trainer)}
    return option in given and (not values or given[option] in values)


def dropped(name: str, *values: str) -> Callable[[Case], tuple[Any, ...]]:
    """A function of a case: what it has under this name, without these values."""

    def kept(case: Case) -> tuple[Any, ...]:
        found = getattr(case, name)
        return tuple(each for each in found if (each[0] if isinstance(each, tuple) else each) not in values)

    return kept
