"""Everything in a checkpoint is of one moment: that at which a resumed run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

from tests.rank_pool import RankPool
from tests.resume.resuming import Setting, compare

DDP, FSDP2 = {"data_parallel": "ddp"}, {"data_parallel": "fsdp2"}


def averaging() -> list[Callback]:
    return [EMAWeightAveraging(decay=0.7)]


@pytest.mark.parametrize("strategy", [FSDP2, FSDP2 | {"save_distributed_checkpoint": False}, DDP])
@pytest.mark.every_case
def test_averages_within_a_validation(pool2: RankPool, strategy: dict[str, Any], tmp_path: Path) -> None:
    """The module then holds the averages, and the callback the weights that are trained."""
    trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 2}
    setting = Setting(strategy, trainer, callbacks=averaging)
    for differing in pool2.run(compare, setting, tmp_path, ("on_validation_batch_end", 1)):
        assert differing == []
