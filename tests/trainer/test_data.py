"""Each rank trains on its own share of a data set, without the user doing anything for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.runs import LabelledModule, make_trainer


class Records(LabelledModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch["labels"].flatten().tolist()
        return super().training_step({**batch, "labels": batch["labels"] % 11}, batch_idx)


def _seen(options: dict[str, Any]) -> list[int]:
    rows = [
        {"input_ids": torch.ones(1, dtype=torch.long), "labels": torch.tensor([index])} for index in range(8)
    ]
    module = Records()
    trainer = make_trainer(AutomodelStrategy(**options), use_distributed_sampler=True)
    trainer.fit(module, DataLoader(rows, batch_size=2))
    return module.seen


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_distributed_sampler_is_injected(pool2: RankPool, engine: str) -> None:
    """Together the ranks see every sample once, and none sees them all."""
    shares = pool2.run(_seen, {"data_parallel": engine})
    assert [len(share) for share in shares] == [4, 4]
    assert sorted(shares[0] + shares[1]) == list(range(8))
