"""Positions of training loaders in their epoch: recorded without touching the data, and restored in a new process.

A map-style loader resumes by its sampler: the epoch's indices are drawn again, from the same random states, and used
ones are skipped, so that nothing is loaded twice. A loader with ``state_dict`` resumes by its state, each rank by its
own. Any other loader is drawn from, and the used batches are dropped.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler
from typing_extensions import override

from lightning_automodel import lightning_internals
from lightning_automodel.data.batches import is_stateful, users_own
from lightning_automodel.resume import loops, rng

_TOO_SHORT = (
    "The checkpoint was written after batch {used} of an epoch, and a training loader has {now} now: pass the loader"
    " that was used, or resume from the end of an epoch."
)
_States = tuple[dict[str, Any], list[Any], list[Any]]
"""Global random states, those of a loader's own generators, and the states of its samplers."""


@dataclass
class Iteration:
    """One iteration over the indices of a loader.

    Attributes:
        made: The states when it was made; None if it was made with a different world size.
        first: The states when its first index was drawn, which a loader without workers does with its first batch.
        start: Batches of the epoch that the loop had used before; not 0 if a shorter loader has started over.
    """

    made: _States | None
    first: _States | None
    start: int


class RecordingSampler(Sampler[Any]):
    """Wraps the (batch) sampler of a DataLoader: yields the same, and can skip what was used.

    Args:
        loader: The DataLoader whose sampler is replaced until :meth:`close`.
        device: Device of this rank, whose random states are recorded.
        batches: Returns how many batches of the epoch the loop has used.

    Attributes:
        iteration: The newest iteration; None before the first.
        target: An iteration to repeat, and how many batches of it to skip; a stream only starts from its states. None:
            iterations start at the beginning.
        is_stream: Whether the dataset is iterable, so that its sampler yields nothing of use.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, batches: Callable[[], int]) -> None:
        self._loader, self._device, self._batches = loader, device, batches
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner: Any = getattr(loader, self._name)
        self.is_stream = isinstance(loader.dataset, IterableDataset)
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
        if self.target is not None and not self.is_stream:
            # Here and not with the first index, before which the first window's snapshot is taken.
            self.iteration = self.target[0]
            return self._replay(*self.target)
        if self.target is not None:
            # Workers are seeded, and streams often shuffled, from the states at this point.
            self._set(self.target[0].made)
        self.iteration = Iteration(self._states(), None, self._batches())
        return self._record(self.iteration, iter(self._inner))

    def _record(self, iteration: Iteration, indices: Iterator[Any]) -> Iterator[Any]:
        iteration.first = (*self._states()[:2], [])
        yield from indices

    def _replay(self, target: Iteration, batches: int) -> Iterator[Any]:
        now = self._states()
        self._set(target.made)
        indices = iter(self._inner)
        if target.first is not None:
            self._set(target.first)
        for _ in range(batches):
            next(indices, None)
        # The first index is drawn here, under the states of that time, since drawing it may use random numbers.
        head = [] if batches or target.first is None else list(islice(indices, 1))
        self._set((*now[:2], []))
        yield from head
        yield from indices if batches or target.first is not None else self._record(target, indices)

    def _states(self) -> _States:
        return (rng.global_states(self._device), *own_states(self._loader))

    def _set(self, states: _States | None) -> None:
        if states is not None:
            rng.set_global_states(states[0], self._device)
            set_own_states(self._loader, states[1], states[2])


def own_states(loader: Any) -> tuple[list[Any], list[Any]]:
    """States of the generators and of the samplers that a loader holds."""
    generators = rng.generators_of(rng.reachable_from(loader))
    samplers = [copy.deepcopy(sampler.state_dict()) for sampler in rng.samplers_of(loader)]
    return list(map(rng.state_of, generators)), samplers


def set_own_states(loader: Any, generators: list[Any], samplers: list[Any]) -> None:
    """Set what :func:`own_states` returned."""
    rng.set_generators(rng.generators_of(rng.reachable_from(loader)), generators)
    for sampler, state in zip(rng.samplers_of(loader), samplers, strict=False):
        sampler.load_state_dict(copy.deepcopy(state))


class TrainingLoaders:
    """The training loaders of a fit.

    Args:
        trainer: The Trainer that runs the fit.
        device: Device of this rank, whose random states are recorded.
        say: Shows the user a message, once.
    """

    def __init__(self, trainer: "pl.Trainer", device: torch.device, say: Callable[[str], None]) -> None:
        self._trainer, self._device, self._say = trainer, device, say
        self._recorders: list[RecordingSampler] = []
        self._loaded: dict[str, Any] | None = None
        self._dropped = 0  # batches that were drawn to be dropped, while resuming so
        self._stateful: tuple[list[Any] | None, list[Any] | None] = None, None

    def process(self, loader: Any) -> None:
        """Record a training loader that is about to be iterated."""
        if isinstance(loader, DataLoader) and not is_stateful(loader) and _recorder(loader) is None:
            # No bound method, which a copy of the loader would follow to the Trainer.
            self._recorders.append(RecordingSampler(loader, self._device, lambda: self._num_used()))

    def _num_used(self) -> int:
        if self._loaded is not None and self._loaded["is_drawn"]:
            return self._dropped
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.processed

    @property
    def _fetcher(self) -> Any:
        return lightning_internals.training_data_fetcher(self._trainer)

    def _all(self) -> list[Any]:
        return [] if self._fetcher is None else list(map(users_own, self._fetcher.combined_loader.flattened))

    # --- Recording ----------------------------------------------------------------------------------------------------

    def before_fetch(self) -> None:
        """Called before a batch is drawn. If that is one batch ahead of the loop, the last two states are kept."""
        if loops.prefetches(self._trainer) and any(map(is_stateful, self._all())):
            self._stateful = self._stateful[1], [_state_of(loader) for loader in self._all()]

    def positions(self, at: loops.Position, is_fetching: bool) -> list[dict[str, Any]]:
        """Position of each loader.

        Args:
            at: Position of the fit.
            is_fetching: Whether a batch is about to be drawn, after :meth:`before_fetch`.
        """
        return [self._position(index, loader, at, is_fetching) for index, loader in enumerate(self._all())]

    def _position(self, index: int, loader: Any, at: loops.Position, is_fetching: bool) -> dict[str, Any]:
        generators, samplers = own_states(loader)
        found: dict[str, Any] = {"generators": generators, "samplers": samplers}
        if isinstance(sampler := _innermost_sampler(loader), DistributedSampler):
            found["seed"] = sampler.seed
        recorder = _recorder(loader)
        if is_stateful(loader):
            if not loops.prefetches(self._trainer):
                # Between epochs the loader is at the end of an epoch, and does not know that it is over.
                return found if at.stage == loops.EPOCH else found | {"state": _state_of(loader)}
            if at.stage == loops.EPOCH:
                return found | {"state": _state_of(loader)}
            states = self._stateful[0 if is_fetching else 1]
            return found | {"state": None if states is None else states[index]}
        if recorder is not None and recorder.iteration is not None:
            made, first, start = recorder.iteration.made, recorder.iteration.first, recorder.iteration.start
            found |= {"iteration": (made, first, start), "yielded": at.batches - start, "length": sized_len(loader)}
            found["is_stream"] = recorder.is_stream
        return found

    # --- Resuming -----------------------------------------------------------------------------------------------------

    def set_loaded(self, loaded: dict[str, Any]) -> None:
        """Let :meth:`start` resume from ``loaded``, this rank's state in a checkpoint."""
        self._loaded, self._dropped = loaded, 0

    def start(self) -> None:
        """Finish resuming, once the loaders are iterated and the run has started. Changes the random states."""
        loaded = self._loaded
        if loaded is None or not loaded["loaders"]:
            return
        if len(self._all()) != len(loaded["loaders"]):
            raise ValueError(
                f"The checkpoint holds the positions of {len(loaded['loaders'])} training loaders, and there are"
                f" {len(self._all())}: pass the same loaders, or resume from the end of an epoch."
            )
        for loader, at in zip(self._all(), loaded["loaders"], strict=True):
            self._restore_position(loaded, loader, at)
        if loaded["is_iterated"] or any("state" in at for at in loaded["loaders"]):
            iter(self._fetcher)
        used = loaded["batches"]
        if loaded["is_drawn"]:
            self._say(
                "A training loader that is neither a map-style DataLoader nor has state_dict() and load_state_dict()"
                f" resumes by drawing and dropping {used} batches; torchdata's StatefulDataLoader need not."
            )
            batches = getattr(self._fetcher, "iterator_wrapper", self._fetcher)  # for a step that draws its batches
            for self._dropped in range(used):
                if next(batches, None) is None:
                    raise ValueError(_TOO_SHORT.format(used=used, now=self._dropped))
            self._fetcher.fetched -= used  # the loop adds what it has used
        self._loaded = None
        for recorder in self._recorders:
            recorder.target = None

    def restore_generators(self, loaded: dict[str, Any]) -> None:
        """Set the loaders' own generators, and before an epoch their samplers, to what a checkpoint holds."""
        for loader, at in zip(self._all(), loaded["loaders"], strict=False):
            self._restore_seed(loader, at)
            set_own_states(loader, at["generators"], [] if loaded["is_iterated"] else at["samplers"])

    def keep_streams(self) -> bool:
        """Whether the next epoch keeps the existing iterators: new ones may lose what these have drawn ahead.

        If so, draws from the random states what new iterators would have drawn.
        """
        loaders = self._all()
        if not loops.prefetches(self._trainer) or any(map(_is_map_style, loaders)):
            return False
        for loader in loaders:
            if isinstance(loader, DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return True

    def _restore_position(self, loaded: dict[str, Any], loader: Any, at: dict[str, Any]) -> None:
        self._restore_seed(loader, at)
        if not loaded["is_iterated"]:
            if is_stateful(loader) and "state" in at:
                # The state says that the loader is exhausted, so it starts over, with what it keeps between epochs.
                loader.load_state_dict(at["state"])
            return
        for owner in (getattr(loader, "sampler", None), _innermost_sampler(loader)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(loaded["epochs"])
        if not loaded["is_drawn"] and ("state" in at) != is_stateful(loader):
            raise ValueError(
                f"The checkpoint does not hold what {type(loader).__name__} needs to go on within an epoch, since a"
                " training loader of another kind was used: pass one of that kind, or resume from the end of an epoch."
            )
        recorder = _recorder(loader)
        if recorder is not None and "iteration" in at:
            if at["iteration"][2] and (loaded["is_drawn"] or loops.prefetches(self._trainer)):
                self._say(
                    "A training loader had started over within the epoch, beside one that has no length or no state:"
                    " samples of this epoch may be left out or used twice."
                )
            if not loaded["is_drawn"]:
                self._check_length(loader, at)
            recorder.target = Iteration(*at["iteration"]), 0 if loaded["is_drawn"] else at["yielded"]
        elif at.get("state") is not None and not loaded["is_drawn"]:
            loader.load_state_dict(at["state"])

    def _restore_seed(self, loader: Any, at: dict[str, Any]) -> None:
        """Lightning seeds its sampler from PL_GLOBAL_SEED, which may differ now, or not be set."""
        sampler = _innermost_sampler(loader)
        if "seed" in at and isinstance(sampler, DistributedSampler):
            sampler.seed = at["seed"]

    def _check_length(self, loader: DataLoader[Any], at: dict[str, Any]) -> None:
        length = sized_len(loader)
        # A padded loader has also yielded padding batches.
        if length is not None and length < min(at["yielded"], at["length"] or at["yielded"]):
            raise ValueError(_TOO_SHORT.format(used=at["yielded"], now=length))
        if None not in (length, at["length"]) and length != at["length"]:
            self._say(
                f"A training loader had {at['length']} batches when the checkpoint was written, and has {length} now:"
                " samples of this epoch may be left out or used twice."
            )

    def close(self) -> None:
        """Restore the loaders' own samplers."""
        for recorder in self._recorders:
            recorder.close()
        self._recorders = []


def _is_map_style(loader: Any) -> bool:
    recorder = _recorder(loader)
    return recorder is not None and not recorder.is_stream


def _state_of(loader: Any) -> Any:
    return copy.deepcopy(loader.state_dict()) if is_stateful(loader) else None


def _recorder(loader: Any) -> RecordingSampler | None:
    samplers = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    return next((sampler for sampler in samplers if isinstance(sampler, RecordingSampler)), None)


def _innermost_sampler(loader: Any) -> Any:
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
