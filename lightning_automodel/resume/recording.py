"""Which indices a loader has drawn from its sampler in this epoch, and the same order drawn again in a new process."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from lightning_automodel.resume import rng


class RecordingSampler(Sampler[Any]):
    """Replaces the (batch) sampler of a DataLoader until :meth:`close`: it can skip what was used.

    ``begins_at`` returns how many batches of the epoch were used when the Trainer begins to draw indices;
    None if other code does.

    Attributes:
        iteration: Of the Trainer's newest iteration the random states before its first index, None of another
            world size, and how many batches of the epoch were used before it. To repeat one, set it, and
        skipped: how many of its indices to leave out.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, begins_at: Callable[[], int | None]
    ) -> None:
        self.iteration: tuple[dict[str, Any] | None, int] | None = None
        self.skipped: int | None = None
        self._loader = loader
        self._device = device
        self._begins_at = begins_at
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner: Any = getattr(loader, self._name)
        # DataLoader refuses to set its sampler after its construction.
        vars(loader)[self._name] = self

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
        skipped = self.skipped
        self.skipped = None
        # A run that goes on after the last batch of an epoch draws nothing before the next epoch.
        if skipped == begins_at:
            yield from self._replay(skipped)
            return
        self.iteration = self._states(), begins_at
        yield from self._inner

    def _replay(self, num_skipped: int) -> Iterator[Any]:
        assert self.iteration is not None
        begun, _ = self.iteration
        if begun is None:
            return islice(self._inner, num_skipped, None)
        now = self._states()
        self._set_states(begun)
        indices = iter(self._inner)
        # At least one under the states of that time, since samplers draw their order with the first index.
        head = list(islice(indices, max(num_skipped, 1)))
        self._set_states({**now, "samplers": []})
        return chain(head[num_skipped:], indices)

    def _states(self) -> dict[str, Any]:
        return rng.global_states(self._device) | rng.own_states(self._loader)

    def _set_states(self, states: dict[str, Any]) -> None:
        rng.set_global_states(states, self._device)
        rng.set_own_states(self._loader, states)
