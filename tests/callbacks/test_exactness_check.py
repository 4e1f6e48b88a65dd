"""ExactnessCheck reports what is wrong, reports nothing else, and leaves no trace in the training."""

from __future__ import annotations

import pytest

from tests.callbacks.exactness import TRAININGS, bits_of, random_verdicts, verdict_of
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


BLOCK = 10  # trainings of one call


@pytest.mark.sweep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp", "lightning"])
def test_no_false_alarm(strategy: str, precision: str, pool2: RankPool) -> None:
    """Random trainings that are right: under Lightning's ddp those whose micro-batches have equal counts."""
    number = 70 if precision == "32-true" else 35
    for first in range(0, number, BLOCK):
        numbers = list(range(first, min(number, first + BLOCK)))
        found = pool2.run(random_verdicts, numbers, strategy, precision, strategy == "lightning", timeout_s=600)[0]
        assert [each for each in found if each[1] == "wrong"] == []
        if precision == "32-true":
            assert [each for each in found if each[1] != "exact"] == []


@pytest.mark.sweep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("precision", "least"), [("32-true", 1.0), ("bf16-mixed", 0.9), ("bf16-true", 0.9)])
def test_power(precision: str, least: float, pool2: RankPool) -> None:
    """The same on unequal counts under Lightning's ddp, which are wrong."""
    verdicts = []
    for first in range(0, 40, BLOCK):
        numbers = list(range(first, first + BLOCK))
        found = pool2.run(random_verdicts, numbers, "lightning", precision, timeout_s=600)[0]
        verdicts += [verdict for _, verdict, _ in found]
    assert "exact" not in verdicts
    assert verdicts.count("wrong") >= least * len(verdicts)
