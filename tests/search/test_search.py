"""Random cases equal one process: a few by default, many in the sweep, more by `python -m tests.search`.

A failing case prints itself as a dictionary: `python -m tests.search --dict "{...}"`.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest

from lightning_automodel.gradients import rescale_clip
from tests.rank_pool import RankPool
from tests.search.cases import Case
from tests.search.drawing import EXPERTS, VALUES, draw_case
from tests.search.harness import TOLERANCE, judge
from tests.search.ranks import train
from tests.search.reference import Outcome

SEED = 23
BY_DEFAULT = 4
IN_SWEEP = 400
PER_TEST = 20
PLANTED_WITHIN = 6


FOUND = {
    "gradients_scaled_after_a_forward_in_on_after_backward": Case(
        seed=541811,
        epochs=2,
        hooks=("clip_by_own_rule", "scale_before_step"),
        foreign=("input@after_backward",),
    ),
    "gradients_doubled_after_a_forward_in_mid_window": Case(
        num_batches=2,
        accumulation=(2,),
        hooks=("double_after_backward",),
        foreign=("forward@after_backward", "forward@batch_end"),
    ),
    "gradients_by_shards_where_some_are_unused": Case(parts=("unused",), foreign=("parameters@batch_end",)),
    "frozen_by_toggling_after_some_ranks_have_used_it": Case(
        seed=951778, parts=("sometimes",), num_batches=4, accumulation=(3,), manual="gan_window"
    ),
    "finetuning_beside_a_replicated_parameter": Case(parts=("empty",), epochs=2, callbacks=("finetuning",)),
    "lightning_zeroes_a_manual_window_before_it_validates": Case(
        num_batches=4, accumulation=(3,), manual="window", callbacks=("validate",)
    ),
    "used_by_a_padding_batch_alone_under_ddp": Case(
        seed=482179,
        engine="ddp",
        parts=("sometimes",),
        num_batches=2,
        more_batches=2,
        strategy=(("uneven_inputs", "pad"), ("ddp_kwargs", (("find_unused_parameters", True),))),
    ),
    "gradient_between_micro_batches": Case(num_batches=2, accumulation=(2,), foreign=("input@batch_end",)),
    "adversarial_loss": Case(num_batches=2, accumulation=(2,), inner="virtual"),
    "weights_written_in_the_forward": Case(num_batches=2, writes=("normalize@forward",)),
    "teacher_in_the_root": Case(parts=("teacher",), num_batches=2, writes=("teacher_mul@forward",)),
    "parameter_in_a_dict": Case(num_batches=1, alias="dict@root"),
    "layer_that_comes_late": Case(num_batches=1, changed="append@configure_optimizers"),
    "parameter_that_is_replaced": Case(num_batches=1, changed="replace@train_start"),
    "negative_count": Case(tell="returned_tensor", negative=True),
    "loss_of_all_ranks_that_count_otherwise": Case(
        seed=195840, task="rows", num_batches=2, accumulation=(2,), over_ranks=True
    ),
    "loss_of_all_ranks_whose_first_rank_counts_the_mean": Case(
        seed=313475, accumulation=(3,), label_shift=1, over_ranks=True
    ),
    "rows_of_a_gradient": Case(num_batches=1, rows="assign"),
    "hook_that_is_not_linear": Case(num_batches=1, backward="full_hook_squash"),
    "gradients_by_spread_experts": Case(
        seed=464896, experts=2, num_batches=1, foreign=("parameters@before_step",)
    ),
    "spread_experts_clipped_by_torch": Case(experts=2, num_batches=2, hooks=("clip_by_own_rule",)),
    "balancing_loss_beside_spread_experts": Case(
        experts=2, num_batches=2, accumulation=(2,), aux=True, strategy=(("count_window_ahead", True),)
    ),
    "penalty_on_weights_that_stay_gathered": Case(
        num_batches=2,
        accumulation=(2,),
        penalty="full_tensor",
        strategy=(("reshard_during_accumulation", False),),
        trainer=(("detect_anomaly", True),),
    ),
    "validated_and_saved_in_mid_window": Case(
        num_batches=5, accumulation=(3,), callbacks=("save_in_mid_window", "validate")
    ),
}
"""What the search has found, and is mended; and what the few numbers of a default run may lack."""

NAMED = {
    "a_buffer_beside_padding": Case(
        engine="ddp",
        counter="transient",
        num_batches=2,
        more_batches=2,
        strategy=(("uneven_inputs", "pad"),),
    ),
}
"""What no number of the sweep draws."""


def cases(first: int, count: int) -> list[Case]:
    return [draw_case(SEED, number) for number in range(first, first + count)]


def assert_no_finding(request: pytest.FixtureRequest, case: Case) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{case.num_ranks}")
    finding = judge(pool, case).finding
    assert finding is None, f"{case.as_dict()}: {finding.kind}: {finding.text}"


def test_random_cases(request: pytest.FixtureRequest) -> None:
    """Weights of one process, or an error that such a case may end in, on every rank."""
    for case in cases(0, BY_DEFAULT):
        if case.num_ranks == 2:
            assert_no_finding(request, case)


def test_random_cases_with_snippets(request: pytest.FixtureRequest) -> None:
    """What users' hooks do to parameters and gradients, beside everything else."""
    drawn = [draw_case(SEED, number, kinds=("snippet",)) for number in range(12)]
    for case in [case for case in drawn if case.num_ranks == 2][:2]:
        assert_no_finding(request, case)


def test_random_cases_with_spread_experts(request: pytest.FixtureRequest) -> None:
    drawn = [draw_case(SEED, number, kinds=(EXPERTS,)) for number in range(20)]
    for case in [case for case in drawn if case.experts and case.num_ranks == 2][:3]:
        assert_no_finding(request, case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in FOUND.items()]
    + [pytest.param(case, id=name, marks=pytest.mark.sweep) for name, case in NAMED.items()],
)
def test_named_cases(request: pytest.FixtureRequest, case: Case) -> None:
    assert_no_finding(request, case)


@pytest.mark.sweep
@pytest.mark.parametrize("kinds", [(), (EXPERTS,)])
@pytest.mark.parametrize("first", range(BY_DEFAULT, BY_DEFAULT + IN_SWEEP, PER_TEST))
def test_more_random_cases(request: pytest.FixtureRequest, first: int, kinds: tuple[str, ...]) -> None:
    for number in range(first, first + PER_TEST):
        assert_no_finding(request, draw_case(SEED, number, kinds))


def _train_with_a_factor(factor: float, case: Case, folder: str) -> Outcome:
    right = rescale_clip.gradient_factor
    with mock.patch.object(rescale_clip, "gradient_factor", lambda *args: right(*args) * factor):
        return train(case, folder)


@pytest.mark.parametrize("factor", [1.01, 1 + 1e3 * TOLERANCE])
def test_a_planted_defect_is_found(pool2: RankPool, factor: float) -> None:
    """The search bites within a handful of cases, also where a factor is wrong in the ninth digit."""
    drawn = [case for case in cases(0, 40) if case.num_ranks == 2][:PLANTED_WITHIN]
    findings = (judge(pool2, case, partial(_train_with_a_factor, factor)).finding for case in drawn)
    assert any(finding is not None and finding.kind == "differs" for finding in findings)


def test_cases_by_number() -> None:
    """A case is the same each time, a dictionary makes it again, and every trait is drawn."""
    drawn = cases(0, 500)
    assert drawn == cases(0, 500)
    assert all(eval(repr(Case(**case.as_dict())), {"Case": Case}) == case for case in drawn[:50])
    met = {name for number in range(500) for name in draw_case(SEED, number).as_dict()}
    assert met >= set(VALUES)
