"""What user code writes to weights is never lost, as in one process, whether they are gathered at that time or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rank_pool import RankPool
from tests.sharding.writers import PLACES, UPDATES, fit, fit_plainly
from tests.trainer.exactness import Outcome, weight_error
from tests.trainer.runs import STRATEGIES, TOLERANCE

CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{f"teacher-{update}-{place}": ("Teaches", (update, place)) for update in UPDATES for place in PLACES},
    "teacher-averaged-by-torch": ("AveragesByTorch", ()),
    **{
        f"normalised-{how}": ("Normalises", (how,))
        for how in ("swav", "in place", "data", "unit", "vector", "reset", "between")
    },
    "normalised-in-forward": ("InForward", ()),
    **{f"clamped-{place}": ("Clamps", (place,)) for place in ("start", "end", "batch_start", "batch_end")},
    **{f"wgan-{place}": ("WassersteinGAN", (place,)) for place in ("start", "forward", "step")},
}


def _error(pool: RankPool, options: dict[str, Any], case: str, **kwargs: Any) -> float:
    name, args = CASES[case]
    if case.startswith("wgan") and "data_parallel" in options:
        options = {**options, "ddp_kwargs": {"find_unused_parameters": True}}
    expected = Outcome(fit_plainly(name, args, **kwargs), None)
    return max(weight_error(Outcome(w, None), expected) for w in pool.run(fit, options, name, args, **kwargs))


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", STRATEGIES)
def test_written_weights(pool2: RankPool, engine: str, case: str) -> None:
    assert _error(pool2, STRATEGIES[engine], case) <= TOLERANCE
