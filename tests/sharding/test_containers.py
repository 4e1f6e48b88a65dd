"""Repeated Sequentials are units where the model calls them; where it calls only what is in them, it is told so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import VOCABULARY, WIDTH, Block, Outcome, full_weights, weight_error
from tests.trainer.plain import ModelModule, fill, plain_weights, prefixed
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, loader, make_trainer


def _layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)), nn.Tanh()
    )


class Stacked(nn.Module):
    """Embedding, three Sequentials in a list, and a head; subclasses say how the Sequentials are used."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.stack = self.make_stack()
        fill(self)

    def make_stack(self) -> nn.Module:
        return nn.ModuleList(_layers() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layers in self.stack:
            hidden = torch.tanh(hidden + self.use(layers, hidden))
        return self.head(hidden)

    def use(self, layers: Any, hidden: Tensor) -> Tensor:
        return layers(hidden)


class Iterated(Stacked):
    """As scvi-tools: a Sequential of Sequentials, none of which is called."""

    def make_stack(self) -> nn.Module:
        return nn.Sequential(OrderedDict((f"layer {i}", _layers()) for i in range(3)))

    def use(self, layers: Any, hidden: Tensor) -> Tensor:
        for layer in layers:
            hidden = layer(hidden)
        return hidden


class Experts(Stacked):
    """Each batch chooses one, so that ranks choose differently."""

    def make_stack(self) -> nn.Module:
        return nn.ModuleDict({"a": _layers(), "b": Stack(), "c": _layers()})

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        return self.head(hidden + self.stack["abc"[int(input_ids.sum()) % 3]](hidden))


class Stack(nn.Module):
    """A class around a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)


class Opened(Iterated):
    """The modules of blocks are called, and the blocks are not."""

    def make_stack(self) -> nn.Module:
        return nn.ModuleList(Stack() for _ in range(2))

    def use(self, layers: Any, hidden: Tensor) -> Tensor:
        return layers.layers(hidden)


MODELS: list[type[Stacked]] = [Stacked, Experts]
OPTIONS: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "ddp": {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}},
    "recomputed": {"activation_checkpointing": True, "reshard_during_accumulation": True},
    "selective": {"activation_checkpointing": "selective"},
    "gathered": {"reshard_after_forward": False, "reshard_during_accumulation": True},
    "offloaded": {"cpu_offload": True, "prefetch": 2},
}


def fit(
    make_model: Callable[[], nn.Module], options: dict[str, Any], accumulate: int
) -> tuple[Outcome, Any]:
    """Weights, and the units."""
    module = ModelModule(make_model())
    strategy = AutomodelStrategy(**options)
    make_trainer(strategy, accumulate_grad_batches=accumulate).fit(module, loader())
    return Outcome(full_weights(module)), strategy.describe().get("units")


@pytest.mark.parametrize("accumulate", [2, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("options", by_default(OPTIONS, "recomputed"))
@pytest.mark.parametrize("make_model", MODELS)
def test_containers(
    pool2: RankPool, make_model: type[Stacked], options: dict[str, Any], accumulate: int
) -> None:
    """Exact; a Sequential in a list is one unit, those in a dictionary are none."""
    expected = prefixed(plain_weights(make_model(), accumulate))
    if make_model is Experts and "activation_checkpointing" in options:
        options = STRATEGIES["resharded"]  # there are no units to recompute
    for outcome, units in pool2.run(fit, make_model, options, accumulate):
        assert weight_error(outcome, expected) <= TOLERANCE
        if "data_parallel" not in options:
            keys = "" if make_model is Experts else "012"
            assert units == [f"model.stack.{key} (Sequential)" for key in keys]


def _message(make_model: type[Stacked]) -> str:
    with pytest.raises(RuntimeError) as raised:
        fit(make_model, {}, 1)
    return str(raised.value)


@pytest.mark.every_case
@pytest.mark.parametrize("make_model", [Opened, Iterated])
def test_a_unit_that_is_not_called(pool2: RankPool, make_model: type[Stacked]) -> None:
    """Calling it, or giving the classes that are called, is what the message says."""
    for message in pool2.run(_message, make_model):
        assert "got a gradient that it does not reduce" in message
        assert "call the unit itself" in message
        assert "pass an auto_wrap_policy with the classes of what is called" in message


def _evaluate(options: dict[str, Any]) -> float:
    module = ModelModule(Opened())
    module.test_step = lambda batch, batch_idx: module.log("loss", module(batch).nan_to_num(), batch_size=1)
    (results,) = make_trainer(AutomodelStrategy(**options)).test(module, loader(), verbose=False)
    return results["loss"]


def test_a_unit_that_is_not_called_in_evaluation(pool2: RankPool) -> None:
    """Shards compute as whole tensors."""
    replicated = pool2.run(_evaluate, {"data_parallel": "ddp"})
    assert min(replicated) > 0
    assert pool2.run(_evaluate, {}) == pytest.approx(replicated, rel=TOLERANCE)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make_model", "policy"), [(Opened, {nn.Sequential}), (Iterated, {nn.Linear, Block})]
)
def test_the_policy_that_the_message_names(pool2: RankPool, make_model: type[Stacked], policy: Any) -> None:
    """Trains."""
    expected = prefixed(plain_weights(make_model(), 2))
    for weights, _ in pool2.run(fit, make_model, {"auto_wrap_policy": policy}, 2):
        assert weight_error(weights, expected) <= TOLERANCE


def _switch_validation_off() -> tuple[bool, str]:
    module = ModelModule(Stacked())
    module.validation_step = None
    module.test_step = lambda batch, batch_idx: module.log("loss", module(batch), batch_size=1)
    trainer = make_trainer(AutomodelStrategy(), limit_train_batches=2)
    trainer.fit(module, loader(), loader())
    results = trainer.test(module, loader())
    return module.validation_step is None and "loss" in results[0], type(module).__name__


def test_a_step_that_is_switched_off_and_a_class_that_keeps_its_name(pool2: RankPool) -> None:
    assert pool2.run(_switch_validation_off) == [(True, "ModelModule")] * 2
