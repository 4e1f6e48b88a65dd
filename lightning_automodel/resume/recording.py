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

    ``begins_at`` returns how many batches of the epoch were used when the Trainer begins to draw indices;
    None if other code does. ``iteration`` is the Trainer's newest one.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, begins_at: Callable[[], int | None]
    ) -> None:
        self.iteration: Iteration | None = None
        self._loader = loader
        self._device = device
        self._begins_at = begins_at
        self._repeated: tuple[int, int] | None = None  # begins at a batch of the epoch, and skips indices
        if loader.batch_sampler is None:
            self._name = "sampler"
        else:
            self._name = "batch_sampler"
        self._inner: Any = getattr(loader, self._name)
        # DataLoader refuses to set its sampler after its construction.
        vars(loader)[self._name] = self

    def repeat(self, iteration: Iteration, num_skipped: int) -> None:
        """Let the Trainer's next iteration repeat ``iteration`` without its first indices."""
        self.iteration = iteration
        self._repeated = iteration[1] + num_skipped, num_skipped

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
        # A generator: loaders with workers begin two iterations, and draw from the second.
        begins_at = self._begins_at()
        if begins_at is None:
            yield from self._inner
            return
        repeated = self._repeated
        self._repeated = None
        # A run that goes on after the last batch of an epoch draws nothing before the next epoch.
        if repeated is not None and repeated[0] == begins_at:
            yield from self._replay(repeated[1])
            return
        self.iteration = self._states(), begins_at
        yield from self._inner

    def _replay(self, num_skipped: int) -> Iterator[Any]:
        assert self.iteration is not None
        global_states, (generators, _) = self._states()
        if self.iteration[0] is not None:
            self._set_states(*self.iteration[0])
        indices = iter(self._inner)
        # At least one under the states of that time, since samplers draw their order with the first index.
        head = list(islice(indices, max(num_skipped, 1)))
        self._set_states(global_states, (generators, []))
        return chain(head[num_skipped:], indices)

    def _states(self) -> tuple[dict[str, Any], rng.OwnStates]:
        return rng.global_states(self._device), rng.own_states(self._loader)

    def _set_states(self, global_states: dict[str, Any], own_states: rng.OwnStates) -> None:
        rng.set_global_states(global_states, self._device)
        rng.set_own_states(self._loader, *own_states)
