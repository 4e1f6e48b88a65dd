"""A loader whose batches are tracked: drawn ahead, counted, and followed by padding batches."""

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from lightning_automodel.distributed.collectives import broadcast_object
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.internals import lightning as lightning_internals

_END = object()

# What a rank does whose data ends before another's.
ERROR = "error"
PAD = "pad"
JOIN = "join"  # the steps of others, in evaluation


class PendingGather:
    """An all-gather of a few numbers over a host group: a collective that runs meanwhile, and waits only when read."""

    def __init__(self, group: dist.ProcessGroup, *numbers: float) -> None:
        # Both tensors must outlive the communication.
        self._own = torch.tensor(numbers, device="cpu", dtype=torch.float64)
        self._everyone = [torch.empty_like(self._own) for _ in range(group.size())]
        self._work = dist.all_gather(self._everyone, self._own, group, async_op=True)

    def received(self) -> torch.Tensor:
        """[ranks, numbers] of all ranks, in float64."""
        self._work.wait()
        return torch.stack(self._everyone)


@dataclass(eq=False)
class BatchHandle:
    """What is known of one batch that this rank has drawn."""

    is_filler: bool  # a padding batch: this rank has no other
    count: float | None = None  # label tokens, if counted ahead; not of batches that are None
    sent: PendingGather | None = None  # if ranks compare, each sends 1 if it had a batch, else 0

    def ranks_without(self) -> list[int]:
        """The ranks that have no such batch, where some have one; else none. Waits until all have drawn."""
        if self.sent is None:
            return []
        has_batch = self.sent.received()[:, 0]
        return (has_batch < has_batch.max()).nonzero()[:, 0].tolist()

    def first_rank_with(self) -> int | None:
        """The first rank that has such a batch, if another one has none; else None. Waits until all have drawn."""
        if self.sent is None or not self.ranks_without():
            return None
        return int(self.sent.received()[:, 0].argmax())


NO_BATCH = BatchHandle(is_filler=False)


class Wrapper:
    """Wraps a user's object, whose attributes user code reads and sets through it, but for the wrapper's own.

    The wrapper has those with which it was made; ``inner`` is the user's object.
    """

    _inner: Any

    def __init__(self, inner: Any, **attributes: Any) -> None:
        # Past __setattr__, which sets attributes of the user's object.
        vars(self).update(attributes, _inner=inner)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance: users may look for a class of torch, or their own
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._inner, name, value)


class TrackedLoader(Wrapper):
    """Wraps a user's ``loader``: yields its batches, and keeps a :class:`BatchHandle` for each.

    ``uneven`` says what happens if ranks have unequally many batches; None if they have not. With ``ERROR``
    and ``PAD``, every rank must draw equally often. A rank that has no batch while another has one raises,
    or yields padding batches until all ranks have drawn their last batch. A padding batch is a copy of the
    epoch's first batch, or of another rank's if this rank has none, as after resuming. With ``JOIN``, a rank
    without any batch raises. In training, from batch ``num_certain`` on, a rank sends with each batch whether
    it still had one, a collective over the host ``group``. As long as it has one it does not wait: the
    exchange runs while the batch is used.

    Tracked are the iterations of the Trainer alone, in training of its ``loop``. User code's own just yield the
    loader's batches. The way of a batch through the Trainer's newest iteration:

    ===========  ==============================================  =======================================
    state        where it is                                     it comes there by
    ===========  ==============================================  =======================================
    drawn        in ``_drawn``, its handle in ``_handles``       ``draw_ahead``, for a window or the last one
    handed out   its handle alone, in ``_handles``               ``_iterate``: the Trainer may prefetch
    begun        with whoever asked for its handle               ``begin``
    ===========  ==============================================  =======================================

    Attributes to set:

    ================  ==============================================================================
    ``uneven``        ``ERROR``, ``PAD`` or ``JOIN``, as above; None at first
    ``rank_lengths``  the lengths of all ranks' loaders; None if any is unknown
    ``num_certain``   as many batches have the loaders of all ranks for certain
    ``count_tokens``  counts the label tokens of a batch ahead
    ``window_start``  of a stateful loader, to resume: returns the first batch of the open window, since
                      which the states before each draw are kept
    ``is_peeked``     whether user code has drawn batches since the Trainer's iteration began
    ``num_begun``     how many of the epoch's batches were begun
    ================  ==============================================================================
    """

    rank_lengths: list[int] | None
    num_certain: float
    _drawn: deque[Any]
    _handles: deque[BatchHandle]
    _states: dict[int, Any]

    def __init__(self, loader: Any, group: Any, loop: Any) -> None:
        super().__init__(
            loader,
            uneven=None,
            rank_lengths=None,
            num_certain=inf,
            count_tokens=None,
            window_start=None,
            is_peeked=False,
            num_begun=0,
            _begun=NO_BATCH,  # the last one of these
            _source=iter(()),
            _drawn=deque(),
            _handles=deque(),
            _group=group,
            _states={},
            training_loop=loop,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._inner.__reduce_ex__(protocol)

    def __len__(self) -> int:
        if self.uneven not in (ERROR, PAD):
            return len(self._inner)
        if self.rank_lengths is None:
            raise TypeError(
                f"The number of batches of {type(self._inner).__name__} is not known on all ranks."
            )
        return max(self.rank_lengths)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, with an iterator of the loader that is made now, as Lightning and resuming expect.

        A collective over the group where the Trainer calls it in training: another batch size may have been set since.
        """
        if not lightning_internals.is_trainer_drawing():
            self.is_peeked = True
            return iter(self._inner)
        if self.rank_lengths is not None:
            lengths = PendingGather(self._group, len(self._inner)).received()
            self.rank_lengths = lengths.flatten().int().tolist()
            self.num_certain = min(self.num_certain, *self.rank_lengths)
        return self._iterate(iter(self._inner))

    def _iterate(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.is_peeked = False
        self.num_begun = 0  # in evaluation, which begins anew
        if self.uneven != JOIN:
            self.num_begun = self.training_loop.epoch_loop.batch_progress.current.processed
        self._begun = NO_BATCH
        source = self.source(batches)
        self._source = source
        self._drawn = deque()
        self._handles = deque()
        try:
            while self._drawn or self._draw():
                yield self._drawn.popleft()
        finally:
            # The Trainer may not draw to the end. Workers would live until Python's collector comes.
            if self._source is source:
                self._source = iter(())

    def _draw(self) -> bool:
        """Draw a batch, to be handed out later. Returns whether there was one."""
        for handle, batch in self._source:
            self._handles.append(handle)
            self._drawn.append(batch)
            return True
        return False

    def begin(self, number: int) -> BatchHandle:
        """The handle of batch ``number`` of the epoch, from 1. Those before it are forgotten: Lightning skips None.

        A step that draws its batches begins each before it is drawn, and has the handle of an earlier one.
        """
        while self.num_begun < number and self._handles:
            self._begun = self._handles.popleft()
            self.num_begun += 1
        return self._begun

    def draw_ahead(self, number: int) -> list[BatchHandle]:
        """Handles of the ``number`` batches after the one begun, which are drawn now. Fewer if the data ends."""
        while len(self._handles) < number and self._draw():
            pass
        return list(islice(self._handles, number))

    def state_before(self, number: int) -> Any:
        """The state of a stateful loader before batch ``number`` of the epoch was drawn, or will be."""
        if number in self._states:
            return self._states[number]
        return copy.deepcopy(self._inner.state_dict())

    def source(self, batches: Iterator[Any]) -> Iterator[tuple[BatchHandle, Any]]:
        """Batches of the Trainer's iteration with their handles. Padding or an error may follow the last one."""
        padding = None
        for number in count(self.num_begun):
            if self.window_start is not None:
                first = self.window_start()
                kept = {at: state for at, state in self._states.items() if first <= at < number}
                self._states = {**kept, number: copy.deepcopy(self._inner.state_dict())}
            batch = next(batches, _END)
            handle = BatchHandle(batch is _END)
            if number >= self.num_certain:
                handle.sent = PendingGather(self._group, not handle.is_filler)
            if handle.is_filler and not handle.ranks_without():
                if number == 0 and self.uneven == JOIN:
                    raise ValueError(without_evaluation_data([self._group.rank()]))
                return
            if handle.is_filler and self.uneven == ERROR:
                raise RuntimeError(
                    f"The train data of {ranks(handle.ranks_without())} ends with batch {number}, and other ranks"
                    " would go on and wait for more: give all ranks equally many batches, for example by"
                    f" drop_last=True, or pass Trainer(limit_train_batches={number}), or let a rank whose data has"
                    " ended take part without effect: AutomodelStrategy(uneven_inputs='pad'). A loader that leaves"
                    " batches out yields fewer than its len(): leave samples out of the dataset instead."
                )
            if self.uneven == PAD and padding is None:
                # Lightning skips a batch that is None, on all ranks alike: the next one is the first.
                padding = None if handle.is_filler else batch
                if (leader := handle.first_rank_with()) is not None:
                    padding = broadcast_object(padding, leader, self._group)
                padding = copy.deepcopy(padding)
            if handle.is_filler:
                batch = copy.deepcopy(padding)
            elif self.count_tokens is not None and batch is not None:
                handle.count = self.count_tokens(batch)
            yield handle, batch


def without_evaluation_data(numbers: list[int]) -> str:
    """What to raise where the ranks of these ``numbers`` have not a single batch."""
    return (
        f"The evaluation data holds no batch for {ranks(numbers)}, which could not join the steps of others that"
        " have some: evaluate at least one sample a rank, or start fewer ranks."
    )


def ranks(numbers: list[int]) -> str:
    """The ranks of these ``numbers``, in words."""
    return f"rank{'s' if len(numbers) > 1 else ''} {list_first(numbers)}"


def is_stateful(loader: Any) -> bool:
    """Whether ``loader`` tells its position, as torchdata's ``StatefulDataLoader`` does."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def unwrap_loader(loader: Any) -> Any:
    """The user's loader in a :class:`TrackedLoader`; any other loader unchanged."""
    while isinstance(loader, TrackedLoader):
        loader = loader._inner
    return loader
