"""Parts of a resume state: random states as plain data, counters for other ranks."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

from lightning_automodel.resume import fit, loops, rng, world_size


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_global_states_come_back() -> None:
    device = torch.device("cpu")
    noted = rng.global_states(device)
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    assert (random.random(), np.random.rand(), torch.rand(()).item()) != drawn
    rng.set_global_states(through_a_file(noted), device)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == drawn


class Mixed(Sampler):
    """Holds generators, one of them twice, and a sampler with one."""

    def __init__(self) -> None:
        self.first = torch.Generator()
        self.second = torch.Generator()
        self.again = self.first
        self.inner = RandomSampler(range(3), generator=torch.Generator())

    def __len__(self) -> int:
        return 3


def test_generators_come_back() -> None:
    """Those of the loader and of all samplers below, each once."""
    sampler = Mixed()
    generator = torch.Generator()
    loader = DataLoader(range(3), sampler=sampler, generator=generator)
    generators = [generator, sampler.first, sampler.second, sampler.inner.generator]
    noted = rng.own_states(loader)
    assert len(noted["generators"]) == 4
    drawn = [torch.rand((), generator=each).item() for each in generators]
    assert [torch.rand((), generator=each).item() for each in generators] != drawn
    rng.set_own_states(loader, through_a_file(noted))
    assert [torch.rand((), generator=each).item() for each in generators] == drawn


@pytest.mark.parametrize(("then", "now", "batches"), [(4, 2, 6), (2, 4, 1), (4, 3, 4), (2, 2, 3)])
def test_as_many_samples_count_as_used(then: int, now: int, batches: int) -> None:
    """Three batches of `then` ranks, of which a step was just taken, in the second epoch."""
    saved = {
        "at": {"stage": loops.STEP, "batches": 3},
        "own": {"last_step": None},
        "loaders": [
            {"by": ("indices", 7, 2), "iteration": ({}, 0), "seed": 5},
            {"by": ("state", None, None), "state": {}},
        ],
    }
    plan = world_size.carried_over({"ranks": [saved], "sizes": {"data_parallel": then}}, now)
    assert plan["at"]["batches"] == batches
    indices = {"by": ("indices", None, 2), "iteration": (None, 0), "seed": 5}
    without = {"generators": [], "samplers": []}
    assert plan["loaders"] == [indices | without, {"by": ("no position", None, None), **without}]


def test_counters_are_consistent() -> None:
    """In mid-batch, having gone back to batch 2 of the second epoch: all trackers agree, and totals keep the first."""
    trackers = {"ready": 5, "started": 5, "processed": 4, "completed": 4}
    steps = {"total": {"ready": 3, "completed": 2}, "current": {"ready": 2, "completed": 1}}
    saved = {
        "state_dict": {"combined_loader": [{}], "own": 1},
        "epoch_progress": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": 9},
        "epoch_loop.batch_progress": {
            "current": trackers,
            "total": {name: 7 + value for name, value in trackers.items()},
            "is_last_batch": True,
        },
        "epoch_loop.val_loop.batch_progress": {
            "total": dict(trackers),
            "current": dict(trackers),
            "is_last_batch": True,
        },
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": steps}},
        "epoch_loop.manual_optimization.optim_step_progress": steps,
        "epoch_loop.scheduler_progress": steps,
    }
    counters = loops.counters_at(saved, loops.Position(loops.BATCH, 2, 1), 10)
    assert set(counters["epoch_loop.batch_progress"]["current"].values()) == {2}
    assert set(counters["epoch_loop.batch_progress"]["total"].values()) == {9}
    assert not counters["epoch_loop.batch_progress"]["is_last_batch"]
    assert counters["epoch_progress"]["total"] == {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    assert counters["epoch_loop.scheduler_progress"]["total"] == {"ready": 2, "completed": 2}
    assert counters["state_dict"] == {"own": 1}
    assert loops.counters_at(counters, loops.Position(loops.BATCH, 2, 1), 10) == counters


def test_another_format_is_refused() -> None:
    resume: Any = SimpleNamespace(
        _has_started=False, _can_resume=True, _trainer=SimpleNamespace(callbacks=[])
    )
    with pytest.raises(
        ValueError, match="has format 1, and this version of lightning_automodel knows format 6"
    ):
        fit.Resume.load(resume, {"format": 1}, {}, {}, 0)


def test_generators_of_modules() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module.noise = torch.Generator()
    module[0].noise = torch.Generator()
    assert rng.generators_of(module) == {".noise": module.noise, "0.noise": module[0].noise}
