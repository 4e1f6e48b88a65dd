"""The search over fits that are saved and resumed, as far as it is quick; see ``search.py``."""

from __future__ import annotations

import pytest

from tests.rank_pool import RankPool
from tests.resume.search import draw, judge


@pytest.mark.parametrize(
    "number", [0, 1, pytest.param(2, marks=pytest.mark.sweep), pytest.param(3, marks=pytest.mark.sweep)]
)
@pytest.mark.every_case
def test_quick(pool2: RankPool, number: int) -> None:
    case = draw(1, number)
    assert judge(pool2, case) == "", case
