"""Weights that are swapped in the middle of a window change nothing, and no forward sees stale gathered parameters.

Every run accumulates four of eight micro-batches; its weights must equal those of the plain loop, which
knows nothing of the swap. `tests/search` draws validations, checkpoints and forwards there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding.shards import Shard
from tests.rank_pool import RankPool
from tests.trainer.exactness import TinyDecoder, full_weights, micro_batches, relative_error, weight_error
from tests.trainer.runs import (
    CASE,
    STRATEGIES,
    TOLERANCE,
    LabelledModule,
    by_default,
    loader,
    make_trainer,
    mean_loss,
    train_plainly,
)

WINDOWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
SWAPPED_BY = 1.5


class Swaps(Callback):
    """Swaps other weights in, runs a forward with them, and swaps back, as exponential moving averages do."""

    def __init__(self, through_data: bool) -> None:
        self.through_data = through_data
        self.losses: list[float] = []
        self.kinds: set[str] = set()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.kinds |= {type(parameter).__name__ for parameter in pl_module.parameters()}
        backup = [parameter.detach().clone() for parameter in pl_module.parameters()]
        self._write(pl_module, [SWAPPED_BY * weight for weight in backup])
        with torch.no_grad():
            self.losses.append(float(pl_module(micro_batches(CASE)[0][0])))
        self._write(pl_module, backup)

    def _write(self, module: Any, weights: list[Tensor]) -> None:
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            if self.through_data:
                parameter.data.copy_(weight)
            else:
                with torch.no_grad():
                    parameter.copy_(weight)


class ShardedByHand(LabelledModule):
    """Shards its decoder itself, so that the strategy finds a root that it did not make."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel_shard"]
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh)


def _fit_with(
    through_data: bool, options: dict[str, Any], make_module: type[LabelledModule]
) -> tuple[dict[str, Tensor], list[float], set[str]]:
    module = make_module()
    swaps = Swaps(through_data)
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=4, callbacks=[swaps])
    trainer.fit(module, loader())
    return full_weights(module.model), swaps.losses, swaps.kinds


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(STRATEGIES, "kept"))
@pytest.mark.parametrize(("through_data", "make_module"), [(False, LabelledModule), (True, ShardedByHand)])
def test_changes_nothing(
    pool2: RankPool, through_data: bool, options: dict[str, Any], make_module: type[LabelledModule]
) -> None:
    """Training goes on as if nothing had happened; a forward with swapped weights really uses them.

    A root of the user's own is not left gathered by it either. Between micro-batches the module shows its shards.
    """
    if make_module is ShardedByHand and "data_parallel" in options:
        pytest.skip("it shards by FSDP2")
    expected = train_plainly(WINDOWS)
    for weights, losses, kinds in pool2.run(_fit_with, through_data, options, make_module):
        assert weight_error(weights, expected) <= TOLERANCE
        assert relative_error(losses[0], _loss_with_swapped_initial_weights()) <= TOLERANCE
        assert losses[:3] == [losses[0]] * 3, "weights do not change within a window"
        assert losses[3] != losses[2], "the optimizer steps after the fourth micro-batch"
        assert kinds == {"Parameter" if "data_parallel" in options else Shard.__name__}


def _loss_with_swapped_initial_weights() -> float:
    model = TinyDecoder(CASE.seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SWAPPED_BY)
        return float(mean_loss(model, micro_batches(CASE)[0][0]))
