"""All-gathers that start ahead: the weights of one process, in another order of events, and nothing stale."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel import AutomodelStrategy
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.patching import PatchStack
from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, fit_module
from tests.trainer.exactness import Batch, Outcome, TinyDecoder, assert_exact, weight_error
from tests.trainer.plain import ModelModule, fill, filled_decoder, plain_weights, prefixed, token_sums
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, loader, make_trainer

LAYOUTS = {name: STRATEGIES[name] for name in ("resharded", "kept")}


class Events(Callback):
    """The all-gathers, forwards and backwards of the first micro-batch, by name, as they start on this rank."""

    def __init__(self) -> None:
        self.events = []

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._patches = PatchStack()
        self._trainer = trainer
        for name, unit in module.named_modules():
            if isinstance(unit, FSDPModule):
                label = name.rpartition(".")[2] or "root"
                fsdp2.note_collectives(unit, partial(self._note_gather, label), self._patches)
                if name:
                    unit.register_forward_hook(lambda *_, label=label: self._note(f"after {label}"))

    def _note_gather(self, label: str, *reduced: int) -> None:
        if not reduced:
            self._note(f"gather {label}")

    def _note(self, event: str) -> None:
        if self._trainer.fit_loop.epoch_loop.batch_idx == 0:
            self.events.append(event)

    def on_before_backward(self, *args: Any) -> None:
        self._note("backward")

    def on_train_end(self, *args: Any) -> None:
        self._patches.restore()


def fit(options: dict[str, Any]) -> tuple[Outcome, list[str], dict[str, Any]]:
    """Weights, events of the first micro-batch, and what `describe` says."""
    module = ModelModule(filled_decoder())
    events = Events()
    weights, described = fit_module(module, options, callbacks=[events])
    assert not any(fsdp2.Unit(unit).is_pending for unit in fsdp2.fsdp_units(module))
    return weights, events.events, described


FORWARD = {
    1: ["gather root", "gather 0", "gather 1", "after 0", "gather 2", "after 1", "after 2"],
    2: ["gather root", "gather 0", "gather 1", "gather 2", "after 0", "after 1", "after 2"],
}


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("options", by_default(LAYOUTS, "resharded"))
def test_weights_are_exact_and_gathers_start_ahead(
    pool2: RankPool, options: dict[str, Any], ahead: int
) -> None:
    """The unit behind (or two) is being gathered while one computes, and none more often than without."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    first, second = pool2.run(fit, {**options, "prefetch": ahead})
    assert first[1] == second[1]
    weights, events, described = first
    assert weight_error(weights, expected) <= TOLERANCE
    forward = events[: events.index("backward")]
    backward = events[events.index("backward") + 1 :]
    assert forward == FORWARD[ahead]
    is_kept = options.get("reshard_during_accumulation") is False
    assert [e for e in backward if e.startswith("gather")] == (
        [] if is_kept else ["gather 2", "gather 1", "gather 0"]
    )
    assert described["prefetch"] == ahead
    assert "prefetch_reason" not in described


def _described_in_two_runs() -> list[dict[str, Any]]:
    """What a validation, and a fit after it, have decided."""
    module = ModelModule(filled_decoder())
    strategy = AutomodelStrategy(**LAYOUTS["resharded"])
    trainer = make_trainer(strategy, limit_val_batches=1, limit_train_batches=1)
    described = []
    for run in (trainer.validate, trainer.fit):
        run(module, loader())
        described.append(strategy.describe())
    return described


def test_auto(pool2: RankPool) -> None:
    """On a CPU one unit, and that is said with the reason; a run that finds the module sharded decides alike."""
    for _, events, _ in pool2.run(fit, LAYOUTS["resharded"]):
        assert events[: len(FORWARD[1])] == FORWARD[1]
    for first, second in pool2.run(_described_in_two_runs):
        for key in ("prefetch", "roots", "units", "replicated"):
            assert second[key] == first[key], key
        assert second["prefetch"] == 1
        assert second["prefetch_reason"].startswith("auto: 1 on a CPU")
        assert second["units"] == [f"model.blocks.{i} (Block)" for i in range(3)]


class Irregular(TinyDecoder):
    """Frozen first block; the second one twice, and behind the third, which every other micro-batch leaves out."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.blocks[0].requires_grad_(False)
        self.step = 0
        fill(self)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        first, second, third = self.blocks
        for block in (first, second, *([third] if self.step % 2 else []), second):
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@torch.no_grad()
def _scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.25)


class ManualIrregular(ModelModule):
    """Before each step it looks at the model without gradients and without its third block, and then scales it."""

    def __init__(self) -> None:
        super().__init__(Irregular())
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.model.step = 0
        with torch.no_grad():
            self(batch)
        _scale(self)
        self.model.step = 1
        self.manual_backward(self(batch), num_label_tokens=(batch["labels"] != -100).sum())
        optimizer.step()
        optimizer.zero_grad()


def _fit_by_hand() -> Outcome:
    return fit_module(ManualIrregular(), {"prefetch": 2}, accumulate_grad_batches=1).weights


def _sums_by_hand(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    """What the plain loop adds up; each step begins with the first rank."""
    if model.rank == 0:
        _scale(model)
    model.step = 1
    return token_sums(model, batch)


def test_units_that_do_not_run_and_weights_that_change(pool2: RankPool) -> None:
    """A gather that started ahead for a unit that does not run is dropped: it has the weights of before.

    Manual optimization may write them between two forwards.
    """
    expected = prefixed(plain_weights(Irregular(), 1, sums=_sums_by_hand))
    assert_exact(pool2.run(_fit_by_hand), expected)
