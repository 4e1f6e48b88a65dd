"""Data sets that share their rows out by themselves must have counted the ranks of the run."""

from types import SimpleNamespace

import pytest

from lightning_automodel.data.streams import check_counted_ranks


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
