"""Random combinations of options beside expert parallelism, and proof that the factor of experts is needed."""

from __future__ import annotations

from unittest import mock

import pytest

from lightning_automodel.gradients import rescale_clip
from tests.expert_parallel.combinations import Combination, draw, expected_weights, fit_combination
from tests.expert_parallel.mixtures import Fit, error
from tests.rank_pool import RankPool
from tests.trainer.runs import TOLERANCE

COMBINATIONS = [draw(number) for number in range(16)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(each, id=str(each), marks=[] if each.number in (6, 11, 13) else pytest.mark.sweep)
        for each in COMBINATIONS
    ],
)
def test_as_one_process(pool4: RankPool, combination: Combination) -> None:
    expected = expected_weights(combination)
    for found in pool4.run(fit_combination, combination):
        assert error(found.weights, expected) <= TOLERANCE


def test_options_are_drawn() -> None:
    """Each that may matter, in the 16."""
    values = {(name, str(value)) for each in COMBINATIONS for name, value in each.options.items()}
    wanted = {
        "expert_parallel_size": ("2", "4"),
        "data_parallel_replicate_size": ("1", "2"),
        "defer_fsdp_grad_sync": ("True", "False", "all_reduce"),
        "reshard_during_accumulation": ("True", "False"),
        "activation_checkpointing": ("True", "False", "selective"),
        "prefetch": ("0", "1", "2"),
        "cpu_offload": ("True", "False"),
        "count_window_ahead": ("True", "False"),
    }
    assert {(name, value) for name, of_name in wanted.items() for value in of_name} <= values
    for trait in ("is_manual", "has_balance", "clips"):
        assert {getattr(each, trait) for each in COMBINATIONS} == {True, False}


def _without_factor(combination: Combination) -> Fit:
    with mock.patch.object(rescale_clip, "share_experts_gradients_", return_value=None):
        return fit_combination(combination)


@pytest.mark.parametrize("size", [2, 4])
def test_the_factor_is_needed(pool4: RankPool, size: int) -> None:
    """Without it, the gradients of experts are ``size`` times too large: after one step, so are their changes."""
    combination = Combination(0, {"expert_parallel_size": size})
    expected = expected_weights(combination)
    found = pool4.run(_without_factor, combination)[0].weights
    experts = [name for name in expected if "experts" in name]
    assert error({name: found[name] for name in experts}, {name: expected[name] for name in experts}) > 0.1
