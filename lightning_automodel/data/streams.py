"""Data sets that share their rows out by themselves, between the ranks that they have counted."""

from typing import Any


def check_counted_ranks(loader: Any, rank: int, size: int) -> None:
    """Raise ValueError if a data set of litdata takes this rank for another one. Not a collective.

    Ranks would read the same rows, or leave some out, in silence.

    Args:
        loader: Any loader; only those of such data sets are checked.
        rank: This rank's number among those with data of their own.
        size: How many ranks have data of their own.
    """
    counted: Any = getattr(getattr(loader, "dataset", None), "distributed_env", None)
    numbers = getattr(counted, "global_rank", rank), getattr(counted, "world_size", size)
    if numbers != (rank, size):
        raise ValueError(
            f"The data set of a loader, litdata's {type(loader.dataset).__name__}, counts this rank as"
            f" {numbers}, and the run as {(rank, size)} (number of the rank, ranks with data of their own):"
            " ranks would read the same rows, or leave some out. Make the data set once the ranks have"
            " started, in train_dataloader() or in setup() of the data module."
        )
