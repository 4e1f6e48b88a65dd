"""Batches on their way from a loader to the Trainer: drawn ahead, counted, and followed by fillers."""

import copy
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch.distributed as dist

from lightning_automodel.data.exchange import Exchange

_END = object()


@dataclass(eq=False)
class Draw:
    """What is known of one batch that this rank has drawn.

    Attributes:
        is_none: Whether the loader yielded None, which Lightning skips.
        count: Label tokens, if they are counted ahead.
        is_filler: Whether this rank had no batch left.
        has_batch: If ranks pad, the exchange in which each rank sends 1 if it had a batch, else 0.
    """

    is_none: bool
    count: float = 0
    is_filler: bool = False
    has_batch: Exchange | None = None

    def num_real(self) -> int:
        """How many ranks had a batch; 0 without padding. Waits until all ranks have drawn."""
        return 0 if self.has_batch is None else sum(self.has_batch.numbers())


class Draws(Iterator[Any]):
    """Iterates over the batches of a loader, and keeps a :class:`Draw` for each.

    With padding, drawing is a collective over the group: every rank must draw equally often. With each draw a rank
    sends whether it still had a batch. As long as it has one it does not wait: the exchange runs while the batch is
    trained on. After its own batches it yields fillers, until all ranks have drawn their last batch. A filler is a copy
    of the epoch's first batch, or of another rank's if this rank has no batch at all.

    Args:
        group: Host process group of all ranks.
        empty: Message of the ``ValueError`` if there is no batch at all; None raises nothing.

    Attributes:
        pads: Whether fillers follow in this epoch.
        count: Counts the label tokens of a batch; None if they are not counted ahead.
        handed_out: Draws whose batches were handed out but not begun; the Trainer may prefetch some.
        num_handed_out: Batches of this epoch that were handed out.
    """

    def __init__(self, group: dist.ProcessGroup, empty: str | None = None) -> None:
        self.pads = False
        self.count: Callable[[Any], float] | None = None
        self.handed_out: deque[Draw] = deque()
        self.num_handed_out = 0
        self._group, self._empty = group, empty
        self._ahead: deque[tuple[Draw, Any]] = deque()
        self._source: Iterator[tuple[Draw, Any]] = iter(())

    def restart(self, batches: Iterator[Any], pads: bool) -> None:
        """Begin an epoch, with these ``batches``."""
        self.pads = pads
        self.handed_out.clear()
        self.num_handed_out = 0
        self._ahead.clear()
        source = self._padded(batches) if self.pads else ((Draw(batch is None), batch) for batch in batches)
        self._source = map(self._counted, source)
        if self._empty is not None and not self.ahead(1):
            raise ValueError(self._empty)

    def __next__(self) -> Any:
        draw, batch = self._ahead.popleft() if self._ahead else next(self._source)
        self.handed_out.append(draw)
        self.num_handed_out += 1
        return batch

    def begin(self, num_prefetched: int) -> Draw | None:
        """Return the draw of the batch about to be trained on; ``num_prefetched`` later ones are handed out already."""
        draw = None
        while len(self.handed_out) > num_prefetched:  # more than one if some were None, or dropped to resume
            draw = self.handed_out.popleft()
        return draw

    def ahead(self, number: int) -> list[Draw]:
        """Draw ``number`` batches now, to be handed out later. Returns their draws, fewer if the data ends."""
        self._ahead.extend(islice(self._source, max(number - len(self._ahead), 0)))
        return [draw for draw, _ in self._ahead][:number]

    def _counted(self, drawn: tuple[Draw, Any]) -> tuple[Draw, Any]:
        draw, batch = drawn
        if self.count is not None and not (draw.is_none or draw.is_filler):
            draw.count = self.count(batch)
        return drawn

    def _padded(self, batches: Iterator[Any]) -> Iterator[tuple[Draw, Any]]:
        filler, is_first = None, True
        while True:
            batch = next(batches, _END)
            has_batch = Exchange(self._group, int(batch is not _END))
            draw = Draw(batch is None, 0, batch is _END, has_batch)
            if is_first:
                num_real = draw.num_real()
                try:
                    if 0 < num_real < self._group.size():
                        filler = self._share(batch, has_batch.numbers().index(1))
                    elif num_real:
                        filler = copy.deepcopy(batch)
                except (TypeError, pickle.PicklingError) as error:
                    raise TypeError(
                        "uneven_inputs='pad' copies the first batch of each epoch, for ranks whose data ends. This"
                        f" {type(batch).__name__} cannot be copied ({error}): let the loader yield tensors, in dicts,"
                        " tuples or dataclasses."
                    ) from error
                # Lightning skips a batch that is None, on all ranks alike: the next one is the first.
                is_first = filler is None and num_real > 0
            if draw.is_filler:
                if draw.num_real() == 0:
                    return
                batch = copy.deepcopy(filler)
            yield draw, batch

    def _share(self, batch: Any, source: int) -> Any:
        """A copy of this rank's batch, or of rank ``source``'s if it has none. A collective over the group."""
        shared = [None if batch is _END else batch]
        dist.broadcast_object_list(shared, dist.get_global_rank(self._group, source), self._group)
        return shared[0] if batch is _END else copy.deepcopy(batch)


class LoaderProxy:
    """Proxy of a loader whose batches come through ``draws``.

    It has the loader's attributes and passes ``isinstance`` for the loader's class.

    Args:
        loader: The user's loader.
        draws: Draws and hands out the batches.
        pads: Whether fillers follow.
        lengths: Lengths of all ranks' loaders if they are padded; None if any is unknown.
    """

    def __new__(cls, loader: Any, *_: Any) -> "LoaderProxy":
        """A proxy whose type has the name of the loader's, since Lightning's messages name it."""
        return super().__new__(type(type(loader).__name__, (cls,), {}))

    def __init__(self, loader: Any, draws: Draws, pads: bool = False, lengths: list[int] | None = None) -> None:
        # Past __setattr__, which sets attributes of the loader.
        vars(self).update(user_loader=loader, draws=draws, pads=pads, rank_lengths=lengths)

    @property  # type: ignore[misc]  # as proxies do
    def __class__(self) -> Any:
        return type(self.user_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.user_loader, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.user_loader.__reduce_ex__(protocol)  # a copy is one of the loader, not a proxy

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets worker_init_fn and resets _iterator.
        setattr(self.user_loader, name, value)

    def __len__(self) -> int:
        if not self.pads:
            return len(self.user_loader)
        if self.rank_lengths is None:
            raise TypeError(f"The number of batches of {type(self.user_loader).__name__} is not known on all ranks.")
        return max(self.rank_lengths)

    def __iter__(self) -> Iterator[Any]:
        # Make the loader's iterator now, as Lightning and resuming expect, not at the first draw.
        self.draws.restart(iter(self.user_loader), self.pads)
        return self.draws


def users_own(loader: Any) -> Any:
    """The user's loader behind a proxy; any other loader unchanged."""
    return vars(loader)["user_loader"] if isinstance(loader, LoaderProxy) else loader
