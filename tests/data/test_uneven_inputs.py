"""Ranks with unequally many batches: an error that names them in place of a hang, where ranks step together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import micro_batches
from tests.trainer.runs import CASE, LabelledModule, make_trainer

NUM_BATCHES = (5, 3)
BATCHES = {"equal": (3, 3), "unequal": NUM_BATCHES}


class Stream(IterableDataset):
    """Batches of which nobody knows the number."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _loader(counts: tuple[int, int], is_stream: bool) -> DataLoader:
    batches = micro_batches(CASE)[dist.get_rank()][: counts[dist.get_rank()]]
    return DataLoader(Stream(batches) if is_stream else batches, batch_size=None)


class Evaluated(LabelledModule):
    test_step = predict_step = LabelledModule.validation_step


def _run(stage: str, options: dict[str, Any], counts: tuple[int, int], is_stream: bool, settings: Any) -> None:
    module, trainer = Evaluated(), make_trainer(AutomodelStrategy(timeout=0.5, **options), **settings)
    unequal, equal = _loader(counts, is_stream), _loader((3, 3), is_stream)
    if stage == "train":
        trainer.fit(module, unequal)
    elif stage == "val in fit":
        trainer.fit(module, equal, unequal)
    else:
        getattr(trainer, stage)(module, unequal)


FSDP2: dict[str, Any] = {}
DDP = {"data_parallel": "ddp"}


@pytest.mark.every_case
@pytest.mark.parametrize("is_stream", [False, True], ids=["sized", "stream"])
@pytest.mark.parametrize(
    ("stage", "options", "name"),
    [
        ("train", FSDP2, "train"),
        ("train", DDP, "train"),
        ("val in fit", FSDP2, "val"),
        ("validate", FSDP2, "val"),
        ("test", FSDP2, "test"),
        ("predict", FSDP2, "predict"),
    ],
)
def test_the_rank_whose_data_ends_is_named(
    pool2: RankPool, stage: str, options: dict[str, Any], name: str, is_stream: bool
) -> None:
    """On both ranks, before the step that only one of them would finish."""
    with pytest.raises(RankError) as raised:
        pool2.run(_run, stage, options, NUM_BATCHES, is_stream, {})
    failures = raised.value.failures
    told = f"The {name} data of rank 1 ends with batch 3, and rank 0 would go on and wait for more"
    assert f"RuntimeError: {told}" in failures[1]
    assert f"Trainer(limit_{name}_batches=3)" in failures[1]
    assert "RankFailedError: rank 1" in failures[0]
    assert told in failures[0]


@pytest.mark.every_case
@pytest.mark.parametrize("is_stream", [False, True], ids=["sized", "stream"])
def test_what_ends_together_is_left_alone(pool2: RankPool, is_stream: bool) -> None:
    """Equal counts, a limit that makes them equal, and a fit that is over before."""
    for stage, counts, settings in (
        ("train", (3, 3), {"max_epochs": 2}),
        ("validate", (3, 3), {}),
        ("train", NUM_BATCHES, {"limit_train_batches": 3}),
        ("predict", NUM_BATCHES, {"limit_predict_batches": 2}),
        ("train", NUM_BATCHES, {"max_steps": 2}),
    ):
        assert pool2.run(_run, stage, FSDP2, counts, is_stream, settings) == [None, None], stage


def test_ddp_evaluates_unequal_counts(pool2: RankPool) -> None:
    """Each rank has the whole model, and goes at its own pace."""
    assert pool2.run(_run, "validate", DDP, NUM_BATCHES, False, {}) == [None, None]


def _count_gathers(is_stream: bool) -> int:
    calls = 0
    gather = dist.all_gather_into_tensor

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += args[0].dtype == torch.int64
        return gather(*args, **kwargs)

    dist.all_gather_into_tensor = counting
    try:
        _run("train", DDP, (3, 3), is_stream, {})
    finally:
        dist.all_gather_into_tensor = gather
    return calls


def test_known_and_equal_lengths_cost_nothing_in_a_step(pool2: RankPool) -> None:
    """One exchange as the loader is made; of a stream, one more for each batch."""
    assert pool2.run(_count_gathers, False) == [1, 1]
    assert pool2.run(_count_gathers, True) == [4, 4]
