"""Positions of training loaders in their epoch: recorded without touching the data, and restored later.

A map-style loader resumes by its sampler: the epoch's indices are drawn again, from the same random states,
and used ones are skipped, so that nothing is loaded twice. If its class has an ``__iter__`` of its own,
which may draw ahead or leave batches out, used batches may be loaded again and dropped. A loader with
``state_dict`` resumes by its state, each rank by its own. Any other loader starts over.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_automodel.data.batches import TrackedLoader, is_stateful, unwrap_loader
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.resume import loops, rng
from lightning_automodel.resume.recording import (
    DroppingLoader,
    Iteration,
    RecordingSampler,
    Target,
    is_plain,
)

_KEEPS_ITERATOR = (
    "A run is not resumed within an epoch of its {}, whose batches come from an iterator that was made"
    " before the fit or before this epoch, or not from its sampler; from the end of an epoch it starts over"
    " with another order. To keep workers from epoch to epoch, use torch's"
    " DataLoader(persistent_workers=True)."
)

# Streaming libraries order an epoch by a count of their own: litdata's loaders, and data sets of MosaicML's
# streaming.
_EPOCH_COUNTERS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda loader: loader, "current_epoch"),
    (lambda loader: getattr(loader, "dataset", None), "next_epoch"),
)


class ResumesBy(Enum):
    """What a loader goes on by within an epoch. Checkpoints hold the values."""

    STATE = "state"  # that of its own state_dict(), each rank by its own
    INDICES = "indices"  # those of its sampler, drawn again and skipped
    NOTHING = "no position"  # it starts over


class TrainingLoaders:
    """The training loaders of a fit. ``say`` shows the user a warning, once.

    ================  ==========================================================================
    of each loader    a position in a checkpoint holds
    ================  ==========================================================================
    all               what it resumes by, and the states of its generators and samplers
    of ``STATE``      its state; between epochs its count of epochs, if it has one
    of ``INDICES``    the random states before its first index, how many batches it has yielded,
                      the indices that workers have drawn ahead, its length and batch size
    ================  ==========================================================================
    """

    def __init__(self, trainer: "pl.Trainer", device: torch.device, say: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._device = device
        self._say = say
        self._recorders: list[RecordingSampler] = []
        self._states: dict[int, list[Any]] = {}  # of loaders, before the batches of these numbers were drawn

    def process(self, loader: Any) -> None:
        """Record a training loader that is about to be iterated."""
        if is_stateful(loader) or _recorder(loader) is not None:
            return
        name = type(loader).__name__
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            self._say_if_saving(
                f"A run that is resumed within an epoch starts over with its {name}, which is neither a"
                " map-style DataLoader nor has state_dict() and load_state_dict(): use torchdata's"
                " StatefulDataLoader, or resume from the end of an epoch."
            )
        else:
            # Not a bound method: a copy of the loader would follow it to the trainer and its model.
            self._recorders.append(RecordingSampler(loader, self._device, lambda: self._used_and_epoch()))

    def _say_if_saving(self, text: str) -> None:
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, Checkpoint) for callback in callbacks):
            self._say(text)

    def _used_and_epoch(self) -> tuple[int, int]:
        fit_loop: Any = self._trainer.fit_loop
        used = fit_loop.epoch_loop.batch_progress.current.processed
        return used, fit_loop.epoch_progress.current.processed

    @property
    def _fetcher(self) -> Any:
        return lightning_internals.training_data_fetcher(self._trainer)

    def _all(self) -> list[Any]:
        if self._fetcher is None:
            return []
        return list(map(unwrap_loader, self._fetcher.combined_loader.flattened))

    def before_fetch(self) -> None:
        """Called before a batch is drawn. If the loop draws one batch ahead, the last two states are kept."""
        if loops.prefetches(self._trainer) and any(map(is_stateful, self._all())):
            number = self._fetcher.fetched
            states = [_state_of(loader) for loader in self._all()]
            self._states = {number - 1: self._states.get(number - 1, []), number: states}

    def positions(self, at: loops.Position) -> list[dict[str, Any]]:
        """Position of each loader when the fit is ``at`` a position."""
        return [self._position(index, loader, at) for index, loader in enumerate(self._all())]

    def _position(self, index: int, loader: Any, at: loops.Position) -> dict[str, Any]:
        generators, samplers = rng.own_states(loader)
        found: dict[str, Any] = {"kind": _kind(loader).value, "generators": generators, "samplers": samplers}
        if isinstance(sampler := _innermost_sampler(loader), DistributedSampler):
            found["seed"] = sampler.seed
        # Between epochs it is at the end of one, and starts over; so is a generator before its first batch.
        is_generator = inspect.isgeneratorfunction(type(loader).__iter__)
        begins = at.stage == loops.EPOCH or (at.batches == 0 and is_generator)
        if is_stateful(loader) and begins:
            found["epoch_counters"] = _epoch_counters(loader)
        elif is_stateful(loader) and loops.prefetches(self._trainer):
            ahead = self._states.get(at.batches) or [None] * (index + 1)
            found["state"] = ahead[index]
        elif is_stateful(loader):
            found["state"] = _state_of(loader)
        recorder = _recorder(loader)
        if recorder is not None and at.is_iterated:
            found |= self._position_of_indices(loader, recorder, at)
        return found

    def _position_of_indices(
        self, loader: Any, recorder: RecordingSampler, at: loops.Position
    ) -> dict[str, Any]:
        """Where a map-style loader is within the epoch; empty if it has not begun."""
        newest = recorder.iteration
        if newest is None or newest.epoch < at.epochs:
            if at.batches == 0:  # a generator draws when its first batch is asked for
                return {}
            name = type(loader).__name__
            self._say_if_saving(_KEEPS_ITERATOR.format(name))
            return {"keeps_iterator": name}
        yielded = at.batches - newest.start
        ahead = newest.ahead(yielded)
        return {
            "iteration": (newest.states, newest.start),
            "yielded": yielded,
            "length": sized_len(loader),
            "batch_size": _batch_size(loader),
            "ahead": ahead if is_plain(ahead) else [],
            # Otherwise it has drawn ahead, or has left batches out.
            "is_one_to_one": newest.num_drawn == yielded + loops.prefetches(self._trainer),
        }

    def start(self, positions: list[dict[str, Any]], at: loops.Position) -> None:
        """Resume, once the loaders are iterated and the run has started. Changes the global random states."""
        loaders = self._all()
        kinds = [_kind(loader).value for loader in loaders]
        saved = [position["kind"] for position in positions]
        if at.stage != loops.EPOCH and kinds != saved:
            raise ValueError(
                f"Training loaders go on within an epoch by {kinds}, and the checkpoint holds {saved}: pass"
                " loaders like those that were used, or resume from the end of an epoch."
            )
        keeping = [position["keeps_iterator"] for position in positions if "keeps_iterator" in position]
        if at.stage != loops.EPOCH and keeping:
            raise ValueError(
                f"The checkpoint was written within an epoch of a {keeping[0]}, whose batches come from an"
                " iterator that was made before the fit or before this epoch, or not from its sampler: where"
                " it stood is not known. Resume from a checkpoint of the end of an epoch, or use torch's"
                " DataLoader(persistent_workers=True)."
            )
        pairs = list(zip(loaders, positions, strict=False))
        dropped = [self._restore_position(at, loader, position) for loader, position in pairs]
        if at.is_iterated and positions:
            with self._dropping(dropped):
                iter(self._fetcher)
        for recorder in self._recorders:
            recorder.repeat(None)
        if not at.is_iterated:
            _start_persistent_workers(loaders)
        self._states = {at.batches: [position.get("state") for position in positions]}
        for loader, position in pairs:
            # A recorder that has drawn nothing yet sets its samplers when it draws, perhaps not in this
            # epoch.
            own = _recorder(loader)
            has_drawn = "iteration" in position and own is not None and own.has_drawn
            samplers = position["samplers"]
            if at.is_iterated and (is_stateful(loader) or has_drawn):
                samplers = []
            rng.set_own_states(loader, position["generators"], samplers)

    @contextmanager
    def _dropping(self, numbers: list[int]) -> Iterator[None]:
        """Context in which a loader that is iterated first loads and drops its number of batches."""
        combined = self._fetcher.combined_loader
        present = combined.flattened
        dropping = list(present)
        with PatchStack() as patches:
            for index, number in enumerate(numbers):
                loader = present[index]
                if number and isinstance(loader, TrackedLoader):
                    patches.set(loader, "loader", DroppingLoader(loader.loader, number))
                elif number:
                    dropping[index] = DroppingLoader(loader, number)
            combined.flattened = dropping
            try:
                yield
            finally:
                combined.flattened = present

    def _restore_position(self, at: loops.Position, loader: Any, position: dict[str, Any]) -> int:
        """Prepare a loader to be iterated; return how many batches it must then load and drop."""
        _restore_epoch(at, loader, position)
        recorder = _recorder(loader)
        if recorder is None or "iteration" not in position:
            return 0
        yielded = position["yielded"]
        self._check_same(loader, position)
        states, start = position["iteration"]
        iteration = Iteration(states, start, at.epochs)
        if iteration.start and loops.prefetches(self._trainer):
            self._say(
                "A training loader had started over within the epoch, beside one that has no length: samples"
                " of this epoch may be left out or used twice."
            )
        if not _has_own_iter(loader):
            recorder.repeat(Target(iteration, yielded, position.get("ahead", [])))
            return 0
        # A generator begins with its first batch. So one is drawn here, before random states are restored.
        num_skipped = 0
        if position.get("is_one_to_one", True):
            num_skipped = max(yielded - 1, 0)
        recorder.repeat(Target(iteration, num_skipped, []))
        return yielded - num_skipped

    def _check_same(self, loader: Any, position: dict[str, Any]) -> None:
        """Raise ValueError if this loader's indices would be other samples than those of the position."""
        length = sized_len(loader)
        yielded = position["yielded"]
        size = _batch_size(loader)
        if length is not None and length != (position["length"] or max(length, yielded)):
            raise ValueError(
                f"The checkpoint was written after batch {yielded} of {position['length']}, and a training"
                f" loader has {length} now: pass the loader that was used, or resume from the end of an"
                " epoch."
            )
        if size != position.get("batch_size", size):
            raise ValueError(
                f"The checkpoint was written after batch {yielded} of a training loader with"
                f" batch_size={position['batch_size']}, which is {size} now: samples of this epoch would be"
                " left out or used twice. Pass the batch size that was used, or resume from the end of an"
                " epoch."
            )

    def end_epoch(self) -> None:
        """Called when the batches of an epoch have ended on this rank."""
        for loader in self._all():
            # A resumed loader of litdata whose epoch a limit has ended would go on there in the next epoch.
            if is_stateful(loader) and getattr(loader, "restore", None) is True:
                loader.restore = False

    def close(self) -> None:
        """Restore the loaders' own samplers."""
        for recorder in self._recorders:
            recorder.close()
        self._recorders = []


def _restore_epoch(at: loops.Position, loader: Any, position: dict[str, Any]) -> None:
    """Restore which epoch a loader is in, by its sampler's seed and number of epochs, its own state or counters."""
    sampler = _innermost_sampler(loader)
    if "seed" in position and isinstance(sampler, DistributedSampler):
        # Lightning seeds its sampler from PL_GLOBAL_SEED, which may differ now, or not be set.
        sampler.seed = position["seed"]
    if at.is_iterated:
        for owner in (getattr(loader, "sampler", None), sampler):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(at.epochs)
    if position.get("state") is not None:
        if _is_litdatas(loader):
            # Until it is iterated, litdata writes its data set's epoch into the state that it has
            # loaded.
            loader.dataset.set_epoch(position["state"]["current_epoch"])
        loader.load_state_dict(position["state"])
    for owner, name in _EPOCH_COUNTERS:
        if name in position.get("epoch_counters", {}):
            setattr(owner(loader), name, position["epoch_counters"][name])


def _start_persistent_workers(loaders: list[Any]) -> None:
    """Start the workers that a generator starts in the first epoch only; this draws a random number, as then."""
    for loader in loaders:
        if isinstance(loader, DataLoader) and loader.persistent_workers and _has_own_iter(loader):
            DataLoader.__iter__(loader)


def _has_own_iter(loader: Any) -> bool:
    return type(loader).__iter__ is not DataLoader.__iter__


def _kind(loader: Any) -> ResumesBy:
    if is_stateful(loader):
        return ResumesBy.STATE
    if _recorder(loader) is None:
        return ResumesBy.NOTHING
    return ResumesBy.INDICES


def _is_litdatas(loader: Any) -> bool:
    return is_stateful(loader) and hasattr(loader, "restore") and hasattr(loader, "current_epoch")


def _epoch_counters(loader: Any) -> dict[str, int]:
    found = {name: getattr(owner(loader), name, None) for owner, name in _EPOCH_COUNTERS}
    return {name: int(value) for name, value in found.items() if isinstance(value, (int, np.integer))}


def _state_of(loader: Any) -> Any:
    if not is_stateful(loader):
        return None
    return copy.deepcopy(loader.state_dict())


def _batch_size(loader: Any) -> int | None:
    return getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def _recorder(loader: Any) -> RecordingSampler | None:
    samplers = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    return next((sampler for sampler in samplers if isinstance(sampler, RecordingSampler)), None)


def _innermost_sampler(loader: Any) -> Any:
    own = getattr(loader, "sampler", None)
    if isinstance(own, RecordingSampler):  # batch_size=None
        return own.innermost
    return getattr(getattr(loader, "batch_sampler", None), "sampler", own)
