"""Positions of training loaders in their epoch: kept without touching the data, and restored later.

A loader with ``state_dict`` goes on by its state, each rank by its own. A map-style DataLoader that torch's
own ``__iter__`` iterates goes on by its sampler: the epoch's indices are drawn again, from the same random
states, and used ones are skipped, so that nothing is loaded twice. Any other loader is refused within an
epoch.
"""

import copy
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_automodel.data.batches import Draws, TrackedLoader, is_stateful, unwrap_loader
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.resume import loops, rng
from lightning_automodel.resume.recording import RecordingSampler


class ResumesBy(Enum):
    """What a loader goes on by within an epoch. Checkpoints hold the values."""

    STATE = "state"  # that of its own state_dict(), each rank by its own
    INDICES = "indices"  # those of its sampler, drawn again and skipped
    NOTHING = "no position"  # it is refused


class KeptStates(TrackedLoader):
    """Keeps the states of a stateful ``loader``: one before each batch from the first one of an open window on.

    ``count_drawn`` returns how many batches of the epoch the Trainer's ``loop`` has drawn, ``first`` how
    many it had used when the window began.
    """

    def __init__(
        self, loader: Any, loop: Any, count_drawn: Callable[[], int], first: Callable[[], int]
    ) -> None:
        super().__init__(loader, cast(dist.ProcessGroup, dist.group.WORLD), loop)
        self._states: dict[int, Any]
        # Past __setattr__, which sets attributes of the loader.
        vars(self).update(num_drawn=0, count_drawn=count_drawn, _first=first, _states={})

    def __iter__(self) -> Draws:
        return Draws(self, self._noting(iter(self.loader)))

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.num_drawn = self.count_drawn()
        self._note()
        for batch in batches:
            self.num_drawn += 1
            yield batch
            self._note()

    def _note(self) -> None:
        first = self._first()
        needed = {at: state for at, state in self._states.items() if first <= at < self.num_drawn}
        self._states = {**needed, self.num_drawn: copy.deepcopy(self.loader.state_dict())}

    def state_before(self, number: int) -> Any:
        """The loader's state before it drew batch ``number`` of the epoch, from 0. KeyError if it was not kept."""
        if number == self.num_drawn:
            return copy.deepcopy(self.loader.state_dict())
        return self._states[number]


class TrainingLoaders:
    """The training loaders of a fit. ``first`` returns how many batches of the epoch an open window follows.

    ================  ==========================================================================
    of each loader    a position in a checkpoint holds
    ================  ==========================================================================
    all               what it resumes by, and the states of its generators and samplers
    of ``STATE``      its state
    of ``INDICES``    the random states before its first index, how many batches it has yielded,
                      its length and batch size
    ================  ==========================================================================
    """

    def __init__(self, trainer: "pl.Trainer", device: torch.device, first: Callable[[], int]) -> None:
        self._trainer = trainer
        self._device = device
        self._first = first
        self._recorders: list[RecordingSampler] = []

    def keep_states(self, loader: Any) -> Any:
        """What to iterate instead of a training loader, if it has states."""
        if not is_stateful(loader):
            return loader
        fit_loop = self._trainer.fit_loop
        return KeptStates(loader, fit_loop, lambda: max(self._fetcher.fetched, self._used()), self._first)

    def record(self, loader: Any) -> None:
        """Record the indices of a training loader that is about to be iterated, if torch itself iterates them."""
        is_of_torch = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        if not is_of_torch or isinstance(loader.dataset, IterableDataset) or _recorder(loader) is not None:
            return
        # Functions, not bound methods: a copy of the loader would follow these to the trainer and its model.
        recorder = RecordingSampler(loader, self._device, lambda: self._used(), lambda: self._first())
        self._recorders.append(recorder)

    def _used(self) -> int:
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.processed)

    @property
    def _fetcher(self) -> Any:
        return lightning_internals.training_data_fetcher(self._trainer)

    def _all(self) -> list[Any]:
        if self._fetcher is None:
            return []
        return list(self._fetcher.combined_loader.flattened)

    def positions(self, at: loops.Position) -> list[dict[str, Any]]:
        """Position of each loader when the fit is ``at`` a position."""
        return [self._position(tracked, at) for tracked in self._all()]

    def _position(self, tracked: Any, at: loops.Position) -> dict[str, Any]:
        loader = unwrap_loader(tracked)
        generators, samplers = rng.own_states(loader)
        kind = _kind(loader)
        recorder = _recorder(loader)
        if recorder is not None and recorder.has_started_over and loops.prefetches(self._trainer):
            # The loop draws ahead: it is not known with which batch the loader has started over.
            kind = ResumesBy.NOTHING
        found: dict[str, Any] = {"kind": kind.value, "generators": generators, "samplers": samplers}
        if isinstance(sampler := _innermost_sampler(loader), DistributedSampler):
            found["seed"] = sampler.seed
        # Between epochs a loader is at the end of one, and starts over.
        if (kept := _kept_states(tracked)) is not None and at.stage != loops.EPOCH:
            found["state"] = kept.state_before(at.batches)
        if recorder is not None and at.is_iterated:
            for iteration in recorder.begun(at.batches)[-1:]:
                found["iteration"] = iteration
                found["yielded"] = at.batches - iteration[1]
                found["length"] = sized_len(loader)
                found["batch_size"] = _batch_size(loader)
        return found

    def start(self, positions: list[dict[str, Any]], at: loops.Position) -> None:
        """Resume, once the loaders are iterated and the run has started. Changes the global random states."""
        loaders = list(map(unwrap_loader, self._all()))
        if at.stage != loops.EPOCH:
            self._check_same(loaders, positions)
        pairs = list(zip(loaders, positions, strict=False))
        for loader, position in pairs:
            _restore_position(at, loader, position)
        if at.is_iterated and positions:
            iter(self._fetcher)
        for recorder in self._recorders:
            recorder.record()
        for loader, position in pairs:
            # Workers have drawn by now, under the state of the sampler that this has left. Without them
            # it is set when indices are drawn, perhaps not in this epoch.
            has_drawn = is_stateful(loader) or getattr(loader, "num_workers", 0) > 0
            samplers = [] if at.is_iterated and has_drawn else position["samplers"]
            rng.set_own_states(loader, position["generators"], samplers)

    @staticmethod
    def _check_same(loaders: list[Any], positions: list[dict[str, Any]]) -> None:
        """Raise ValueError if these loaders do not go on within an epoch, or with other samples."""
        now = [(_kind(loader).value, sized_len(loader), _batch_size(loader)) for loader in loaders]
        then = [
            (position["kind"], position.get("length"), position.get("batch_size")) for position in positions
        ]
        # What is None is not known, as of another world size.
        known = [
            tuple(own if saved is None else saved for own, saved in zip(*pair, strict=True))
            for pair in zip(now, then, strict=False)
        ]
        if len(now) != len(then) or now != known or ResumesBy.NOTHING.value in (kind for kind, *_ in now):
            raise ValueError(
                "Training loaders go on within an epoch by (what, number of batches, batch size)"
                f" {now}, and the checkpoint holds {then}: pass loaders like those that were used, or resume"
                " from the end of an epoch. Only map-style DataLoaders that torch itself iterates go on by"
                " indices; for others use torchdata's StatefulDataLoader, and with shuffle=True also"
                " Trainer(use_distributed_sampler=False), since Lightning's sampler around its own has no state."
            )

    def close(self) -> None:
        """Restore the loaders' own samplers."""
        for recorder in self._recorders:
            recorder.close()
        self._recorders = []


def _kept_states(loader: Any) -> KeptStates | None:
    """Those of a training loader that has states, which may be tracked on top of it."""
    while isinstance(loader, TrackedLoader):
        if isinstance(loader, KeptStates):
            return loader
        loader = loader.loader
    return None


def _kind(loader: Any) -> ResumesBy:
    if is_stateful(loader) and isinstance(_innermost_sampler(loader), DistributedSamplerWrapper):
        return (
            ResumesBy.NOTHING
        )  # Lightning's, around a sampler whose order is no part of the loader's state
    if is_stateful(loader):
        return ResumesBy.STATE
    if _recorder(loader) is None:
        return ResumesBy.NOTHING
    return ResumesBy.INDICES


def _restore_position(at: loops.Position, loader: Any, position: dict[str, Any]) -> None:
    """Prepare a loader to be iterated: its epoch, by its sampler's seed and number of epochs, and where it was."""
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
        loader.load_state_dict(position["state"])
    recorder = _recorder(loader)
    if recorder is not None and "iteration" in position:
        recorder.repeat(tuple(position["iteration"]), position["yielded"])


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
