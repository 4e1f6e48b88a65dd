"""A training loader that goes on with fillers after its own batches, until those of all ranks have ended."""

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_automodel.data.exchange import Exchange

_END = object()


@dataclass
class Draw:
    """One batch that all ranks have drawn, each its own.

    Attributes:
        is_filler: Whether this rank had none left.
        has_batch: 1 for every rank that had one, else 0.
    """

    is_filler: bool
    has_batch: Exchange

    def num_real(self) -> int:
        """How many ranks had a batch. Waits for all to draw."""
        return sum(self.has_batch.numbers())


class PaddedLoader:
    """Yields the batches of a loader, then fillers until all ranks have drawn their last one.

    A filler is a copy of the epoch's first batch, and of another rank's where this one has none at all. With each draw
    a rank tells the others whether it still had a batch, and waits for nobody as long as it has: the number travels
    while the batch is trained on.

    Iterating is a collective over the group: every rank must draw equally often. It looks like the loader itself to
    ``isinstance`` and has its attributes.

    Args:
        loader: Of the user.
        lengths: Of the loaders of all ranks; None where any is unknown.
        group: All ranks, on the host.
        drawn: Where each draw is appended, for whoever trains on it.
    """

    def __init__(self, loader: Any, lengths: list[int] | None, group: dist.ProcessGroup, drawn: deque[Draw]) -> None:
        own = {"padded_loader": loader, "rank_lengths": lengths, "_group": group, "_drawn": drawn}
        vars(self).update(own)  # others are set on the loader

    @property  # type: ignore[misc]  # as proxies do
    def __class__(self) -> Any:
        return type(self.padded_loader)

    def __getattr__(self, name: str) -> Any:
        if name == "padded_loader":  # of a copy in the making
            raise AttributeError(name)
        return getattr(self.padded_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets worker_init_fn, and forgets iterators.
        setattr(self.padded_loader, name, value)

    def __len__(self) -> int:
        if self.rank_lengths is None:
            raise TypeError(f"The number of batches of {type(self.padded_loader).__name__} is not known on all ranks.")
        return max(self.rank_lengths)

    def __iter__(self) -> Iterator[Any]:
        self._drawn.clear()
        # Iterated at once, as Lightning and resuming expect it, not with the first draw.
        return self._padded(iter(self.padded_loader))

    def _padded(self, batches: Iterator[Any]) -> Iterator[Any]:
        filler, is_first = None, True
        while True:
            batch = next(batches, _END)
            draw = Draw(batch is _END, Exchange(self._group, int(batch is not _END)))
            if is_first:
                num_real = draw.num_real()
                if 0 < num_real < self._group.size():
                    filler = self._share(batch, draw)
                elif num_real:
                    filler = copy.deepcopy(batch)
                # Lightning skips a batch that is None, on all ranks alike.
                is_first = filler is None and num_real > 0
            if draw.is_filler:
                if draw.num_real() == 0:
                    return
                batch = copy.deepcopy(filler)
            self._drawn.append(draw)
            yield batch

    def _share(self, batch: Any, draw: Draw) -> Any:
        """The batch of the first rank that has one. A collective over the group."""
        source = draw.has_batch.numbers().index(1)
        shared = [None if batch is _END else batch]
        dist.broadcast_object_list(shared, dist.get_global_rank(self._group, source), self._group)
        return shared[0] if draw.is_filler else copy.deepcopy(batch)


def unpadded(loader: Any) -> Any:
    """The user's loader behind a padded one; any other as it is."""
    return vars(loader)["padded_loader"] if type(loader) is PaddedLoader else loader


def forget_draws(loader: Any, count: int) -> None:
    """The oldest batches that a padded loader has handed out were dropped, and nobody trains on them."""
    if type(loader) is PaddedLoader:
        drawn: deque[Draw] = vars(loader)["_drawn"]
        for _ in range(min(count, len(drawn))):
            drawn.popleft()
