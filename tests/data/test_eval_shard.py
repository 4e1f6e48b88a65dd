"""Which ranks may evaluate different samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_automodel import AutomodelStrategy, dp_eval_sample_shard
from lightning_automodel.data.streams import check_counted_ranks


@pytest.mark.parametrize("strategy", ["ddp", AutomodelStrategy(data_parallel="ddp"), DDPStrategy()])
def test_whole_models_take_different_samples(strategy: Any) -> None:
    """With the model on every rank, each goes at its own pace."""
    assert [dp_eval_sample_shard(strategy, rank, 3) for rank in range(3)] == [(0, 3), (1, 3), (2, 3)]
    assert dp_eval_sample_shard(distributed_config=strategy, dp_rank=1, dp_size=3) == (1, 3)
    assert dp_eval_sample_shard(strategy, 0, 1) is None


@pytest.mark.parametrize(
    "strategy", ["fsdp2", AutomodelStrategy(), ModelParallelStrategy(), "unknown", None]
)
def test_sharded_models_stay_in_lockstep(strategy: Any) -> None:
    """Where a forward gathers parameters, or nobody knows, all ranks see the same samples."""
    assert dp_eval_sample_shard(strategy, 1, 3) is None


@pytest.mark.parametrize(("dp_rank", "dp_size"), [(3, 3), (-1, 2), (0, 0)])
def test_rank_outside_of_the_group(dp_rank: int, dp_size: int) -> None:
    """A global rank in the place of the group's is refused, whatever the strategy."""
    with pytest.raises(ValueError, match="is not in range") as raised:
        dp_eval_sample_shard("fsdp2", dp_rank, dp_size)
    assert str(raised.value) == (
        f"dp_rank={dp_rank} is not in range(dp_size={dp_size}); pass the rank within the dp group."
    )


# --- Data sets that share their rows out by themselves ----------------------------------------------------------------


def loader_counting(rank: int, size: int) -> SimpleNamespace:
    """A loader whose data set counts ranks as litdata's do."""
    return SimpleNamespace(
        dataset=SimpleNamespace(distributed_env=SimpleNamespace(global_rank=rank, world_size=size))
    )


def test_made_before_the_ranks_have_started() -> None:
    """Each rank then takes itself for the only one, and reads all rows."""
    check_counted_ranks(loader_counting(1, 2), 1, 2)
    check_counted_ranks([1, 2, 3], 1, 2)
    with pytest.raises(ValueError, match=r"counts this rank as \(0, 1\), and the run as \(1, 2\)"):
        check_counted_ranks(loader_counting(0, 1), 1, 2)
