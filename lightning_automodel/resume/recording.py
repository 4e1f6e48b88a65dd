"""What a loader has drawn from its sampler in this epoch, and the same order drawn again in a new process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from lightning_automodel.resume import rng


@dataclass
class Iteration:
    """One iteration over the indices of a loader. If the loader collates them, an index is a list of these."""

    states: tuple[dict[str, Any], rng.OwnStates] | None  # before its first index; None of another world size
    start: int  # batches of the epoch used before it; not 0 if a shorter loader has started over
    epoch: int = 0
    num_drawn: int = 0
    latest: list[Any] = field(default_factory=list)  # the newest indices, at least those of unused batches

    def drew(self, index: Any) -> Any:
        """Note ``index``, and return it."""
        self.latest.append(index)
        self.num_drawn += 1
        return index

    def ahead(self, used: int) -> list[Any]:
        """Indices that workers have drawn beyond the first ``used``. Forgets those before."""
        # A thread of the loader may append meanwhile.
        del self.latest[: len(self.latest) - max(self.num_drawn - used, 0)]
        return list(self.latest)


@dataclass(frozen=True)
class Target:
    """An iteration to repeat without its used indices."""

    iteration: Iteration
    num_skipped: int  # the used indices
    ahead: list[Any]  # those that were drawn after them


class RecordingSampler(Sampler[Any]):
    """Replaces the (batch) sampler of a DataLoader until :meth:`close`: it can skip what was used.

    ``iteration`` is the newest one, None before its first index. ``position`` returns how many batches of
    the epoch the loop has used, and the epoch.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, position: Callable[[], tuple[int, int]]
    ) -> None:
        self._loader = loader
        self._device = device
        self._position = position
        if loader.batch_sampler is None:
            self._name = "sampler"
        else:
            self._name = "batch_sampler"
        self._inner: Any = getattr(loader, self._name)
        self._target: Target | None = None
        self.iteration: Iteration | None = None
        # DataLoader refuses to set its sampler after its construction.
        vars(loader)[self._name] = self

    def repeat(self, target: Target | None) -> None:
        """From the next iteration on, repeat ``target``; None: record new ones."""
        self._target = target

    @property
    def has_drawn(self) -> bool:
        """Whether the newest iteration has drawn an index."""
        return self.iteration is not None and self.iteration.num_drawn > 0

    @property
    def innermost(self) -> Any:
        """The sampler of single samples."""
        return getattr(self._inner, "sampler", self._inner)

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
        # Loaders with workers do this twice.
        target = self._target
        # Not with the first index: the first window's snapshot is taken before that.
        if target is None:
            self.iteration = None
            return self._record()
        self.iteration = target.iteration
        return self._replay(target)

    def _record(self) -> Iterator[Any]:
        states = rng.global_states(self._device), rng.own_states(self._loader)
        iteration = Iteration(states, *self._position())
        self.iteration = iteration
        for index in self._inner:
            yield iteration.drew(index)

    def _replay(self, target: Target) -> Iterator[Any]:
        iteration = target.iteration
        now = rng.global_states(self._device)
        generators, _ = rng.own_states(self._loader)
        if iteration.states is not None:
            rng.set_global_states(iteration.states[0], self._device)
            rng.set_own_states(self._loader, *iteration.states[1])
        indices = iter(self._inner)
        for _ in range(target.num_skipped + len(target.ahead)):
            next(indices, None)
        # The first index is drawn under the states of that time, since drawing it may use random numbers.
        # Later ones may too, but workers had drawn those ahead under states that are not known.
        head = target.ahead
        if not head and not target.num_skipped:
            head = list(islice(indices, 1))
        rng.set_global_states(now, self._device)
        rng.set_own_states(self._loader, generators, [])
        iteration.num_drawn = target.num_skipped
        for index in chain(head, indices):
            yield iteration.drew(index)


class DroppingLoader:
    """A ``loader`` whose first iteration loads and drops ``number`` batches before it begins."""

    def __init__(self, loader: Any, number: int) -> None:
        self._loader = loader
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        number = self._number
        self._number = 0
        for _ in range(number):
            next(batches, None)
        return batches


def is_plain(index: Any) -> bool:
    """Whether a checkpoint can hold an index, or a list of them, as plain data."""
    if isinstance(index, (list, tuple)):
        return all(map(is_plain, index))
    return type(index) in (int, str, float, bool, type(None)) or isinstance(index, Tensor)
