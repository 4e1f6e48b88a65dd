"""Positions of training loaders in their epoch: kept without touching the data, and restored later.

A loader with ``state_dict`` goes on by its state, each rank by its own; if it reads a stream, that has a state
too. A map-style DataLoader that torch's own ``__iter__`` iterates goes on by its sampler: the epoch's indices
are drawn again, from the same random states, and used ones are skipped, so that nothing is loaded twice. Any
other loader is refused within an epoch.
"""

import weakref
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_automodel.data.batches import Wrapper, is_stateful, unwrap_loader
from lightning_automodel.data.samplers import innermost_sampler, samplers_of
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.torch import iterate_anew
from lightning_automodel.resume import loops, rng

# What a loader goes on by within an epoch, in checkpoints.
STATE = "state"  # that of its own state_dict(), each rank by its own
INDICES = "indices"  # those of its sampler, drawn again and skipped
NOTHING = "no position"  # it is refused
_NO_POSITION = (NOTHING, None, None)


class RecordingSampler(Wrapper):
    """Replaces the (batch) sampler of a DataLoader until :meth:`close`: it can skip what was used.

    ``begins_at`` returns how many batches of the epoch were used when the Trainer begins to draw indices;
    None if other code does.

    Its other attributes are those of the sampler that it replaces, to read and to set.

    Attributes:
        begun: The random states before the epoch's first index, none of another world size. None if the Trainer has
            not iterated, or begun again within the epoch. To repeat an iteration, set it, and
        skipped: how many of its indices to leave out.
    """

    begun: dict[str, Any] | None
    skipped: int | None

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, begins_at: Callable[[], int | None]
    ) -> None:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        super().__init__(
            getattr(loader, name),
            begun=None,
            skipped=None,
            _loader=weakref.ref(loader),  # or its workers would live until Python's collector comes
            _device=device,
            _begins_at=begins_at,
            _name=name,
        )
        self._set_sampler(self)

    def _set_sampler(self, sampler: Any) -> None:
        # DataLoader refuses to set its sampler after its construction.
        vars(self._loader())[self._name] = sampler
        iterate_anew(self._loader())

    def close(self) -> None:
        """Restore the loader's own sampler."""
        self._set_sampler(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        # A generator: loaders with workers begin two iterations, and draw from the second.
        begins_at = self._begins_at()
        if begins_at is None:
            yield from self._inner
            return
        skipped = self.skipped
        self.skipped = None
        # A run that goes on after the last batch of an epoch draws nothing before the next epoch.
        if skipped == begins_at:
            yield from self._replay(begins_at)
            return
        self.begun = None if begins_at > 0 else self._states()
        yield from self._inner

    def _replay(self, num_skipped: int) -> Iterator[Any]:
        if not self.begun:
            return islice(self._inner, num_skipped, None)
        now = self._states()
        self._set_states(self.begun)
        indices = iter(self._inner)
        # At least one under the states of that time, since samplers draw their order with the first index.
        head = list(islice(indices, max(num_skipped, 1)))
        self._set_states({**now, "samplers": []})
        return chain(head[num_skipped:], indices)

    def _states(self) -> dict[str, Any]:
        return rng.global_states(self._device) | rng.own_states(self._loader())

    def _set_states(self, states: dict[str, Any]) -> None:
        rng.set_global_states(states, self._device)
        rng.set_own_states(self._loader(), states)


class TrainingLoaders:
    """The training loaders of a fit. ``window_start`` returns how many batches of the epoch an open window follows.

    ================  ==========================================================================
    of each loader    a position in a checkpoint holds
    ================  ==========================================================================
    all               what it goes on by, and the states of its generators and samplers
    of ``STATE``      its state
    of ``INDICES``    the random states before its first index
    ================  ==========================================================================
    """

    def __init__(self, trainer: "pl.Trainer", window_start: Callable[[], int]) -> None:
        self._trainer = trainer
        self._window_start = window_start
        # Weakly, since loaders hold them: those of loaders that were loaded anew go with these.
        self._recorders: weakref.WeakSet[RecordingSampler] = weakref.WeakSet()

    def take(self, processed: Any) -> None:
        """Let the states of a ``processed`` loader to train on be kept, or the indices that torch draws."""
        if not self._trainer.training:
            return
        loader = unwrap_loader(processed)
        if is_stateful(loader):
            processed.window_start = self._window_start
        elif _goes_by_indices(loader) and _recorder(loader) is None:
            # A function, not a bound method, which a copy of the loader would follow to the trainer and its model.
            recorder = RecordingSampler(
                loader, self._trainer.strategy.root_device, lambda: self._begins_at()
            )
            self._recorders.add(recorder)

    def _begins_at(self) -> int | None:
        """How many batches of the epoch were used, if the Trainer draws now to train."""
        if not (self._trainer.training and lightning_internals.is_trainer_drawing()):
            return None
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.processed)

    def _all(self) -> list[Any]:
        return _flat(self._trainer.train_dataloader)

    @property
    def begin_anew(self) -> bool:
        """Whether a resumed run begins a stream anew after an epoch, which may have gone on from there.

        No checkpoint between epochs holds the state of a stream.
        """
        return any(
            is_stateful(stream) and (stream is loader or isinstance(stream, IterableDataset))
            for loader in self._all()
            for stream in [getattr(loader, "dataset", loader)]
        )

    def positions(self, at: loops.Position) -> list[dict[str, Any]]:
        """Position of each loader when the fit is ``at`` a position."""
        positions = []
        for tracked in self._all():
            loader = unwrap_loader(tracked)
            found: dict[str, Any] = {"by": _identity(loader), **rng.own_states(loader)}
            found["batch_sampler_epoch"] = getattr(samplers_of(loader)[0], "epoch", None)
            if isinstance(sampler := innermost_sampler(loader), DistributedSampler):
                found["seed"] = sampler.seed
            positions.append(found)
            if not at.is_iterated:  # between epochs a loader is at the end of one, and starts over
                continue
            recorder = _recorder(loader)
            if recorder is not None:
                if recorder.begun is not None:
                    found["begun"] = recorder.begun
                elif at.batches > 0:  # a shorter loader of a CombinedLoader has started over
                    found["by"] = _NO_POSITION
            elif found["by"][0] == STATE:
                validated = map(unwrap_loader, _flat(self._trainer.val_dataloaders))
                if tracked.is_peeked or any(other is loader for other in validated):
                    found["by"] = _NO_POSITION  # the state is that of the other iteration
                else:
                    found["state"] = tracked.state_before(at.batches)
        return positions

    def start(self, positions: list[dict[str, Any]], at: loops.Position) -> None:
        """Prepare to resume; :meth:`iterate` does the rest."""
        loaders = list(map(unwrap_loader, self._all()))
        if at.stage != loops.EPOCH:
            self._check_same(loaders, positions)
        for loader, position in zip(loaders, positions, strict=False):
            _restore_position(at, loader, position)
            # A loader with a state restores its samplers itself.
            samplers = [] if at.is_iterated and is_stateful(loader) else position["samplers"]
            rng.set_own_states(loader, {**position, "samplers": samplers})

    def iterate(self, data_fetcher: Any) -> None:
        """Iterate the loaders again: Lightning has done it in set-up, before they got their positions.

        Random states stay, except for those of samplers, from which workers have drawn.
        """
        before = [(loader, rng.own_states(loader)) for loader in map(unwrap_loader, self._all())]
        with isolate_rng():
            iter(data_fetcher)
        for loader, states in before:
            rng.set_own_states(loader, {**states, "samplers": []})

    @staticmethod
    def _check_same(loaders: list[Any], positions: list[dict[str, Any]]) -> None:
        """Raise ValueError if these loaders do not go on within an epoch, or with other samples."""
        now = [_identity(loader) for loader in loaders]
        then = [position["by"] for position in positions]
        # A length of None is that of another world size.
        known = [
            (kind, own[1] if length is None else length, size)
            for own, (kind, length, size) in zip(now, then, strict=False)
        ]
        if len(now) != len(then) or now != known or _NO_POSITION in now:
            raise ValueError(
                "Training loaders go on within an epoch by (what, number of batches, batch size)"
                f" {now}, and the checkpoint holds {then}: pass loaders like those that were used, or resume"
                " from the end of an epoch. Only map-style DataLoaders that torch itself iterates go on by"
                " indices; for others use torchdata's StatefulDataLoader, over a stream that has state_dict() too, and"
                " with shuffle=True Trainer(use_distributed_sampler=False): Lightning's sampler has no state."
            )

    def close(self) -> None:
        """Restore the loaders' own samplers."""
        for recorder in self._recorders:
            recorder.close()


def _flat(loaders: Any) -> list[Any]:
    return [] if loaders is None else CombinedLoader(loaders).flattened


def _goes_by_indices(loader: Any) -> bool:
    """Whether a loader yields batches in the order of the indices that its sampler draws; workers may not wait."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    is_in_order = getattr(loader, "in_order", True) or loader.num_workers < 2
    return is_in_order and not isinstance(loader.dataset, IterableDataset)


def _identity(loader: Any) -> tuple[str, int | None, int | None]:
    """What a loader goes on by within an epoch, and, if by indices, its length and batch size."""
    if _recorder(loader) is not None:
        return INDICES, sized_len(loader), getattr(loader.batch_sampler, "batch_size", None)
    # If a stream has no state, torchdata's loader reads the used batches again, and counts them twice: the
    # next resumed run would leave as many out.
    stream = getattr(loader, "dataset", None)
    if isinstance(stream, IterableDataset) and not is_stateful(stream):
        return _NO_POSITION
    # Lightning's wrapper is around a sampler whose order is no part of the loader's state.
    if is_stateful(loader) and not isinstance(innermost_sampler(loader), DistributedSamplerWrapper):
        return STATE, None, None
    return _NO_POSITION


def _restore_position(at: loops.Position, loader: Any, position: dict[str, Any]) -> None:
    """Prepare a loader to be iterated: its epoch, by its sampler's seed and number of epochs, and where it was."""
    sampler = innermost_sampler(loader)
    if "seed" in position and isinstance(sampler, DistributedSampler):
        # Lightning seeds its sampler from PL_GLOBAL_SEED, which may differ now, or not be set.
        sampler.seed = position["seed"]
    if at.is_iterated:
        batch_sampler, *_ = samplers_of(loader)
        # Lightning sets the epoch of samplers alone: user code may, and to what it likes.
        epoch = position.get("batch_sampler_epoch")
        if isinstance(epoch, int) and hasattr(batch_sampler, "set_epoch"):
            batch_sampler.set_epoch(epoch)
    if "state" in position and is_stateful(loader):
        loader.load_state_dict(position["state"])
    if "begun" in position and (recorder := _recorder(loader)) is not None:
        recorder.begun = position["begun"]
        recorder.skipped = at.batches


def _recorder(loader: Any) -> RecordingSampler | None:
    return next((sampler for sampler in samplers_of(loader) if isinstance(sampler, RecordingSampler)), None)
