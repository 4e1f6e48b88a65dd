"""When parameters are gathered, and when gradients are reduced: of a large head, and of units that are gathered ahead.

A head is gathered and kept with its root, and its gradient is reduced by itself, while others run. Below a size it
stays in the root's group; here every head is large enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel import AutomodelStrategy
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding import units
from lightning_automodel.sharding.units import plan_sharding
from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, fit_module
from tests.trainer.exactness import (
    VOCABULARY,
    WIDTH,
    Outcome,
    TinyDecoder,
    assert_exact,
    full_weights,
    weight_error,
)
from tests.trainer.plain import ModelModule, filled_decoder, plain_weights, prefixed
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, loader, make_trainer
from tests.trainer.test_layouts import CASE2, CASE4, MODES, REPLICAS

EVERY_HEAD = mock.patch.object(units, "HEAD_ELEMENTS", 1)
"""Heads of any size are reduced by themselves."""


class ByItsWeight(TinyDecoder):
    """Computes logits from the head's weight, as fused losses do, and never calls the head."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.head.weight, self.head.bias)


class InBothWays(TinyDecoder):
    """Uses the head's weight before the blocks as well, so that gradients reach it after the head's own backward."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids) + F.embedding(input_ids, self.head.weight)
        hidden = hidden + F.linear(hidden, self.head.weight[:WIDTH])
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def frozen_head(seed: int) -> TinyDecoder:
    """Trains all but its head."""
    model = TinyDecoder(seed)
    model.head.requires_grad_(False)
    return model


Kind = Callable[[int], TinyDecoder]
MODELS: list[Kind] = [TinyDecoder, ByItsWeight, InBothWays, frozen_head]


def _make(kind: Kind) -> nn.Module:
    return kind(CASE2.seed).double()


def _fit(kind: Kind, options: dict[str, Any], num_ranks: int) -> dict[str, Tensor]:
    module = ModelModule(_make(kind))
    with EVERY_HEAD:
        found = fit_module(module, options, replace(CASE4, num_ranks=num_ranks))
    assert found.described["head"] == ["model.head (Linear)"]
    assert len(found.described["units"]) == len(module.model.blocks)
    return full_weights(module.model)


@pytest.mark.parametrize("mode", ["True-resharded", "True-kept", "False-resharded"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.each_value
def test_weights_equal_one_process(pool2: RankPool, kind: Kind, mode: str) -> None:
    """Whether a step calls the head, takes its weight, or both."""
    expected = plain_weights(_make(kind), ACCUMULATE, CASE2)
    assert_exact(pool2.run(_fit, kind, MODES[mode], 2), expected)


@pytest.mark.parametrize("kind", [InBothWays, pytest.param(frozen_head, marks=pytest.mark.sweep)])
def test_replicas_of_shards(pool4: RankPool, kind: Kind) -> None:
    """Two replicas of two shards, of the head whose gradient comes twice, and of one that gets none."""
    expected = plain_weights(_make(kind), ACCUMULATE, CASE4)
    options = REPLICAS | MODES["all_reduce-resharded"]
    assert_exact(pool4.run(_fit, kind, options, 4), expected)


def _fit_twice() -> dict[str, Tensor]:
    module = ModelModule(_make(TinyDecoder))
    with EVERY_HEAD:
        for options in ({}, {"activation_checkpointing": True}):
            fit_module(module, options, CASE2)
    return full_weights(module.model)


def test_a_second_fit(pool2: RankPool) -> None:
    """The head is no block: it is not recomputed, neither in the second fit, which finds it sharded."""
    model = _make(TinyDecoder)
    for _ in range(2):
        expected = plain_weights(model, ACCUMULATE, CASE2)
    assert_exact(pool2.run(_fit_twice), expected)


class Model(nn.Module):
    """A decoder as far as its parts go."""

    def __init__(self, tied: bool = False, heads: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 100) for _ in range(2))
        self.heads = nn.ModuleDict({f"head{index}": nn.Linear(WIDTH, VOCABULARY) for index in range(heads)})
        if tied:
            self.heads["head0"].weight = self.embedding.weight

    def forward(self) -> None: ...


@pytest.mark.parametrize(
    ("model", "options", "name"),
    [
        (Model(), (None, True), "heads.head0"),
        (Model(tied=True), (None, True), None),
        (Model(heads=2), (None, True), None),
        (Model(), (None, False), None),
        (Model(), ({nn.Linear}, True), None),
        (Model(heads=0), (None, True), None),
    ],
    ids=["one", "tied", "several", "manual optimization", "policy", "none"],
)
def test_which_module_is_the_head(model: nn.Module, options: tuple[Any, bool], name: str | None) -> None:
    """One linear layer outside of all units, that shares nothing, where the strategy chooses units."""
    with EVERY_HEAD:
        head = plan_sharding(model, *options).head
    assert head is (None if name is None else model.get_submodule(name))
    assert plan_sharding(model, *options).head is None  # too small


def test_a_large_one_on_the_meta_device() -> None:
    """From 16.8 million elements on."""
    for features, is_head in ((2**13, True), (2**13 - 2, False)):
        with torch.device("meta"):
            model = Model()
            model.heads["head0"] = nn.Linear(2**11, features, bias=False)
        assert (plan_sharding(model, None, True).head is not None) == is_head
    assert not dist.is_initialized()


# --- All-gathers that start ahead -------------------------------------------------------------------------------------


LAYOUTS = {name: STRATEGIES[name] for name in ("resharded", "kept")}


class Events(Callback):
    """All-gathers, reductions, forwards and backwards of the first micro-batch, by name, as they start on this rank."""

    def __init__(self, batch: int = 0) -> None:
        self._batch = batch
        self.events = []

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._patches = PatchStack()
        self._trainer = trainer
        for name, unit in module.named_modules():
            if isinstance(unit, FSDPModule):
                label = name.rpartition(".")[2] or "root"
                note = partial(self._note_collective, label)
                fsdp2.watch_unit(unit, note, lambda group: None, Counter(), plain_access, self._patches)
                if name:
                    unit.register_forward_hook(lambda *_, label=label: self._note(f"after {label}"))

    def _note_collective(self, label: str, *reduced: int) -> None:
        self._note(f"reduce {label}, {len(reduced)}" if reduced else f"gather {label}")

    def _note(self, event: str) -> None:
        if self._trainer.fit_loop.epoch_loop.batch_idx == self._batch:
            self.events.append(event)

    def on_before_backward(self, *args: Any) -> None:
        self._note("backward")

    def on_train_end(self, *args: Any) -> None:
        self._patches.restore()


def fit(options: dict[str, Any]) -> tuple[Outcome, list[str], dict[str, Any]]:
    """Weights, events of the second window's first micro-batch, and what `describe` says."""
    module = ModelModule(filled_decoder())
    events = Events(ACCUMULATE)
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


def _reductions() -> list[str]:
    events = Events()
    with EVERY_HEAD:
        fit_module(ModelModule(filled_decoder()), {}, callbacks=[events], accumulate_grad_batches=1)
    return [event for event in events.events if event.startswith("reduce")]


def test_the_gradient_of_the_head_is_reduced_first(pool2: RankPool) -> None:
    """And only the embedding's, and what else the root has, after the whole backward. With numbers of parameters."""
    blocks = [f"reduce {index}, 4" for index in (2, 1, 0)]
    assert pool2.run(_reductions) == [["reduce head, 2", *blocks, "reduce root, 3"]] * 2
