"""A model with parameters that FSDP2 does not shard. `tests/search` draws models of many builds, trained exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import LEARNING_RATE, TinyDecoder, full_weights
from tests.trainer.plain import ModelModule, fill
from tests.trainer.runs import loader, make_trainer

ACCUMULATE = 3


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
