"""16-mixed: one gradient scaler for all ranks, shards, windows and optimizers. The same functions run on CPU and CUDA.

Lightning turns `precision="16-mixed"` into bf16-mixed on a CPU, where torch computes in float16 all the
same: there the plugin is given. Weights are compared with a loop in float16 that knows no scale, within 16
`eps` of float32: scales are powers of two, which round nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Batch,
    assert_exact,
    full_weights,
    local,
    weight_error,
)
from tests.trainer.precisions import (
    ACCUMULATE,
    INIT_SCALE,
    WideLossModule,
    decoder,
    fit,
    loop,
    precision_options,
)
from tests.trainer.runs import CASE, STRATEGIES, loader, make_trainer

SAME = 16 * torch.finfo(torch.float32).eps
DDP = {"data_parallel": "ddp"}
UNUSED = {**DDP, "ddp_kwargs": {"find_unused_parameters": True}}
SCALER = {"growth_interval": 1, "growth_factor": 2.0, "backoff_factor": 0.5}


def _fit(
    make_module: Any,
    options: dict[str, Any],
    settings: dict[str, Any],
    scaler: dict[str, Any],
) -> tuple[dict[str, Tensor], float, Any]:
    """Runs on every rank: weights, the last scale, and what the module has noted, or the norm of the last step."""
    module = make_module(decoder())
    strategy = AutomodelStrategy(**options)
    settings = {"accumulate_grad_batches": ACCUMULATE, **settings, **precision_options("16-mixed", **scaler)}
    trainer = make_trainer(strategy, **settings)
    trainer.fit(module, loader())
    made = trainer.precision_plugin.scaler
    assert not {"unscale_", "_unscale_grads_"} & set(made.__dict__)
    norm = strategy.last_step.grad_norm
    return full_weights(module), made.get_scale(), getattr(module, "noted", norm)


class Overflow(WideLossModule):
    """One gradient element on one rank becomes infinite in the second window."""

    def on_after_backward(self) -> None:
        last = self.trainer.fit_loop.epoch_loop.batch_idx == 2 * ACCUMULATE - 1
        if last and dist.get_rank() == 1:
            grad = next(p.grad for p in self.parameters() if p.grad is not None)
            local(grad).view(-1)[0] = torch.inf


class InfiniteLoss(WideLossModule):
    """The second window's loss is infinite on one rank."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (torch.inf if batch_idx == 2 * ACCUMULATE - 1 and dist.get_rank() == 1 else 1)


FIXED = {"growth_interval": 1000}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make_module", "options"),
    [
        (Overflow, {}),
        (InfiniteLoss, {"error_if_nonfinite": True}),
        pytest.param(Overflow, STRATEGIES["undeferred"], marks=pytest.mark.sweep),
        pytest.param(InfiniteLoss, {**DDP, "error_if_nonfinite": True}, marks=pytest.mark.sweep),
    ],
)
def test_overflow_on_one_rank_skips_the_step_everywhere(
    pool2: RankPool, make_module: Any, options: dict[str, Any]
) -> None:
    """Both ranks leave the second window out, lower the scale once, and train on; nothing raises."""
    engine = options.get("data_parallel", "fsdp2")
    expected = loop("16-mixed", engine, skipped=(1,))
    for weights, scale, _ in pool2.run(_fit, make_module, options, {}, FIXED):
        assert scale == INIT_SCALE / 2
        assert weight_error(weights, expected) <= SAME
    assert weight_error(loop("16-mixed", engine), expected) > 1000 * SAME


class Fused(WideLossModule):
    """With the kind of optimizer that would unscale for itself, for which Lightning refuses to clip."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)


@pytest.mark.every_case
@pytest.mark.parametrize(("make_module", "options"), [(WideLossModule, {}), (Fused, {}), (Fused, DDP)])
def test_a_scale_that_changes_with_each_step(
    pool2: RankPool, make_module: Any, options: dict[str, Any]
) -> None:
    """It doubles three times; clipping and the reported norm see unscaled gradients."""
    norms: list[float] = []
    clip = functools.partial(_clip_and_note, norms=norms)
    expected = loop("16-mixed", options.get("data_parallel", "fsdp2"), clip=clip)
    settings = {"gradient_clip_val": 0.1}
    for weights, scale, norm in pool2.run(_fit, make_module, options, settings, SCALER):
        assert scale == INIT_SCALE * 8
        assert abs(norm - norms[-1]) <= SAME * norms[-1]
        assert weight_error(weights, expected) <= SAME
    assert max(norms) > 0.1
    assert weight_error(loop("16-mixed", "fsdp2"), expected) > 1000 * SAME


def test_the_first_window_stays_in_range(pool2: RankPool) -> None:
    """At the largest scale that the means of this data bear, no step is skipped."""
    scaler = {**FIXED, "init_scale": 2.0**18}
    expected = loop("16-mixed", "fsdp2")
    for weights, scale, _ in pool2.run(_fit, WideLossModule, {}, {}, scaler):
        assert scale == 2.0**18
        assert weight_error(weights, expected) <= SAME


def _clip_and_note(parameters: list[nn.Parameter], norms: list[float]) -> None:
    norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))


class TwoOptimizers(WideLossModule):
    """Windows of two optimizers that lie across each other's steps: clipped first, stepped later, in turn."""

    automatic_optimization = False
    fused = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.noted: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            with optimizer.toggle_model():
                self.manual_backward(self(batch))
        self.noted += [float(self.trainer.strategy.clip_gradients(o, 1e6)) for o in (first, second)]
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        head = list(self.model.head.parameters())
        others = [p for name, p in self.model.named_parameters() if not name.startswith("head.")]
        return [
            torch.optim.SGD(p, lr=LEARNING_RATE, momentum=MOMENTUM, fused=self.fused) for p in (others, head)
        ]


class ScalesByHand(WideLossModule):
    """A plain backward on a loss that the user has scaled: the step unscales it, once."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        scaler = self.trainer.precision_plugin.scaler
        optimizer.zero_grad()
        if batch_idx % 2:
            self.manual_backward(self(batch))
        else:
            scaler.scale(self(batch)).backward()
        seen = self.largest()
        optimizer.step()
        self.noted = self.largest()
        assert self.noted == pytest.approx(seen / (1 if batch_idx % 2 else INIT_SCALE), rel=1e-3)

    def largest(self) -> float:
        parts = [local(parameter.grad) for parameter in self.parameters()]
        return max(float(part.abs().max()) for part in parts if part.numel())


class AddsNotedGradients(WideLossModule):
    """Gradient surgery, as PCGrad's: notes final gradients, zeroes them, and writes back what it makes of them."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        noted = []
        for _ in range(2):
            self.manual_backward(self(batch), num_label_tokens=int((batch["labels"] != -100).sum()))
            noted.append([parameter.grad for parameter in self.parameters()])
            optimizer.zero_grad()
        for parameter, *gradients in zip(self.parameters(), *noted, strict=True):
            parameter.grad = gradients[0] + gradients[1]
        before = [local(parameter.grad).clone() for parameter in self.parameters()]
        optimizer.step()
        after = [local(parameter.grad) for parameter in self.parameters()]
        self.noted = max(float(grad.abs().max()) for grad in after if grad.numel())
        assert all(map(torch.equal, before, after))
        assert self.trainer.strategy.last_step.num_micro_batches == 2 * self.trainer.world_size
        optimizer.zero_grad()


@pytest.mark.every_case
@pytest.mark.parametrize("kind", [ScalesByHand, AddsNotedGradients])
def test_what_a_step_unscales(pool2: RankPool, kind: Any) -> None:
    """Final gradients are not divided again, also if they were zeroed and written back; those past the strategy are."""
    for _, _, after in pool2.run(_fit, kind, {}, {"accumulate_grad_batches": 1}, FIXED):
        assert after > 0


class UnscalesByHand(TwoOptimizers):
    """Unscales both before either steps, which changes the scale."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            with optimizer.toggle_model():
                self.manual_backward(self(batch))
        for optimizer in (first, second):
            self.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


class TwoFused(TwoOptimizers):
    """The kind of optimizers that would unscale for themselves."""

    fused = True


@pytest.mark.parametrize("options", [{}, UNUSED], ids=["fsdp2", "ddp"])
def test_two_optimizers(pool2: RankPool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A window keeps its scale though the other optimizer's step has changed it, and is unscaled once.

    Also by fused optimizers, that the scaler would let unscale once more, and where users have unscaled before.
    """
    monkeypatch.setattr("tests.trainer.precisions.ACCUMULATE", 1)
    norms: list[float] = []
    engine = options.get("data_parallel", "fsdp2")
    later = tuple(range(3, CASE.num_batches))
    expected = loop("16-mixed", engine, clip=lambda p: norms.extend(_norms(p)), skipped=later)
    settings = {"accumulate_grad_batches": 1, "limit_train_batches": 3}
    scaler = {**SCALER, "init_scale": 2.0**8}
    for weights, scale, seen in pool2.run(_fit, TwoOptimizers, options, settings, scaler):
        assert scale == 2.0 ** (8 + 2 * 3)
        assert seen == pytest.approx(norms[: 2 * 3], rel=SAME)
        assert weight_error(weights, expected) <= SAME
    for kind in (TwoFused, UnscalesByHand):
        for weights, scale, _ in pool2.run(_fit, kind, options, settings, scaler):
            assert scale == 2.0 ** (8 + 2 * 3)
            assert weight_error(weights, expected) <= SAME


def _norms(parameters: list[nn.Parameter]) -> list[float]:
    """Of all but the head's weight and bias, which come last, and of those."""
    halves = (parameters[:-2], parameters[-2:])
    return [float(torch.cat([p.grad.flatten() for p in half]).norm()) for half in halves]


class ManyTokens(WideLossModule):
    """Losses so large that a sum over tokens leaves float16: the gradient of each logit is up to 20000."""

    factor = 20000

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        tokens = (batch["labels"] != -100).sum()
        return {"loss": self.factor * self(batch), "num_label_tokens": tokens}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trainable, lr=LEARNING_RATE / self.factor, momentum=MOMENTUM)


class ManyTokensBehind(ManyTokens):
    """So large that the gradient of a single logit leaves float16, unless it is that of a mean."""

    factor = 100000


class SmallCounts(WideLossModule):
    """Counts as the sums of class weights may be: a sum of losses is far below a mean."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        count = 1e-6 * (batch["labels"] != -100).sum(dtype=torch.float32)
        return {"loss": self(batch), "num_label_tokens": count}


class FrozenTail(nn.Module):
    """A decoder in front of a frozen layer in float16."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.decoder = decoder()
        self.tail = nn.ModuleList([nn.Linear(11, 11)]).requires_grad_(False)
        with torch.no_grad():
            self.tail[0].weight.copy_(torch.linspace(-1, 1, 121).view(11, 11))
        self.tail.to(dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tail[0](self.decoder(input_ids).to(self.tail[0].weight.dtype)).float()


FLOAT16_REDUCTION = MixedPrecisionPolicy(reduce_dtype=torch.float16)


@pytest.mark.parametrize(
    ("options", "precision", "make_module", "make_model", "tolerance"),
    [
        ({}, "16-true", ManyTokens, decoder, 2),
        ({}, "16-true", SmallCounts, decoder, 2),
        (DDP, "16-true", SmallCounts, decoder, 2),
        pytest.param(DDP, "16-true", ManyTokens, decoder, 2, marks=pytest.mark.sweep),
        # Under 32-true, where nothing that trains is in float16, it is merely passed.
        ({"mp_policy": FLOAT16_REDUCTION}, "32-true", ManyTokens, decoder, 8),
        pytest.param({}, "32-true", ManyTokensBehind, FrozenTail, 8, marks=pytest.mark.sweep),
        pytest.param(DDP, "32-true", ManyTokensBehind, FrozenTail, 8, marks=pytest.mark.sweep),
    ],
    ids=["fsdp2", "small, fsdp2", "small, ddp", "ddp", "reduced", "frozen, fsdp2", "frozen, ddp"],
)
@pytest.mark.every_case
def test_sums_of_tokens_stay_in_range(
    pool2: RankPool,
    options: dict[str, Any],
    precision: str,
    make_module: type[WideLossModule],
    make_model: Callable[[], nn.Module],
    tolerance: int,
) -> None:
    """Without a scaler, a power of two keeps the gradients of sums as large as those of means, from the first on.

    Also where counts are small.
    """
    exact = loop("64-true", "fsdp2", decoder() if make_model is decoder else FrozenTail(torch.float64))
    found = pool2.run(fit, precision, options, make_module, make_model)
    assert_exact((weights for weights, *_ in found), exact, tolerance * torch.finfo(torch.float16).eps)
