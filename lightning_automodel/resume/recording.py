"""Which indices a loader has drawn from its sampler in this epoch, and the same order drawn again in a new process."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from lightning_automodel.resume import rng

Iteration = tuple[tuple[dict[str, Any], rng.OwnStates] | None, int]
"""The random states before its first index, None of another world size; batches of the epoch used before it."""


class KeptStates:
    """States by the number of the epoch's batch, from 0, that they precede.

    ``first`` returns how many batches of the epoch were used when an open window began: what is older than
    the state that it began with is forgotten.
    """

    def __init__(self, first: Callable[[], int]) -> None:
        self._first = first
        self._states: dict[int, Any] = {}

    def note(self, number: int, state: Any) -> None:
        """``state`` is that before batch ``number``, which is drawn next."""
        first = self._first()
        oldest = max((at for at in self._states if at <= first), default=0)
        self._states = {at: kept for at, kept in self._states.items() if oldest <= at < number}
        self._states[number] = state

    def newest(self, number: int) -> int | None:
        """The batch that the newest state precedes, of those before batch ``number``."""
        return max((at for at in self._states if at <= number), default=None)

    def before(self, number: int) -> Any:
        """The state that precedes batch ``number``. KeyError if there is none."""
        return self._states[number]


class RecordingSampler(Sampler[Any]):
    """Replaces the (batch) sampler of a DataLoader until :meth:`close`: it can skip what was used.

    A shorter loader of a CombinedLoader starts over within an epoch, so an epoch has several iterations:
    ``iterations`` has the random states before each. ``used`` returns how many batches of the epoch the loop
    has used. Those are recorded in which the Trainer draws, as ``is_drawing`` tells.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        iterations: KeptStates,
        used: Callable[[], int],
        is_drawing: Callable[[], bool],
    ) -> None:
        self.iterations = iterations
        self._loader = loader
        self._device = device
        self._used = used
        self._is_drawing = is_drawing
        if loader.batch_sampler is None:
            self._name = "sampler"
        else:
            self._name = "batch_sampler"
        self._inner: Any = getattr(loader, self._name)
        self._repeated: tuple[Any, int] | None = None  # states, and how many indices to skip
        # DataLoader refuses to set its sampler after its construction.
        vars(loader)[self._name] = self

    def repeat(self, iteration: Iteration, num_skipped: int) -> None:
        """Let iterations that begin now repeat ``iteration`` without its first indices, until :meth:`record`."""
        states, number = iteration
        self._repeated = states, num_skipped
        self.iterations.note(number, states)

    def record(self) -> None:
        """Record the Trainer's iterations from now on."""
        self._repeated = None

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
        # Loaders with workers do this twice, and draw from the second iterator.
        if self._repeated is not None:
            return self._replay(*self._repeated)
        return self._record()

    def _record(self) -> Iterator[Any]:
        if self._is_drawing():
            states = rng.global_states(self._device), rng.own_states(self._loader)
            self.iterations.note(self._used(), states)
        yield from self._inner

    def _replay(self, states: Any, num_skipped: int) -> Iterator[Any]:
        global_states = rng.global_states(self._device)
        generators, _ = rng.own_states(self._loader)
        if states is not None:
            self._set_states(states)
        indices = iter(self._inner)
        for _ in range(num_skipped):
            next(indices, None)
        head: list[Any] = []
        if num_skipped == 0:
            # Under the states of that time, since samplers draw their order with the first index.
            head = list(islice(indices, 1))
        self._set_states((global_states, (generators, [])))
        yield from chain(head, indices)

    def _set_states(self, states: tuple[dict[str, Any], rng.OwnStates]) -> None:
        rng.set_global_states(states[0], self._device)
        rng.set_own_states(self._loader, *states[1])
