"""Parts of a resume state: random states as plain data, counters for other ranks."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from lightning_automodel.resume import other_world_size, rng
from lightning_automodel.resume.loops import AFTER_BATCH, BATCH_END


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(rng.savable(value), file)
    file.seek(0)
    return rng.loaded(torch.load(file, weights_only=True))


def test_global_states_come_back() -> None:
    device = torch.device("cpu")
    noted = rng.note(device)
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    assert (random.random(), np.random.rand(), torch.rand(()).item()) != drawn
    rng.set_to(through_a_file(noted), device)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == drawn


class Mixed(Sampler):
    """Holds a generator of each kind, one of them twice."""

    def __init__(self) -> None:
        self.first, self.second, self.third = torch.Generator(), random.Random(1), np.random.default_rng(2)
        self.again = self.first
        self.inner = RandomSampler(range(3), generator=torch.Generator())

    def __len__(self) -> int:
        return 3


def draw(generator: rng.Generator) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.random()


def test_generators_come_back() -> None:
    """Those of the loader and of all samplers below, each once."""
    loader = DataLoader(range(3), sampler=Mixed(), generator=torch.Generator())
    generators = rng.generators_of(loader)
    assert len(generators) == 5
    noted = rng.note_generators(generators)
    drawn = [draw(generator) for generator in generators]
    assert [draw(generator) for generator in generators] != drawn
    rng.set_generators(generators, through_a_file(noted))
    assert [draw(generator) for generator in generators] == drawn


def test_other_generators_are_left_alone() -> None:
    generators = [torch.Generator().manual_seed(1)]
    expected = generators[0].get_state()
    rng.set_generators(generators, [])
    assert torch.equal(generators[0].get_state(), expected)


@pytest.mark.parametrize(("then", "now", "batches"), [(4, 2, 6), (2, 4, 1), (4, 3, 4), (2, 2, 3)])
def test_as_many_samples_count_as_used(then: int, now: int, batches: int) -> None:
    """Three batches of `then` ranks, of which a step was just taken, in the second epoch."""
    trackers = ("ready", "started", "processed", "completed")
    progress = {
        "current": dict.fromkeys(trackers, 3) | {"completed": 2},
        "total": dict.fromkeys(trackers, 10) | {"completed": 9},
        "is_last_batch": False,
    }
    saved = {
        "next": BATCH_END,
        "progress": {"epoch_loop.batch_progress": progress},
        "position": {
            "started": {"torch": torch.zeros(1)},
            "ahead": None,
            "consumed": 3,
            "index": 3,
            "cycled": [],
            "loaders": [{"made": 1, "first": 2, "yielded": 3, "was_restarted": False}, {"state": {}}],
        },
        "metrics": {"results": {"loss": 1}, "objects": {"mean": 1}, "seen": {}},
        "own": {"engine": {"order": [0]}, "last_step": None},
    }
    plan = other_world_size.carried_over({"ranks": [saved], "sizes": {"data_parallel": then}}, now)
    counted = plan["progress"]["epoch_loop.batch_progress"]
    assert plan["next"] == AFTER_BATCH
    assert set(counted["current"].values()) == {batches}
    assert set(counted["total"].values()) == {7 + batches}
    assert plan["position"]["consumed"] == plan["position"]["loaders"][0]["yielded"] == batches
    assert plan["position"]["loaders"][1] is None
    assert plan["random"] is None
    assert not plan["metrics"]["results"]
    assert saved["progress"]["epoch_loop.batch_progress"]["current"]["ready"] == 3
