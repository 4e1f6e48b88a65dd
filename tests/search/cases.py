"""The space of training runs that the search draws from; `drawing.py` draws from it, by seed and number.

A case is small: `as_dict` holds only what differs from the defaults, and `Case(**that)` is the case again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. The defaults are the simplest run there is.

    Attributes:
        seed: Of the initial weights and of the data.
        engine: "fsdp2", "ddp", or "hsdp" on four ranks.
        experts: Ranks that the experts of each block are spread over; 4 brings four ranks. Without, blocks
            have none.
        task: What is predicted, "tokens" or "rows".
        container: How the module holds its blocks, and how it calls them.
        output: What a block returns.
        norm: Normalisation in front of the head; "batch" is one of micro-batches.
        parts: Extra parameters: see `Net`.
        counter: A buffer that counts forwards and scales the output: "persistent" or "transient".
        frozen: What is not trained: "embedding", "block" or "biases".
        thaw: When a part that was frozen is unfrozen, or the other way round: "epoch", "window" or
            "mid_window".
        penalty: A loss on weights in `training_step`: "full_tensor".
        batch: What a batch looks like.
        num_batches: Micro-batches of an epoch on each rank.
        more_batches: Batches that rank 0 has more than the others.
        stream: The loader does not know its length.
        gap: What has no label token: some "micro_batches", one "rank" or one "window".
        epochs: Of the fit.
        accumulation: Micro-batches a window; several: a `GradientAccumulationScheduler`.
        tell: How the strategy learns the count. "equal" is `per_token_loss=False`.
        weighted: The loss has class weights, and the count is their sum.
        loss_reduction: What `training_step` returns.
        label_shift: Leading label positions that the loss drops.
        aux: The loss holds a part that is no token loss.
        forwards: Forwards of the module for one loss.
        optimizer: "sgd", "groups" of parameters, "adam" or "nesterov".
        schedule: A learning rate schedule, by "step" or "epoch".
        clip: The Trainer's clipping, "norm" or "value".
        hooks: What the module's hooks do: see `Hooks` in `ranks.py`.
        skip: Indices of batches whose `training_step` returns None.
        manual: Manual optimization, see `reference.py`; None is automatic.
        manual_clip: How it clips: "strategy", "self" or "torch".
        callbacks: Callbacks of the Trainer.
        stops: Micro-batches after which the fit is stopped and resumed.
        fits: What an estimate says that fits unsharded, "nothing", "gradients" or "all": of each fit between
            stops.
        strategy: More options of the strategy.
        trainer: More options of the Trainer.

    What users write beside training is in `user_code.py`; its values are "WHAT@WHERE":

    Attributes:
        foreign: Gradients computed and thrown away in a hook.
        inner: A gradient that the loss is made of: "fgsm", "virtual", "penalty", "grad_norm" or "cam".
        writes: Writes to weights: in the step, the forward or a hook.
        alias: How a parameter is reached past the module tree, and whose parameter.
        backward: A hook on a module or a parameter, or an autograd function, that changes gradients.
        changed: What becomes of the module's structure, in which hook.
        soft: Labels are distributions over classes.
        negative: Rank 1 tells its counts with a minus.
        over_ranks: The loss that is returned is already the mean over ranks.
        rows: How a hook changes some rows of a gradient, or draws random numbers for it.
        snippet: A name of `tests/sharding/snippets.py`, run before each step but the first.
        functional: `torch.func.functional_call` of a block: with weights of its "own", or "made" by others.
    """

    seed: int = 0
    engine: str = "fsdp2"
    experts: int = 0
    task: str = "tokens"
    container: str = "list"
    output: str = "tensor"
    norm: str | None = None
    parts: tuple[str, ...] = ()
    counter: str | None = None
    frozen: str | None = None
    thaw: str | None = None
    penalty: str | None = None
    batch: str = "dict"
    num_batches: int = 3
    more_batches: int = 0
    stream: bool = False
    gap: str | None = None
    epochs: int = 1
    accumulation: tuple[int, ...] = (1,)
    tell: str = "labels"
    weighted: bool = False
    loss_reduction: str = "mean"
    label_shift: int = 0
    aux: bool = False
    forwards: int = 1
    optimizer: str = "sgd"
    schedule: str | None = None
    clip: str | None = None
    hooks: tuple[str, ...] = ()
    skip: tuple[int, ...] = ()
    manual: str | None = None
    manual_clip: str | None = None
    callbacks: tuple[str, ...] = ()
    stops: tuple[int, ...] = ()
    fits: tuple[str, ...] = ()
    strategy: tuple[tuple[str, Any], ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()
    foreign: tuple[str, ...] = ()
    inner: str | None = None
    writes: tuple[str, ...] = ()
    alias: str | None = None
    backward: str | None = None
    changed: str | None = None
    soft: bool = False
    negative: bool = False
    over_ranks: bool = False
    rows: str | None = None
    snippet: str | None = None
    functional: str | None = None

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
        default = type(self)()
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }


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
