"""A validation after a time: each rank's clock would end it after another batch."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.plain import ModelModule, filled_decoder
from tests.trainer.runs import loader, make_trainer


def _fit() -> None:
    trainer = make_trainer(AutomodelStrategy(data_parallel="ddp"), val_check_interval=timedelta(hours=1))
    with pytest.raises(
        ValueError, match="is a time, which ends on each rank after another batch: pass a number"
    ):
        trainer.fit(ModelModule(filled_decoder()), loader(), loader())


def test_several_ranks_refuse(pool2: RankPool) -> None:
    pool2.run(_fit)
