"""The head of a model is gathered and kept with its root, and its gradient is reduced by itself, while others run.

Below a size it stays in the root's group; here every head is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding import units
from lightning_automodel.sharding.units import HEAD_ELEMENTS, plan_sharding
from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, fit_module
from tests.trainer.exactness import VOCABULARY, WIDTH, Batch, TinyDecoder, assert_exact, full_weights
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import loader, make_trainer
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


class _Scatters(TorchDispatchMode):
    """Elements of each reduce-scatter, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_reduce_scatter_base_":
            self.numels.append(args[1].numel())
        return func(*args, **(kwargs or {}))


class _Counted(ModelModule):
    """Notes what the last backward reduces, and in which order."""

    def on_before_zero_grad(self, *args: Any) -> None:
        self.scatters = _Scatters()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.scatters:
            super().backward(loss, *args, **kwargs)


def _reduced(threshold: int) -> tuple[list[int], int, int]:
    module = _Counted(_make(TinyDecoder))
    with mock.patch.object(units, "HEAD_ELEMENTS", threshold):
        make_trainer(AutomodelStrategy()).fit(module, loader(CASE2))
    embedding, head, norm = (
        sum(parameter.numel() for parameter in part.parameters())
        for part in (module.model.embedding, module.model.head, module.model.norm)
    )
    return module.scatters.numels, head, embedding + norm


def test_its_gradient_is_reduced_first(pool2: RankPool) -> None:
    """And only the embedding's, and what else the root has, after the whole backward. Sizes are padded to the ranks."""
    for (before, head, root), (after, _, _) in zip(
        pool2.run(_reduced, HEAD_ELEMENTS), pool2.run(_reduced, 1), strict=True
    ):
        assert len(after) == len(before) + 1
        assert head <= after[0] <= head + 16
        assert root <= after[-1] <= root + 16
        assert head + root <= before[-1] <= head + root + 32
        assert before[:-1] == after[1:-1]


class CallsTheHead(ModelModule):
    """Calls the head by itself between steps, and keeps what it returns."""

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        with torch.no_grad():
            self.returned = self.model.head(torch.ones(1, WIDTH, dtype=torch.float64, device=self.device))


def _after_a_fit() -> tuple[tuple[Tensor, Tensor, bool], list[list[float]]]:
    """What the head has returned between steps, and should have; losses of a plain loop then, and of a whole copy's."""
    module = CallsTheHead(_make(TinyDecoder))
    with EVERY_HEAD:
        fit_module(module, {}, CASE2)
    weights = full_weights(module.model)
    is_sharded = hasattr(module.model.head.weight, "placements")
    called = module.returned[0], weights["head.weight"].sum(1) + weights["head.bias"], is_sharded
    whole = _make(TinyDecoder)
    whole.load_state_dict(weights)
    ids = torch.arange(4)[None]
    losses: list[list[float]] = []
    for model in (module.model, whole):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses.append([])
        optimizer.zero_grad()  # the fit has left those of its last step
        for _ in range(3):
            loss = model(ids).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return called, losses


def test_between_steps_and_after_the_fit(pool2: RankPool) -> None:
    """Called by itself it has the newest weights, and is sharded again, as all is behind a plain loop's backward.

    What stayed gathered would be used by the next step in the place of new weights.
    """
    for (returned, expected, is_sharded), (sharded, whole) in pool2.run(_after_a_fit):
        torch.testing.assert_close(returned, expected, rtol=1e-12, atol=1e-12)
        assert is_sharded
        assert sharded == pytest.approx(whole, rel=1e-12)
        assert whole[0] > whole[-1]


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
