"""Manual optimization: counts by optimizer, deferral by `toggle_model(sync_grad=False)`, clipping before the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Outcome,
    TinyDecoder,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.runs import (
    CASE,
    STRATEGIES,
    TOLERANCE,
    LabelledModule,
    loader,
    make_trainer,
    train_plainly,
)

CLIP = 0.1
ENGINES = {name: STRATEGIES[name] for name in ("resharded", "undeferred", "ddp")}


class ManualModule(LabelledModule):
    """Accumulates by itself over `accumulate` micro-batches."""

    def __init__(self, accumulate: int = 1, defer: bool = False, clip: str = "none", tell: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate, self.defer, self.clip, self.tell = accumulate, defer, clip, tell

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = (batch_idx + 1) % self.accumulate == 0
        kwargs = {"num_label_tokens": int((batch["labels"] != -100).sum())} if self.tell else {}
        with optimizer.toggle_model(sync_grad=last or not self.defer):
            self.manual_backward(self(batch), **kwargs)
        if not last:
            return
        if self.clip == "strategy":
            self.norm = self.trainer.strategy.clip_gradients(optimizer, CLIP)
        elif self.clip == "module":
            self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


def _fit(options: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
    module = ManualModule(**kwargs)
    strategy = AutomodelStrategy(**options)
    make_trainer(strategy).fit(module, loader())
    if kwargs.get("clip") == "strategy":
        assert torch.equal(module.norm, strategy.last_step.grad_norm)
    return full_weights(module.model)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("clip", ["none", "strategy", "module"])
@pytest.mark.parametrize(("accumulate", "defer"), [(1, False), (2, False), (2, True), (4, True)])
def test_weights(pool2: RankPool, accumulate: int, defer: bool, clip: str, options: dict[str, Any]) -> None:
    """Weights equal those of the plain loop over the same windows."""
    windows = [list(range(start, start + accumulate)) for start in range(0, 8, accumulate)]
    expected = Outcome(train_plainly(windows, clip_norm=None if clip == "none" else CLIP), None)
    for weights in pool2.run(_fit, options, accumulate=accumulate, defer=defer, clip=clip):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_count_from_the_batch(pool2: RankPool, options: dict[str, Any]) -> None:
    """Without `num_label_tokens`, the labels of the batch that the step works on are counted."""
    expected = Outcome(train_plainly([[index] for index in range(8)]), None)
    for weights in pool2.run(_fit, options, tell=False):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


class Adversaries(nn.Module):
    """Two decoders whose losses meet: each optimizer trains one of them through both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = TinyDecoder(1).double(), TinyDecoder(2).double()

    def loss(self, batch: Any, sign: float, reduction: str = "mean") -> Tensor:
        logits = self.left(batch["input_ids"]) + sign * self.right(batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


class AdversarialModule(LightningModule):
    """Two optimizers, both with windows of two micro-batches; `how` says how a count finds its optimizer."""

    def __init__(self, how: str, defer: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Adversaries()
        self.left, self.right = self.net.left, self.net.right
        self.how, self.defer = how, defer
        del self.net

    def loss(self, batch: Any, sign: float) -> Tensor:
        logits = self.left(batch["input_ids"]) + sign * self.right(batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        last = batch_idx % 2 == 1
        count = (batch["labels"] != -100).sum()
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            if self.how == "toggled":
                with optimizer.toggle_model(sync_grad=last or not self.defer):
                    self.manual_backward(self.loss(batch, sign), num_label_tokens=count)
            elif self.how == "named":
                self.toggle_optimizer(optimizer)
                self.manual_backward(self.loss(batch, sign), num_label_tokens=count, optimizer=optimizer)
                self.untoggle_optimizer(optimizer)
            else:
                self.manual_backward(self.loss(batch, sign), num_label_tokens=count)
            if last:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
            for model in (self.left, self.right)
        ]


def _plain_adversaries() -> dict[str, Tensor]:
    net = Adversaries()
    optimizers = [torch.optim.SGD(m.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM) for m in (net.left, net.right)]
    by_rank = micro_batches(CASE)
    for start in range(0, 8, 2):
        tokens = sum(int((b["labels"] != -100).sum()) for batches in by_rank for b in batches[start : start + 2])
        gradients: list[dict[nn.Parameter, Tensor]] = [{}, {}]
        for index in (start, start + 1):
            for (optimizer, sign), held in zip(zip(optimizers, (1.0, -1.0), strict=True), gradients, strict=True):
                own = [p for group in optimizer.param_groups for p in group["params"]]
                loss = torch.stack([net.loss(batches[index], sign, "sum") for batches in by_rank]).sum() / tokens
                for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                    held[parameter] = held.get(parameter, 0) + gradient
                if index == start + 1:
                    for parameter in own:
                        parameter.grad = held[parameter]
                    optimizer.step()
    return full_weights(net)


def _fit_adversaries(how: str, defer: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    module = AdversarialModule(how, defer)
    trainer = make_trainer(AutomodelStrategy(**options))
    trainer.fit(module, DataLoader(micro_batches(CASE)[dist.get_rank()], batch_size=None))
    return full_weights(module)


@pytest.mark.parametrize("options", [STRATEGIES["resharded"], {}], ids=["resharded", "auto"])
@pytest.mark.parametrize(("how", "defer"), [("toggled", True), ("toggled", False), ("named", False)])
def test_several_optimizers(pool2: RankPool, how: str, defer: bool, options: dict[str, Any]) -> None:
    """Each optimizer's gradients are divided by the tokens of its own window, also where the windows interleave."""
    expected = Outcome(_plain_adversaries(), None)
    for weights in pool2.run(_fit_adversaries, how, defer, options):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


def _error_of_untold_optimizer() -> str:
    with pytest.raises(ValueError, match="cannot tell which") as raised:
        _fit_adversaries("untold", False, {})
    return str(raised.value)


def test_untold_optimizer_raises(pool2: RankPool) -> None:
    """With several optimizers, a count that belongs to none of them is refused on every rank."""
    for message in pool2.run(_error_of_untold_optimizer):
        assert "which of the 2 optimizers" in message
        assert "toggle_model()" in message


class NeverZeroes(ManualModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self(batch), num_label_tokens=3)
        self.optimizers().step()


def _error_of_never_zeroing() -> str:
    with pytest.raises(RuntimeError, match="not zeroed") as raised:
        make_trainer(AutomodelStrategy()).fit(NeverZeroes(), loader())
    return str(raised.value)


def test_gradients_left_by_a_step_raise(pool2: RankPool) -> None:
    """Token sums are never added to the token means that a step has left."""
    for message in pool2.run(_error_of_never_zeroing):
        assert "Call optimizer.zero_grad() after each optimizer.step()" in message


class UsesRightFirst(LightningModule):
    """Two children, hence two FSDP roots; the second takes part in the first micro-batch of each window only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.left, self.right = TinyDecoder(1).double(), TinyDecoder(2).double()

    def loss(self, batch: Any, with_right: bool, reduction: str = "mean") -> Tensor:
        logits = self.left(batch["input_ids"])
        if with_right:
            logits = logits + self.right(batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch, not last), num_label_tokens=(batch["labels"] != -100).sum())
        if last:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def _plain_right_first() -> dict[str, Tensor]:
    module = UsesRightFirst()
    optimizer = module.configure_optimizers()
    by_rank = micro_batches(CASE)
    for start in range(0, 8, 2):
        tokens = sum(int((b["labels"] != -100).sum()) for batches in by_rank for b in batches[start : start + 2])
        optimizer.zero_grad()
        for index in (start, start + 1):
            for batches in by_rank:
                (module.loss(batches[index], index == start, "sum") / tokens).backward()
        optimizer.step()
    return full_weights(module)


def _fit_right_first() -> dict[str, Tensor]:
    module = UsesRightFirst()
    make_trainer(AutomodelStrategy()).fit(module, loader())
    return full_weights(module)


def test_root_without_part_in_the_last_micro_batch(pool2: RankPool) -> None:
    """What a root has deferred is reduced at the end of the window, although the last backward does not reach it."""
    expected = Outcome(_plain_right_first(), None)
    for weights in pool2.run(_fit_right_first):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
