"""Positions of training loaders in their epoch: recorded without touching the data, and restored in a new process.

A map-style loader resumes by its sampler: the epoch's indices are drawn again, from the same random states, and used
ones are skipped, so that nothing is loaded twice. A loader with ``state_dict`` resumes by its state, each rank by its
own. Any other loader starts over.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler
from typing_extensions import override

from lightning_automodel import lightning_internals
from lightning_automodel.data.batches import is_stateful, users_own
from lightning_automodel.resume import loops, rng


@dataclass
class Iteration:
    """One iteration over the indices of a loader."""

    states: tuple[dict[str, Any], rng.OwnStates] | None  # before its first index; None of another world size
    start: int  # batches of the epoch that the loop had used before; not 0 if a shorter loader has started over


class RecordingSampler(Sampler[Any]):
    """Replaces the (batch) sampler of a DataLoader until :meth:`close`: yields the same, and can skip what was used.

    ``iteration`` is the newest one, None before its first index; ``target`` one to repeat, and how many of its batches
    to skip. ``batches`` returns how many batches of the epoch the loop has used.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, batches: Callable[[], int]) -> None:
        self._loader, self._device, self._batches = loader, device, batches
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner: Any = getattr(loader, self._name)
        self.target: tuple[Iteration, int] | None = None
        self.iteration: Iteration | None = None
        # DataLoader refuses to set its sampler after its construction.
        vars(loader)[self._name] = self

    def close(self) -> None:
        """Restore the loader's own sampler."""
        vars(self._loader)[self._name] = self._inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    @override
    def __iter__(self) -> Iterator[Any]:
        # Here and not with the first index, before which the first window's snapshot is taken.
        self.iteration = None if self.target is None else self.target[0]
        return self._record() if self.target is None else self._replay(*self.target)

    def _record(self) -> Iterator[Any]:
        self.iteration = Iteration((rng.global_states(self._device), rng.own_states(self._loader)), self._batches())
        yield from self._inner

    def _replay(self, iteration: Iteration, batches: int) -> Iterator[Any]:
        now, (generators, _) = rng.global_states(self._device), rng.own_states(self._loader)
        if iteration.states is not None:
            rng.set_global_states(iteration.states[0], self._device)
            rng.set_own_states(self._loader, *iteration.states[1])
        indices = iter(self._inner)
        for _ in range(batches):
            next(indices, None)
        # The first index is drawn here, under the states of that time, since drawing it may use random numbers.
        head = [] if batches else list(islice(indices, 1))
        rng.set_global_states(now, self._device)
        rng.set_own_states(self._loader, generators, [])
        yield from head
        yield from indices


class TrainingLoaders:
    """The training loaders of a fit. ``say`` shows the user a warning, once."""

    def __init__(self, trainer: "pl.Trainer", device: torch.device, say: Callable[[str], None]) -> None:
        self._trainer, self._device, self._say = trainer, device, say
        self._recorders: list[RecordingSampler] = []
        self._states: dict[int, list[Any]] = {}  # of loaders, before the batches of these numbers were drawn

    def process(self, loader: Any) -> None:
        """Record a training loader that is about to be iterated."""
        is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if is_stateful(loader) or _recorder(loader) is not None:
            return
        if is_map_style:
            progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
            self._recorders.append(RecordingSampler(loader, self._device, lambda: progress.current.processed))
        elif any(isinstance(callback, Checkpoint) for callback in self._trainer.callbacks):  # type: ignore[attr-defined]
            self._say(
                f"A run that is resumed within an epoch starts over with its {type(loader).__name__}, which is neither"
                " a map-style DataLoader nor has state_dict() and load_state_dict(): use torchdata's"
                " StatefulDataLoader, or resume from the end of an epoch."
            )

    @property
    def _fetcher(self) -> Any:
        return lightning_internals.training_data_fetcher(self._trainer)

    def _all(self) -> list[Any]:
        return [] if self._fetcher is None else list(map(users_own, self._fetcher.combined_loader.flattened))

    def before_fetch(self) -> None:
        """Called before a batch is drawn. If that is one batch ahead of the loop, the last two states are kept."""
        if loops.prefetches(self._trainer) and any(map(is_stateful, self._all())):
            number = self._fetcher.fetched
            states = [_state_of(loader) for loader in self._all()]
            self._states = {number - 1: self._states.get(number - 1, []), number: states}

    def positions(self, at: loops.Position) -> list[dict[str, Any]]:
        """Position of each loader, where the fit is ``at``."""
        return [self._position(index, loader, at) for index, loader in enumerate(self._all())]

    def _position(self, index: int, loader: Any, at: loops.Position) -> dict[str, Any]:
        generators, samplers = rng.own_states(loader)
        found: dict[str, Any] = {"kind": _kind(loader), "generators": generators, "samplers": samplers}
        if isinstance(sampler := _innermost_sampler(loader), DistributedSampler):
            found["seed"] = sampler.seed
        recorder = _recorder(loader)
        if is_stateful(loader) and at.stage != loops.EPOCH:  # between epochs it is at the end of one, and starts over
            ahead = self._states.get(at.batches) or [None] * (index + 1)
            found["state"] = ahead[index] if loops.prefetches(self._trainer) else _state_of(loader)
        if recorder is not None and recorder.iteration is not None and at.is_iterated:
            newest = recorder.iteration
            found["iteration"] = newest.states, newest.start
            found |= {"yielded": at.batches - newest.start, "length": sized_len(loader)}
        return found

    def start(self, positions: list[dict[str, Any]], at: loops.Position) -> None:
        """Resume, once the loaders are iterated and the run has started. Changes the global random states."""
        loaders = self._all()
        kinds, saved = list(map(_kind, loaders)), [position["kind"] for position in positions]
        if at.stage != loops.EPOCH and kinds != saved:
            raise ValueError(
                f"Training loaders go on within an epoch by {kinds}, and the checkpoint holds {saved}: pass loaders"
                " like those that were used, or resume from the end of an epoch."
            )
        for loader, position in zip(loaders, positions, strict=False):
            self._restore_position(at, loader, position)
        if at.is_iterated and positions:
            iter(self._fetcher)
        self._states = {at.batches: [position.get("state") for position in positions]}
        for recorder in self._recorders:
            recorder.target = None
        for loader, position in zip(loaders, positions, strict=False):
            goes_on = at.is_iterated and (is_stateful(loader) or "iteration" in position)
            rng.set_own_states(loader, position["generators"], [] if goes_on else position["samplers"])

    def _restore_position(self, at: loops.Position, loader: Any, position: dict[str, Any]) -> None:
        recorder, sampler = _recorder(loader), _innermost_sampler(loader)
        if "seed" in position and isinstance(sampler, DistributedSampler):
            # Lightning seeds its sampler from PL_GLOBAL_SEED, which may differ now, or not be set.
            sampler.seed = position["seed"]
        if at.is_iterated:
            for owner in (getattr(loader, "sampler", None), sampler):
                if callable(set_epoch := getattr(owner, "set_epoch", None)):
                    set_epoch(at.epochs)
        if position.get("state") is not None:
            loader.load_state_dict(position["state"])
        if recorder is not None and "iteration" in position:
            iteration, yielded, length = Iteration(*position["iteration"]), position["yielded"], sized_len(loader)
            if length is not None and length != (position["length"] or max(length, yielded)):
                raise ValueError(
                    f"The checkpoint was written after batch {yielded} of {position['length']}, and a training loader"
                    f" has {length} now: pass the loader that was used, or resume from the end of an epoch."
                )
            if iteration.start and loops.prefetches(self._trainer):
                self._say(
                    "A training loader had started over within the epoch, beside one that has no length: samples of"
                    " this epoch may be left out or used twice."
                )
            recorder.target = iteration, yielded

    def close(self) -> None:
        """Restore the loaders' own samplers."""
        for recorder in self._recorders:
            recorder.close()
        self._recorders = []


def _kind(loader: Any) -> str:
    """What a loader goes on by."""
    return "state" if is_stateful(loader) else "no position" if _recorder(loader) is None else "indices"


def _state_of(loader: Any) -> Any:
    return copy.deepcopy(loader.state_dict()) if is_stateful(loader) else None


def _recorder(loader: Any) -> RecordingSampler | None:
    samplers = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    return next((sampler for sampler in samplers if isinstance(sampler, RecordingSampler)), None)


def _innermost_sampler(loader: Any) -> Any:
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
