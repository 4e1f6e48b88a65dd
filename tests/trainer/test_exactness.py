"""`AutomodelStrategy` trains to the weights of one plain single-process loop, whatever the options and the data.

The default run takes a balanced sample of the space of cases; `pytest -m sweep` takes many more. A failing
case is reproduced by its id: `pytest tests/trainer/test_exactness.py -m "sweep or not sweep" -k <id>`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_automodel import AutomodelStrategy
from tests import devices
from tests.rank_pool import RankPool
from tests.trainer.cases import Case, Engine, draw_cases
from tests.trainer.exactness import (
    TOLERANCE,
    LastStep,
    ShardedTinyModule,
    TinyModule,
    fit,
    micro_batches,
    reference,
    relative_error,
    weight_error,
)

WRONG = 1e-6

SAMPLE = draw_cases(seed=26, count=8)
SWEEP = draw_cases(seed=2, count=120)
UNEVEN = Case(seed=6, num_batches=5, accumulation=(2,), gap="micro_batches", label_shift=1, telling="labels")


def automodel(case: Case) -> Strategy:
    """The strategy that the case asks for, with no option that the case leaves at its default's meaning."""
    options: dict[str, Any] = {}
    if case.engine == "fsdp2":
        options["reshard_during_accumulation"] = case.reshard
        options["reshard_after_forward"] = case.reshard_after_forward
        options["defer_fsdp_grad_sync"] = case.defer
        options["cpu_offload"] = case.layout == "offload"
    if case.layout == "hsdp":
        options["data_parallel_replicate_size"] = 2
    if case.layout == "tensor_parallel":
        options["tensor_parallel_size"] = case.tensor
    if case.layout == "own_mesh":
        options["device_mesh"] = init_device_mesh(
            devices.device_type(case.world_size), (case.num_ranks, case.tensor), mesh_dim_names=("dp", "tp")
        )
    if case.telling == "callable_tensor" or (case.ahead and case.telling.startswith("returned")):
        options["count_label_tokens"] = case.num_label_tokens
    if case.telling == "callable_int":
        options["count_label_tokens"] = lambda batch: int(case.num_label_tokens(batch))
    if case.telling in ("labels", "label_key"):
        options.update(
            label_key=case.label_key, ignore_index=case.ignore_index, label_shift=case.label_shift
        )
    return AutomodelStrategy(
        data_parallel=case.engine,
        per_token_loss=case.per_token_loss,
        count_window_ahead=case.ahead,
        loss_reduction=case.loss_reduction,
        activation_checkpointing=case.recompute,
        **options,
    )


def per_micro_batch(case: Case) -> Strategy:
    return automodel(replace(case, per_token_loss=False))


def blind_to_the_shift(case: Case) -> Strategy:
    return AutomodelStrategy(data_parallel=case.engine, label_shift=0)


class PartlyShardedTinyModule(TinyModule):
    """A `configure_model` that shards the blocks and leaves embedding, norm and head as they are."""

    def configure_model(self) -> None:
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class DifferentStartTinyModule(TinyModule):
    """Weights that only rank 0 has right."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(dist.get_rank())


def ids(cases: list[Case]) -> list[str]:
    return [f"{index:02d}-{case}" for index, case in enumerate(cases)]


def assert_exact(pool: RankPool, case: Case, make_module: type[TinyModule] = TinyModule) -> None:
    """Every rank ends with the weights of the plain loop, and reports its last window."""
    expected = reference(case)
    for rank, outcome in enumerate(pool.run(fit, case, automodel, make_module)):
        error = weight_error(outcome, expected)
        assert error <= TOLERANCE, f"rank {rank} is off by {error:.1e} for {case!r}"
        assert_last_step(outcome.last_step, expected.last_step, case)


def assert_last_step(actual: LastStep | None, expected: LastStep | None, case: Case) -> None:
    assert actual is not None
    assert expected is not None
    assert actual.num_micro_batches == expected.num_micro_batches
    if case.per_token_loss:
        assert actual.num_label_tokens == expected.num_label_tokens
    if expected.num_label_tokens:
        assert relative_error(actual.loss, expected.loss) <= TOLERANCE
    if case.clipping == "norm":
        assert relative_error(actual.grad_norm, expected.grad_norm) <= TOLERANCE
    else:
        assert actual.grad_norm is None


@pytest.fixture
def pool(request: pytest.FixtureRequest, case: Case) -> RankPool:
    """As many ranks as the case needs."""
    return request.getfixturevalue(f"pool{case.world_size}")


@pytest.mark.parametrize("case", SAMPLE, ids=ids(SAMPLE))
def test_weights_equal_one_process(pool: RankPool, case: Case) -> None:
    """A sample in which every option takes every value."""
    assert_exact(pool, case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", SWEEP, ids=ids(SWEEP))
def test_weights_equal_one_process_everywhere(pool: RankPool, case: Case) -> None:
    """The same over many more combinations of the options."""
    assert_exact(pool, case)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_all_ranks_start_from_the_weights_of_rank_0(pool2: RankPool, engine: Engine) -> None:
    """A model that was initialised differently on every rank trains like rank 0's."""
    assert_exact(pool2, replace(UNEVEN, layout=engine), DifferentStartTinyModule)


@pytest.mark.parametrize("make_module", [ShardedTinyModule, PartlyShardedTinyModule])
def test_a_model_that_shards_itself_is_exact(pool2: RankPool, make_module: type[TinyModule]) -> None:
    """What `configure_model` sharded stays, and what it left out is averaged as well."""
    assert_exact(pool2, UNEVEN, make_module)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
@pytest.mark.parametrize("make_strategy", [per_micro_batch, blind_to_the_shift])
def test_a_wrong_weight_is_caught(
    pool2: RankPool, make_strategy: Callable[[Case], Strategy], engine: Engine
) -> None:
    """The harness bites: means of micro-batches, and a count that takes in dropped labels, are far off."""
    case = replace(UNEVEN, layout=engine, gap="none")
    for outcome in pool2.run(fit, case, make_strategy):
        assert weight_error(outcome, reference(case)) > WRONG


OPTIONS = {
    "accumulation": [1, 2, 3, 4, 5],
    "gap": ["none", "micro_batches", "rank", "window", "everything"],
    "telling": ["returned_int", "returned_tensor", "callable_int", "callable_tensor", "labels", "label_key"],
    "loss_reduction": ["mean", "sum"],
    "label_shift": [0, 1],
    "ignore_index": [-100, -1],
    "per_token_loss": [True, False],
    "layout": ["fsdp2", "hsdp", "tensor_parallel", "own_mesh", "offload", "ddp"],
    "defer": [True, False, "all_reduce"],
    "reshard": [True, False, "auto"],
    "reshard_after_forward": [True, False],
    "recompute": [True, False],
    "clipping": ["none", "norm", "value"],
    "precision": ["64-true", "32-true"],
}


def values_met(cases: list[Case]) -> set[tuple[str, Any]]:
    """Every (option, value) that occurs in the cases."""
    met = {(name, value) for case in cases for name, value in vars(case).items()}
    return met | {("accumulation", window) for case in cases for window in case.accumulation}


def test_cases_cover_the_space() -> None:
    """The sample meets every value of every option, the sweep meets it under both engines."""
    wanted = {(name, value) for name, values in OPTIONS.items() for value in values}
    assert wanted <= values_met(SAMPLE)
    for engine in ("fsdp2", "ddp"):
        of_engine = {wish for wish in wanted if wish[0] != "layout"}
        assert of_engine <= values_met([case for case in SWEEP if case.engine == engine])
    assert {len(set(case.accumulation)) for case in SAMPLE} == {1, 2}


def test_cases_are_as_hard_as_they_claim() -> None:
    """Windows end early, clipping changes gradients, and shapes and label counts differ by rank and step."""
    for case in SAMPLE:
        assert case.accumulation[0] == 1 or case.num_batches % case.accumulation[0]
        if case.clipping != "none" and case.gap != "everything":
            assert reference(case).num_clipped > 0
        batches = [batch for rank in micro_batches(case) for batch in rank]
        assert len({batch["input_ids"].shape for batch in batches}) > 1
        counts = [int(case.num_label_tokens(batch)) for batch in batches]
        assert (0 in counts) == (case.gap != "none")
        assert len(set(counts)) > 1 or case.gap == "everything"
    rows = [
        row
        for case in SAMPLE
        if case.gap == "none"
        for rank in micro_batches(case)
        for batch in rank
        for row in case.used_labels(batch) != case.ignore_index
    ]
    assert any(row.any() for row in rows)
    assert any(not row.any() for row in rows)
    assert any(row.all() for row in rows)


def test_relative_error_sees_what_a_maximum_can_hide() -> None:
    """NaN compares as neither larger nor smaller, and zero has no relative neighbourhood."""
    assert relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert relative_error(torch.ones(2), torch.ones(2, 1)) == float("inf")
    assert relative_error(torch.tensor([1e-30]), torch.zeros(1)) == float("inf")
    assert relative_error(torch.zeros(1), torch.zeros(1)) == 0.0
    assert relative_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])) == 0.25
