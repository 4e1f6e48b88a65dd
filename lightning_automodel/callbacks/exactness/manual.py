"""A training step of manual optimization, up to one of its backwards, without what it does to weights and gradients."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_automodel.internals.patching import PatchStack


class _ReachedError(BaseException):
    """Ends a step behind its backward; no ``except Exception`` of it may go on."""


def optimizers_of(module: pl.LightningModule) -> list[Any]:
    """Lightning's optimizers and those that they wrap: a step may call either."""
    wrapped = module.optimizers()
    if not isinstance(wrapped, list):
        wrapped = [wrapped]
    return [*wrapped, *module.trainer.optimizers]


@contextmanager
def up_to_backward(
    module: pl.LightningModule,
    number: int,
    backward: Callable[[Tensor, Mapping[str, Any]], None],
    stepped: Callable[[], None],
) -> Iterator[None]:
    """Context of a ``training_step``, which ends at its ``number``-th ``manual_backward``, counted from 1.

    In its place ``backward`` is called with the loss and the keywords. Until then other backwards,
    clipping, schedulers and ``zero_grad`` do nothing, and ``stepped`` takes the place of optimizers' steps.
    Parameters stay toggled.
    """
    numbers = itertools.count(1)

    def reach(loss: Tensor, *_: Any, **kwargs: Any) -> None:
        if next(numbers) == number:
            backward(loss, kwargs)
            raise _ReachedError

    def step(closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> None:
        if closure is not None:
            closure()
        stepped()

    def nothing(*_: Any, **__: Any) -> None:
        pass

    trainer = module.trainer
    with PatchStack() as patches, suppress(_ReachedError):
        patches.set(trainer.strategy, "backward", reach)
        for optimizer in optimizers_of(module):
            patches.set(optimizer, "step", step)
            patches.set(optimizer, "zero_grad", nothing)
        for config in trainer.lr_scheduler_configs:
            patches.set(config.scheduler, "step", nothing)
        patches.set(module, "zero_grad", nothing)
        for owner in (module, trainer.strategy):
            patches.set(owner, "clip_gradients", nothing)
        patches.set(trainer.strategy, "block_backward_sync", nullcontext)
        yield
