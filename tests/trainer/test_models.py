"""Models of several builds train to the weights of one process; `tests/search` draws more of them.

A step that calls the parts of a model alone is in `tests/gradients/test_chunked_loss.py`.
"""

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


def fit_model(make_model: Callable[[], nn.Module], options: dict[str, Any]) -> dict[str, Tensor]:
    """Train, from different weights on every rank."""
    module = ModelModule(make_model())
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
