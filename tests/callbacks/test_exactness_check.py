"""ExactnessCheck reports what is wrong, reports nothing else, and leaves no trace in the training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_automodel import AutomodelStrategy, ExactnessCheck
from tests.callbacks.exactness import TRAININGS, Training, Writer, bits_of, run, sentences, verdict_of
from tests.rank_pool import RankPool


@pytest.mark.every_case
@pytest.mark.parametrize("name", TRAININGS)
def test_verdicts(name: str, pool2: RankPool, pool1: RankPool) -> None:
    """What is wrong is reported with its reason; what is right, never; what cannot be checked, as not checked."""
    training = TRAININGS[name]
    pool = pool1 if training.strategy == "one" else pool2
    for verdict, report in pool.run(verdict_of, name):
        assert verdict == training.verdict, report
        assert training.says in report


@pytest.mark.parametrize("name", ["fsdp2", "random numbers", "half precision", "hooks", "lightning", "contrastive"])
def test_training_has_the_same_bits(name: str, pool2: RankPool) -> None:
    """Weights and random states, with the callback and without it."""
    assert pool2.run(bits_of, name, True) == pool2.run(bits_of, name, False)
