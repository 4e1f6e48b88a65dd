"""Models of several builds train to the weights of one process; `tests/search` draws more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    WIDTH,
    TinyDecoder,
    assert_exact,
    full_weights,
)
from tests.trainer.plain import (
    ModelModule,
    differ_by_rank,
    fill,
    filled_decoder,
    plain_weights,
    prefixed,
)
from tests.trainer.runs import STRATEGIES, by_default, loader, make_trainer

ACCUMULATE = 3
ENGINES = {name: STRATEGIES[name] for name in ("kept", "resharded", "ddp")}


class TiedAcross(TinyDecoder):
    """Blocks share a matrix with each other, and another with a layer of the root."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.blocks[0].linear.weight = self.adapter.weight
        self.blocks[1].norm.weight = self.blocks[2].norm.weight
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.adapter(self.embedding(input_ids)))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Scalars(TinyDecoder):
    """0-dimensional parameters in the root and in a block, and single-element and empty ones beside them."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.temperature = nn.Parameter(torch.empty(()))
        self.blocks[1].gain = nn.Parameter(torch.empty(()))
        self.single = nn.Parameter(torch.empty(1))
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden * (1 + self.blocks[1].gain) + self.single
        return self.head(self.norm(hidden)) * torch.exp(self.temperature)


def fit_model(
    make_model: Callable[[], nn.Module],
    options: dict[str, Any],
    make_module: Callable[[nn.Module], Any] = ModelModule,
) -> dict[str, Tensor]:
    """Train, from different weights on every rank."""
    module = make_module(make_model())
    differ_by_rank(module)
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return full_weights(module)


@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
@pytest.mark.parametrize("make_model", [TiedAcross, Scalars])
@pytest.mark.every_case
def test_build(pool2: RankPool, make_model: type[nn.Module], options: dict[str, Any]) -> None:
    """Exact from rank 0's weights."""
    expected = prefixed(plain_weights(make_model(), ACCUMULATE))
    assert_exact(pool2.run(fit_model, make_model, options), expected)


class CallsParts(ModelModule):
    """The parts of the model one by one, its own forward never."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.model.embedding(batch["input_ids"])
        for block in self.model.blocks:
            hidden = block(hidden)
        logits = nn.functional.linear(self.model.norm(hidden), self.model.head.weight, self.model.head.bias)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
def test_step_that_calls_what_it_likes(pool2: RankPool, options: dict[str, Any]) -> None:
    """A training step needs no forward of the module."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    assert_exact(pool2.run(fit_model, filled_decoder, options, CallsParts), expected)


class SkipsABlock(TinyDecoder):
    """Leaves its last block out of the last micro-batch of a window."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.step = 0
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks if self.step % ACCUMULATE != 2 else self.blocks[:-1]:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def _fit_with_a_skipped_block() -> tuple[str, bool]:
    module = ModelModule(SkipsABlock())
    before = full_weights(module)
    trainer = make_trainer(AutomodelStrategy(data_parallel="ddp"), accumulate_grad_batches=ACCUMULATE)
    with pytest.raises(RuntimeError, match="took no part") as raised:
        trainer.fit(module, loader())
    after = full_weights(module)
    return str(raised.value), all(torch.equal(before[name], after[name]) for name in before)


def test_ddp_refuses_a_layer_unused_in_the_last_micro_batch(pool2: RankPool) -> None:
    """DDP would leave each rank with its own gradient: it raises before the step, with the remedy."""
    for message, unchanged in pool2.run(_fit_with_a_skipped_block):
        assert unchanged
        assert "ddp_kwargs={'find_unused_parameters': True}" in message


class UnfreezesWhatIsUnused(ModelModule):
    """Has a parameter that no forward uses, frozen until the second epoch, and decays all that have a gradient."""

    def __init__(self) -> None:
        model = Scalars()
        model.unused = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        super().__init__(model)

    def on_train_epoch_start(self) -> None:
        self.model.unused.requires_grad_(self.current_epoch == 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, weight_decay=0.5)


def _decayed(options: dict[str, Any]) -> Tensor:
    module = UnfreezesWhatIsUnused()
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, max_epochs=2).fit(
        module, loader()
    )
    return full_weights(module.model)["unused"]


@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}], ids=str)
def test_unused_once_it_is_unfrozen(pool2: RankPool, options: dict[str, Any]) -> None:
    """It gets no gradient, as in one process: a zero one would let the optimizer decay it."""
    for unused in pool2.run(_decayed, options):
        assert torch.equal(unused, torch.ones_like(unused))
