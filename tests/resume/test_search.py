"""The search over fits that are saved and resumed, as far as it is quick; see ``search.py``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rank_pool import RankPool
from tests.resume.search import draw, judge


@pytest.mark.parametrize("number", range(60))
def test_quick(pool2: RankPool, number: int) -> None:
    case = draw(1, number)
    assert judge(pool2, case) == "", case


FOUND: dict[str, dict[str, Any]] = {
    "averages of 32 bits rounded weights of 64 in a validation within a window": {
        "engine": {"data_parallel": "ddp"},
        "callbacks": ("ema", "windows"),
        "validate_every": 3,
        "stops": (("on_train_batch_start", 4),),
    },
    "the order was not known that a resumed run repeats, until it had drawn a batch": {
        "accumulate": 1,
        "calm": True,
        "stops": (("on_validation_batch_end", 1), ("on_validation_end", 1)),
    },
    "indices were drawn under random states that are those of no stop": {
        "loader": "random sampler",
        "stops": (("on_train_batch_end", 2),),
    },
    "an index was drawn again after the last batch of an epoch": {"stops": (("on_train_batch_end", 4),)},
    "a second stop within the window that a first one had begun again": {
        "loader": "own generator",
        "accumulate": 3,
        "calm": True,
        "stops": (("on_after_backward", 2), ("on_after_backward", 2)),
    },
}
"""What once was wrong, beside what a case has."""
PLAIN = {
    "loader": "stateful sampler",
    "engine": {"data_parallel": "fsdp2"},
    "schedule": "step",
    "callbacks": (),
    "accumulate": 2,
    "calm": False,
    "switches": False,
    "ahead": False,
    "validate_every": 2,
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.every_case
def test_cases_that_were_found(pool2: RankPool, name: str) -> None:
    assert judge(pool2, {**PLAIN, **FOUND[name]}) == ""
