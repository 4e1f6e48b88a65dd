"""The exactness harness bites: it accepts Lightning's own strategies where they are exact, and catches them elsewhere.

Without this a green sweep would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import (
    TOLERANCE,
    ShardedTinyModule,
    TinyModule,
    fit,
    reference,
    relative_error,
    weight_error,
)

WRONG = 1e-6

EVEN = Case(seed=1, ragged=False, num_batches=4, accumulation=(1,), precision="32-true")
EVEN_WINDOWS = Case(seed=2, ragged=False, num_batches=4, accumulation=(2, 2), precision="32-true")
SHORT_WINDOW = Case(seed=3, ragged=False, num_batches=5, accumulation=(3,), precision="32-true")
RAGGED = Case(seed=4, num_batches=3, accumulation=(1,), precision="32-true")
RAGGED_WINDOWS = Case(seed=5, num_batches=4, accumulation=(2,), label_shift=1, precision="32-true")


def model_parallel(case: Case) -> Strategy:
    return ModelParallelStrategy(data_parallel_size=case.num_ranks, tensor_parallel_size=1)


def ddp(case: Case) -> Strategy:
    return DDPStrategy()


LIGHTNING = pytest.mark.parametrize(
    ("make_strategy", "make_module"), [(model_parallel, ShardedTinyModule), (ddp, TinyModule)]
)


def errors(
    pool: RankPool, case: Case, make_strategy: Callable[[Case], Strategy], make_module: type[TinyModule]
) -> list[float]:
    return [
        weight_error(outcome, reference(case)) for outcome in pool.run(fit, case, make_strategy, make_module)
    ]


@LIGHTNING
@pytest.mark.parametrize("case", [EVEN, EVEN_WINDOWS], ids=["accumulation1", "accumulation2"])
def test_lightning_is_exact_for_even_work(
    pool2: RankPool, case: Case, make_strategy: Callable[[Case], Strategy], make_module: type[TinyModule]
) -> None:
    """With equal counts and whole windows a mean of means is the token mean: nothing in the harness itself is off."""
    assert max(errors(pool2, case, make_strategy, make_module)) <= TOLERANCE


@LIGHTNING
@pytest.mark.parametrize(
    "case", [RAGGED, RAGGED_WINDOWS, SHORT_WINDOW], ids=["ragged", "ragged_windows", "short"]
)
def test_lightning_is_caught_for_uneven_work(
    pool2: RankPool, case: Case, make_strategy: Callable[[Case], Strategy], make_module: type[TinyModule]
) -> None:
    """Unequal label counts, and a window that ends early, show on every rank as an error far above rounding."""
    assert min(errors(pool2, case, make_strategy, make_module)) > WRONG


def test_relative_error_sees_what_a_maximum_can_hide() -> None:
    """NaN compares as neither larger nor smaller, and zero has no relative neighbourhood."""
    assert relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert relative_error(torch.ones(2), torch.ones(2, 1)) == float("inf")
    assert relative_error(torch.tensor([1e-30]), torch.zeros(1)) == float("inf")
    assert relative_error(torch.zeros(1), torch.zeros(1)) == 0.0
    assert relative_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])) == 0.25
