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


class RecordingSampler(Sampler[Any]):
    """Replaces the (batch) sampler of a DataLoader until :meth:`close`: it can skip what was used.

    A shorter loader of a CombinedLoader starts over within an epoch, so an epoch has several iterations.
    ``used`` returns how many batches of the epoch the loop has used, ``first`` how many when an open window
    began: older iterations are forgotten. Those are recorded in which the Trainer draws, as ``is_drawing``
    tells.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        used: Callable[[], int],
        first: Callable[[], int],
        is_drawing: Callable[[], bool],
    ) -> None:
        self._loader = loader
        self._device = device
        self._used = used
        self._first = first
        self._is_drawing = is_drawing
        if loader.batch_sampler is None:
            self._name = "sampler"
        else:
            self._name = "batch_sampler"
        self._inner: Any = getattr(loader, self._name)
        self._target: tuple[Iteration, int] | None = None
        self._iterations: list[Iteration] = []
        # DataLoader refuses to set its sampler after its construction.
        vars(loader)[self._name] = self

    def begun(self, batches: int) -> Iteration | None:
        """The newest iteration that had begun when so many batches of the epoch had been used."""
        begun = [iteration for iteration in self._iterations if iteration[1] <= batches]
        return begun[-1] if begun else None

    def repeat(self, iteration: Iteration, num_skipped: int) -> None:
        """Whenever the loader is iterated, repeat ``iteration`` without its first indices, until :meth:`record`."""
        self._target = iteration, num_skipped
        self._iterations = [iteration]

    def record(self) -> None:
        """Whenever the loader is iterated from now on, record a new iteration."""
        self._target = None

    @property
    def has_started_over(self) -> bool:
        """Whether the newest iteration is not the first of the epoch."""
        return any(start > 0 for _, start in self._iterations[-1:])

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
        if self._target is not None:
            return self._replay(*self._target)
        return self._record()

    def _record(self) -> Iterator[Any]:
        if not self._is_drawing():
            yield from self._inner
            return
        if self._used() == 0:
            self._iterations = []
        states = rng.global_states(self._device), rng.own_states(self._loader)
        # Of those before an open window, the newest one is needed.
        needed = self.begun(self._first())
        while needed is not None and self._iterations[0] is not needed:
            self._iterations.pop(0)
        self._iterations.append((states, self._used()))
        yield from self._inner

    def _replay(self, iteration: Iteration, num_skipped: int) -> Iterator[Any]:
        states = iteration[0]
        now = rng.global_states(self._device)
        generators, _ = rng.own_states(self._loader)
        if states is not None:
            rng.set_global_states(states[0], self._device)
            rng.set_own_states(self._loader, *states[1])
        indices = iter(self._inner)
        for _ in range(num_skipped):
            next(indices, None)
        head: list[Any] = []
        if num_skipped == 0:
            # Under the states of that time, since samplers draw their order with the first index.
            head = list(islice(indices, 1))
        rng.set_global_states(now, self._device)
        rng.set_own_states(self._loader, generators, [])
        yield from chain(head, indices)
