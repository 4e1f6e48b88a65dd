"""Schedules that are made from the number of steps, for which set-up loads the data before the checkpoint is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool
from tests.resume.resuming import Learner, Setting, compare


class OneCycle(Learner):
    """Warms up over a part of the steps that the Trainer expects."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


STOPS = (("on_train_batch_end", 4), ("on_train_epoch_end", 1))
LATER = (("on_train_batch_end", 11), ("on_train_epoch_end", 2))
CASES = [
    ("fsdp2", "distributed", {"max_epochs": 3, "accumulate_grad_batches": 2}),
    ("ddp", "global generator", {"max_epochs": 3}),
    ("ddp", "stateful stream", {"max_epochs": 3, "max_steps": 20, "accumulate_grad_batches": 2}),
]
MORE = [
    ("fsdp2", "workers", {"max_epochs": 3}),
    ("fsdp2", "stateful", {"max_epochs": 3}),
]


@pytest.mark.parametrize(
    ("engine", "loader", "trainer", "stops"),
    [
        ("fsdp2", "distributed", {"max_epochs": 2, "accumulate_grad_batches": 2}, STOPS),
        *(pytest.param(*case, STOPS, marks=pytest.mark.sweep) for case in CASES),
        *(pytest.param(*case, LATER, marks=pytest.mark.sweep) for case in CASES),
        *(pytest.param(*case, STOPS + LATER, marks=pytest.mark.sweep) for case in MORE),
    ],
)
@pytest.mark.timeout(400)
def test_schedule_of_all_steps(
    pool2: RankPool, engine: str, loader: str, trainer: dict[str, Any], stops: Any, tmp_path: Path
) -> None:
    setting = Setting({"data_parallel": engine}, trainer, module=OneCycle, loader=loader)
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []
