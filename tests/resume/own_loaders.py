"""DataLoaders with an ``__iter__`` of their own, as libraries have them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class Yielding(DataLoader):
    """Begins with the first batch, as every ``__iter__`` with a ``yield`` in it does."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Filtering(DataLoader):
    """Leaves batches out."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if batch["input_ids"].sum() % 3:
                yield batch


class Threaded(DataLoader):
    """Loads ahead in a thread, as MONAI's ThreadDataLoader does."""

    def __iter__(self) -> Iterator[Any]:
        loaded: queue.Queue[Any] = queue.Queue(2)
        batches = super().__iter__()

        def load() -> None:
            for batch in batches:
                loaded.put(batch)
            loaded.put(None)

        threading.Thread(target=load, daemon=True).start()
        yield from iter(loaded.get, None)


class Preloading(DataLoader):
    """Has loaded one batch ahead as soon as it is iterated, as prefetchers of CUDA streams do."""

    def __iter__(self) -> Preloading:
        self.batches = super().__iter__()
        self.ahead = next(self.batches, None)
        return self

    def __next__(self) -> Any:
        batch = self.ahead
        self.ahead = next(self.batches, None)
        if batch is None:
            raise StopIteration
        return batch


class Repeating:
    """A sampler that never ends."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Kept(DataLoader):
    """Keeps its first iterator for ever, as timm's MultiEpochsDataLoader and YOLO's InfiniteDataLoader do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Direct(DataLoader):
    """Does not ask its sampler."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self.collate_fn([self.dataset[index]])


KINDS = {kind.__name__.lower(): kind for kind in (Yielding, Filtering, Threaded, Preloading, Kept, Direct)}
