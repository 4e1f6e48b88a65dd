"""How far it is from a loss to its final gradient."""

from __future__ import annotations

import pytest

from tests.gradients.spine import OPTIONS, route
from tests.rank_pool import RankPool

LIMITS = {"sharded": (45, 8, 10), "replicated": (40, 8, 8)}
"""Functions, files, and returns to a file that was left."""


def _counts(name: str) -> tuple[tuple[int, int, int], str]:
    found = route(OPTIONS[name])
    return (len(found.functions), len(found.files), found.num_returns), str(found)


@pytest.mark.every_case
@pytest.mark.parametrize("name", OPTIONS)
def test_counts(pool2: RankPool, name: str) -> None:
    """Of a micro-batch that ends its window, between the return of `training_step` and `on_after_backward`."""
    for counts, described in pool2.run(_counts, name):
        assert all(count <= limit for count, limit in zip(counts, LIMITS[name], strict=True)), described
