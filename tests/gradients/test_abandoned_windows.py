"""A window that is abandoned, in whatever way, leaves nothing behind: neither counts nor gradients.

Each way is followed by a new `fit` of the same module, which must end with the weights of that fit alone;
where the same fit goes on after it, its later windows must be right as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.distributed.failures import RankFailedError
from tests.rank_pool import RankPool
from tests.trainer.exactness import assert_exact, full_weights, micro_batches
from tests.trainer.runs import (
    CASE,
    STRATEGIES,
    LabelledModule,
    fit_weights,
    loader,
    make_trainer,
    train_plainly,
)

ALL_WINDOWS = [[0, 1, 2], [3, 4, 5], [6, 7]]


class InterruptionError(Exception):
    """Raised on purpose."""


class Raises(LabelledModule):
    """Once, in the first window: in its second forward, after its second backward, or before its step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def interrupt(self, where: str, batch_idx: int) -> None:
        if (self.where, self.trainer.fit_loop.epoch_loop.batch_idx) == (where, batch_idx):
            self.where = ""
            raise InterruptionError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.interrupt("in forward", 1)
        return loss

    def on_after_backward(self) -> None:
        self.interrupt("after backward", 1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.interrupt("before step", 2)


class LosesItsStep(LabelledModule):
    """Runs the closure without a step, or neither."""

    steps_on = False
    closes = True

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if self.steps_on:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        elif self.closes:
            optimizer_closure()


class NeverCallsClosure(LosesItsStep):
    closes = False


class SkipsRestOfEpoch(LabelledModule):
    skipped = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if batch_idx == 1 and not self.skipped:
            self.skipped = True
            return -1
        return None


class TimeIsUp(Callback):
    """What `max_time` does when it runs out, at a known moment."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            trainer.should_stop = True


WAYS: dict[str, Callable[[], LabelledModule]] = {
    "raises in forward": lambda: Raises("in forward"),
    "raises after backward": lambda: Raises("after backward"),
    "raises before step": lambda: Raises("before step"),
    "time is up": LabelledModule,
    "skips the rest of the epoch": SkipsRestOfEpoch,
    "closure never called": NeverCallsClosure,
    "closure without step": LosesItsStep,
}


def _fit_after_abandoning(way: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Run a fit of three micro-batches a window that ends, or loses its window, before the first step; then another."""
    module = WAYS[way]()
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=3,
        callbacks=[TimeIsUp()] if way == "time is up" else [],
        limit_train_batches=3 if way.startswith("closure") else None,
    )
    if way.startswith("raises") or way == "closure never called":
        # Lightning itself refuses an `optimizer_step` that never runs the closure. A rank that comes late hears of
        # the other's failure first.
        with pytest.raises((InterruptionError, MisconfigurationException, RankFailedError)):
            trainer.fit(module, loader())
    else:
        trainer.fit(module, loader())
    module.steps_on = True
    module.where = ""  # the rank that has heard of the other's failure first has not raised yet
    return fit_weights(lambda: module, options, accumulate_grad_batches=3)


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_new_fit_is_unaffected(pool2: RankPool, way: str, options: dict[str, Any]) -> None:
    """Weights after an abandoned fit and a new one equal those of the new one alone."""
    expected = train_plainly(ALL_WINDOWS)
    assert_exact(pool2.run(_fit_after_abandoning, way, options), expected)


def _fit_with_missing_batches(missing: set[int], options: dict[str, Any]) -> dict[str, Tensor]:
    module = LabelledModule()
    own = enumerate(micro_batches(CASE)[dist.get_rank()])
    batches = DataLoader([None if index in missing else batch for index, batch in own], batch_size=None)
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=3).fit(module, batches)
    return full_weights(module.model)


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize(
    ("missing", "windows"),
    [
        pytest.param({2}, [[3, 4, 5], [6, 7]], id="last-of-a-window-abandons-it"),
        pytest.param({3}, [[0, 1, 2], [4, 5], [6, 7]], id="first-of-a-window-shortens-it"),
        pytest.param({1}, [[0, 2], [3, 4, 5], [6, 7]], id="middle-of-a-window-shortens-it"),
        pytest.param({5, 6}, [[0, 1, 2], [3, 4, 7]], id="window-goes-on-where-lightning-does-not-zero"),
    ],
)
def test_none_batches(
    pool2: RankPool, missing: set[int], windows: list[list[int]], options: dict[str, Any]
) -> None:
    """A `None` batch takes part in nothing; where it hides a step, the window is lost and the next one is clean."""
    expected = train_plainly(windows)
    assert_exact(pool2.run(_fit_with_missing_batches, missing, options), expected)


class StepsEveryOther(LabelledModule):
    """Accumulates by itself: each closure synchronises, so its window ends; their means add, as on one process."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_windows_follow_the_users_steps(pool2: RankPool, options: dict[str, Any]) -> None:
    """Windows add up until the user zeroes, whoever steps when."""
    expected = train_plainly([[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]])
    assert_exact(pool2.run(fit_weights, StepsEveryOther, options), expected)
