"""Where training loaders are in their epoch: noted without touching the data, and taken up again in a new process.

A map-style loader is put back by drawing the epoch's indices anew, from the random states that they were drawn from,
and passing over those that were used: nothing is loaded twice. A loader with ``state_dict`` goes on by that, each rank
by its own. What has neither is drawn from, and the batches dropped.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_automodel import lightning_internals
from lightning_automodel.resume import rng

_RESUMED_DRAWS = (
    "A training loader that is neither a map-style DataLoader nor has state_dict() and load_state_dict() resumes by"
    " drawing and dropping {count} batches; torchdata's StatefulDataLoader does without."
)
_WORKERS = (
    "Workers of training loaders start with fresh random states on resume: what they draw differs, not the order."
)
_OTHER_ORDER = (
    "The ranks are not those that wrote the checkpoint, and a training loader has no DistributedSampler: of its epoch,"
    " samples may be left out or used twice."
)
_OTHER_LENGTH = (
    "A training loader had {then} batches when the checkpoint was written, and has {now}: of the epoch, samples may be"
    " left out or used twice."
)
_TOO_SHORT = (
    "The checkpoint was written after batch {used} of an epoch, and a training loader has {now} now: pass the loader"
    " that was used, or resume from the end of an epoch."
)
_OUT_OF_ORDER = "A training loader with in_order=False does not tell which batches were used: it resumes inexactly."


_Captured = tuple[dict[str, Any], list[Any], list[Any]]
"""Global random states, then those of a loader's own generators, then the states of its samplers."""


@dataclass(frozen=True)
class MapPosition:
    """Where the iterator of a map-style loader is.

    Attributes:
        made: The random states as the iterator was made, or made to start over; None where other ranks did.
        first: Those as it drew its first index, which a loader without workers does with its first batch; None before.
        yielded: Batches that it has yielded.
        was_restarted: Whether it had served an epoch before (persistent workers).
        length: Batches of an epoch; None where the loader does not know, or other ranks made it.
    """

    made: _Captured | None
    first: _Captured | None
    yielded: int
    was_restarted: bool
    length: int | None


class FollowedLoader:
    """Knows the position of a map-style DataLoader, and can put it there.

    Methods are replaced on the loader, until :meth:`close`, and on its iterators.
    """

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._iterator: Callable[[], Any] = lambda: None
        self._made: _Captured | None = None
        self._first: _Captured | None = None
        self._was_restarted = False
        self._target: MapPosition | None = None
        loader._get_iterator = self._make  # type: ignore[method-assign]

    def position(self) -> MapPosition | None:
        """The position of the newest iterator; None before there is one."""
        iterator = self._iterator()
        if iterator is None or self._made is None:
            return None
        length = sized_len(self._loader)
        return MapPosition(self._made, self._first, iterator._num_yielded, self._was_restarted, length)

    def remake_at(self, position: MapPosition) -> None:
        """Let the next iterator begin at ``position``."""
        self._target = position

    def close(self) -> None:
        """Give the loader back as it came."""
        self._loader.__dict__.pop("_get_iterator", None)
        iterator = self._iterator()
        for name in ("_next_index", "_reset"):
            if iterator is not None:
                iterator.__dict__.pop(name, None)

    def _capture(self) -> _Captured:
        return (rng.note(self._device), *_own_states(self._loader))

    def _return_to(self, captured: _Captured | None) -> None:
        if captured is None:
            return
        rng.set_to(captured[0], self._device)
        _set_own_states(self._loader, captured[1:])

    def _make(self) -> Any:
        target, self._target = self._target, None
        if target is None:
            self._made, self._first, self._was_restarted = self._capture(), None, False
            return self._follow(type(self._loader)._get_iterator(self._loader))
        self._made, self._first, self._was_restarted = target.made, target.first, target.was_restarted
        states, (generators, _) = rng.note(self._device), _own_states(self._loader)
        iterator = self._remake(target) if self._loader.num_workers == 0 else self._remake_with_workers(target)
        iterator._num_yielded = target.yielded
        rng.set_to(states, self._device)
        _set_own_states(self._loader, (generators, []))
        return self._follow(iterator)

    def _follow(self, iterator: Any) -> Any:
        self._iterator = weakref.ref(iterator)
        if self._loader.num_workers == 0 and self._first is None:
            iterator._next_index = self._note_first_index
        elif self._loader.num_workers > 0:
            iterator._reset = self._note_restart
        return iterator

    def _note_first_index(self) -> Any:
        iterator = self._iterator()
        del iterator._next_index
        self._first = (*self._capture()[:2], [])
        return iterator._next_index()

    def _note_restart(self, loader: DataLoader, first_iter: bool = False) -> None:
        iterator = self._iterator()
        self._made, self._was_restarted = self._capture(), True
        type(iterator)._reset(iterator, loader, first_iter)

    def _remake(self, target: MapPosition) -> Any:
        self._return_to(target.made)
        iterator = type(self._loader)._get_iterator(self._loader)
        self._return_to(target.first)
        for _ in range(target.yielded):
            next(iterator._sampler_iter)
        return iterator

    def _remake_with_workers(self, target: MapPosition) -> Any:
        """Workers are sent indices as soon as there is an iterator, so these are passed over within its making."""
        name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(self._loader, name)
        rest = _From(sampler, target.yielded)
        try:
            # DataLoader refuses to have its samplers set once it is made.
            self._loader.__dict__[name] = [] if target.was_restarted else rest
            self._return_to(target.made)
            iterator = type(self._loader)._get_iterator(self._loader)
            if target.was_restarted:
                iterator._index_sampler = rest
                self._return_to(target.made)
                iterator._reset(self._loader)
        finally:
            self._loader.__dict__[name] = sampler
        iterator._index_sampler = sampler
        return iterator


def _own_states(loader: Any) -> tuple[list[Any], list[Any]]:
    """States of the generators and of the samplers that a loader holds."""
    generators = rng.note_generators(rng.generators_of(loader))
    return generators, [sampler.state_dict() for sampler in rng.samplers_of(loader)]


def _set_own_states(loader: Any, states: tuple[list[Any], list[Any]]) -> None:
    rng.set_generators(rng.generators_of(loader), states[0])
    for sampler, state in zip(rng.samplers_of(loader), states[1], strict=False):
        sampler.load_state_dict(copy.deepcopy(state))


class _From:
    """A sampler without the first ``start`` of what it yields."""

    def __init__(self, sampler: Any, start: int) -> None:
        self._sampler, self._start = sampler, start

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self._sampler)
        for _ in range(self._start):
            next(indices)
        return indices

    def __len__(self) -> int:
        return len(self._sampler)


@dataclass(frozen=True)
class Position:
    """Where a combination of loaders is.

    Attributes:
        started: Global random states as the loaders began to be iterated for the epoch, then the states of each
            loader's generators and samplers; None where other ranks did.
        ahead: Global random states before the batch was drawn that the loop has not taken yet; it draws one ahead where
            it cannot know otherwise which is the last. None where it does not.
        consumed: Batches that the training loop has taken.
        index: Batches of the combination, as hooks count them.
        cycled: For each loader that starts over as long as others last, whether it has.
        loaders: For each loader a :class:`MapPosition`, a dict with its own state, or None.
    """

    started: tuple[dict[str, Any], list[Any]] | None
    ahead: dict[str, Any] | None
    consumed: int
    index: int
    cycled: list[bool]
    loaders: list[MapPosition | dict[str, Any] | None]


class TrainingLoaders:
    """The training loaders of a fit.

    Args:
        device: Whose random states to note.
        say: Tells the user, once.
    """

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device, self._say = device, say
        self._combined: Any = None
        self._followed: dict[int, FollowedLoader] = {}
        self._target: Position | None = None
        self._draws = False
        self._started: tuple[dict[str, Any], list[Any]] | None = None
        self._before: tuple[dict[str, Any], list[Any]] | None = None

    def begin_iteration(self) -> None:
        """The loaders are about to be iterated for an epoch."""
        own = [_own_states(loader) for loader in self._combined.flattened]
        self._started, self._before = (rng.note(self._device), own), None

    def begin_batch(self, fetcher: Any) -> None:
        """A batch is about to be taken, and the one after it drawn where the loop draws ahead."""
        if _buffered(fetcher):
            stateful = [
                loader for loader in self._combined.flattened if isinstance(loader, lightning_internals.Stateful)
            ]
            self._before = rng.note(self._device), [loader.state_dict() for loader in stateful]

    def follow(self, combined: Any) -> None:
        """Follow these loaders instead of those before; to be called before they are iterated."""
        self.close()
        self._combined = combined
        for index, loader in enumerate(combined.flattened):
            if _is_map_style(loader):
                self._followed[index] = FollowedLoader(loader, self._device)

    def remake_at(self, position: Position, epoch: int) -> None:
        """Let the loaders be iterated from ``position`` of ``epoch`` next."""
        if len(position.loaders) != len(self._combined.flattened):
            raise ValueError(
                f"The checkpoint holds positions of {len(position.loaders)} training loaders, and there are"
                f" {len(self._combined.flattened)}: pass the same loaders, or resume from the end of an epoch."
            )
        self._target = position
        pairs = list(zip(self._combined.flattened, position.loaders, strict=True))
        self._draws = position.consumed > 0 and not all(
            self._can_go_on(index, at) for index, (_, at) in enumerate(pairs)
        )
        for index, (loader, at) in enumerate(pairs):
            lightning_internals.set_sampler_epoch(loader, epoch)
            if isinstance(at, MapPosition):
                self._tell_limits(loader, at)
            if not self._draws:
                self._go_on(index, at)
        if position.started is not None:
            self._begin_as(position)

    def _can_go_on(self, index: int, at: "MapPosition | dict[str, Any] | None") -> bool:
        """Whether a loader can begin where it was, so that it need not be drawn from."""
        is_stateful = isinstance(self._combined.flattened[index], lightning_internals.Stateful)
        return isinstance(at, dict) if is_stateful else isinstance(at, MapPosition) and index in self._followed

    def _go_on(self, index: int, at: "MapPosition | dict[str, Any] | None") -> None:
        if isinstance(at, MapPosition) and index in self._followed:
            self._followed[index].remake_at(at)
        elif isinstance(at, dict) and self._can_go_on(index, at):
            self._combined.flattened[index].load_state_dict(at["state"])

    def _begin_as(self, position: Position) -> None:
        """Set random states to those that the loaders were iterated with, or drew with what they have drawn ahead."""
        assert position.started is not None
        self._started = states, own = position.started
        for loader, of_loader in zip(self._combined.flattened, own, strict=False) if self._draws else ():
            _set_own_states(loader, of_loader)
        rng.set_to(states if self._draws or position.ahead is None else position.ahead, self._device)

    def _tell_limits(self, loader: DataLoader, at: MapPosition) -> None:
        length = sized_len(loader)
        if length is not None and length < at.yielded:
            raise ValueError(_TOO_SHORT.format(used=at.yielded, now=length))
        if None not in (length, at.length) and length != at.length:
            self._say(_OTHER_LENGTH.format(then=at.length, now=length))
        if at.made is None and at.yielded and not isinstance(_sampler(loader), DistributedSampler):
            self._say(_OTHER_ORDER)
        if loader.num_workers > 0:
            self._say(_WORKERS)
            if not getattr(loader, "in_order", True):
                self._say(_OUT_OF_ORDER)

    def place(self, fetcher: Any) -> None:
        """Finish, once ``fetcher`` iterates the loaders."""
        position, self._target = self._target, None
        if position is None:
            return
        iterator = self._combined._iterator
        if self._draws:
            self._say(_RESUMED_DRAWS.format(count=position.consumed))
            batches = getattr(fetcher, "iterator_wrapper", fetcher)  # what a step is given that draws its batches
            for drawn in range(position.consumed):
                if next(batches, None) is None:
                    raise ValueError(_TOO_SHORT.format(used=position.consumed, now=drawn))
        else:
            iterator._idx += position.index
            if position.cycled:
                iterator._consumed = list(position.cycled)
        fetcher.fetched = position.consumed + len(_buffered(fetcher))

    def position(self, fetcher: Any) -> Position | None:
        """The position now; None where the loaders are not iterated."""
        iterator = None if self._combined is None else self._combined._iterator
        if iterator is None or fetcher is None or fetcher.iterator is None:
            return None
        buffered = len(_buffered(fetcher))
        started = None if self._started is None else self._started[0]
        ahead, states = self._before if self._before is not None and buffered else (started, None)
        return Position(
            started=self._started,
            ahead=ahead if buffered else None,
            consumed=fetcher.fetched - buffered,
            index=iterator._idx - buffered,
            cycled=list(getattr(iterator, "_consumed", [])),
            loaders=[self._one(index, buffered, states) for index in range(len(self._combined.flattened))],
        )

    def _one(self, index: int, buffered: int, states: list[Any] | None) -> MapPosition | dict[str, Any] | None:
        loader = self._combined.flattened[index]
        if isinstance(loader, lightning_internals.Stateful):
            if not buffered:
                return {"state": loader.state_dict()}
            stateful = [
                other for other in self._combined.flattened[:index] if isinstance(other, lightning_internals.Stateful)
            ]
            return None if states is None else {"state": states[len(stateful)]}
        position = self._followed[index].position() if index in self._followed else None
        return None if position is None else replace(position, yielded=position.yielded - buffered)

    def close(self) -> None:
        """Give the loaders back."""
        for followed in self._followed.values():
            followed.close()
        self._followed, self._combined = {}, None


def _buffered(fetcher: Any) -> list[Any]:
    return getattr(fetcher, "batches", [])


def _sampler(loader: DataLoader) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _is_map_style(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader, lightning_internals.Stateful)
    )


def savable(position: Position | None) -> dict[str, Any] | None:
    """``position`` as a checkpoint holds it."""
    if position is None:
        return None
    loaders = [vars(at) if isinstance(at, MapPosition) else at for at in position.loaders]
    return {**vars(position), "loaders": loaders}


def loaded(saved: dict[str, Any] | None) -> Position | None:
    """The inverse of :func:`savable`."""
    if saved is None:
        return None
    loaders = [MapPosition(**at) if at is not None and "made" in at else at for at in saved["loaders"]]
    return Position(**{**saved, "loaders": loaders})
