"""SIGKILL at a random moment: every checkpoint in sight afterwards is whole, and one of those that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.checkpoint.killed import (
    Kill,
    expected_weights,
    leftover_count,
    run_and_kill,
    weights_in,
    whole_names,
)

FORMS: dict[str, dict[str, Any]] = {
    "shards": {},
    "shards_in_background": {"async_checkpoint": True},
    "replicated": {"data_parallel": "ddp"},
    "replicated_in_background": {"data_parallel": "ddp", "async_checkpoint": True},
}
KILLS_EACH = 30
LARGEST_STEP = 400


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Tensor]]:
    return expected_weights(LARGEST_STEP)


def check(folder: Path, expected: list[dict[str, Tensor]]) -> int:
    """The newest step that was saved. Every checkpoint in sight must load and have the weights of its step."""
    steps = []
    for path in whole_names(folder):
        step, weights = weights_in(path)
        steps.append(step)
        worst = max(float((weights[name] - value).abs().max()) for name, value in expected[step].items())
        assert worst <= 1e-10, (path, step, worst)
    assert steps, "nothing to resume from"
    return max(steps)


def kill_once(seed: int, form: str, folder: Path, expected: list[dict[str, Tensor]]) -> tuple[int, int]:
    folder.mkdir()
    run_and_kill(Kill.draw(seed, FORMS[form]), folder)
    return check(folder / "saved", expected), leftover_count(folder / "saved")


@pytest.mark.parametrize(
    "form", ["shards_in_background", pytest.param("replicated", marks=pytest.mark.sweep)]
)
def test_kill(tmp_path: Path, expected: list[dict[str, Tensor]], form: str) -> None:
    """Once by default."""
    kill_once(1, form, tmp_path / "run", expected)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", FORMS)
def test_kills(tmp_path: Path, expected: list[dict[str, Tensor]], form: str) -> None:
    """Thirty random moments and victims for each form: some of them within a save."""
    outcomes = [kill_once(seed, form, tmp_path / str(seed), expected) for seed in range(KILLS_EACH)]
    within_a_save = sum(leftovers > 0 for _, leftovers in outcomes)
    print(
        f"{form}: {len(outcomes)} kills, {within_a_save} of them within a save; newest steps"
        f" {[s for s, _ in outcomes]}"
    )
    assert len({step for step, _ in outcomes}) > 5, "all were killed at the same few steps"
    assert max(step for step, _ in outcomes) < LARGEST_STEP, "the run had ended"
    assert within_a_save > 0, "no kill came within a save"
