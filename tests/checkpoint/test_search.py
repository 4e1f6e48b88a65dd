"""The search over kinds of state, as far as it is quick; the rest is a sweep: `python -m tests.checkpoint.search`."""

from __future__ import annotations

import pytest

from tests.checkpoint.search import draw_case, judge
from tests.rank_pool import RankPool

FOUND = {
    "keys 0 and '0' beside each other": (1, 0),
    "classes of dicts in directories": (1, 5),
    "a tensor of the size of one rank's part": (1, 115),
    "everything, in shards": (1, 64),
    "everything, from one file into shards": (1, 116),
    "everything, from replicas into shards": (1, 71),
    "groups of an optimizer of no form of torch's": (20200, 55),
}
"""Cases that once were wrong, and some that have states in all places, by seed and number."""


@pytest.mark.parametrize("case", FOUND)
@pytest.mark.every_case
def test_cases_that_were_found(pool2: RankPool, case: str) -> None:
    """Everything comes back as plain Lightning brings it back."""
    assert judge(pool2, draw_case(*FOUND[case])) is None


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(300))
def test_search(pool2: RankPool, number: int) -> None:
    assert judge(pool2, draw_case(2, number)) is None
