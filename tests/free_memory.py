"""Free memory that a test pretends: how much, in terms of what the strategy estimates to need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_automodel.sharding import memory


@contextmanager
def pretended(budget: Callable[[dict[str, int]], float]) -> Iterator[None]:
    """Context in which the part of the free memory that the estimate may fill is what `budget` returns for it."""
    needed: dict[str, int] = {}
    estimate = memory.estimate

    def noted(*args: Any) -> dict[str, int]:
        needed.update(estimate(*args))
        return dict(needed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "estimate", noted)
        patch.setattr(memory, "free_bytes", lambda *args: int(budget(needed) / memory.FREE_MEMORY_SHARE))
        yield
