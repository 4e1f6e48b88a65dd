"""Collectives that behave as NCCL's: they are queued, nothing is raised, and the watchdog ends the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import LabelledModule, loader, make_trainer

NAMES = [
    "collectives_are_queued",
    "reads_must_wait",
]


@pytest.fixture(scope="module")
def nccl_pool2(extension: None) -> Iterator[RankPool]:
    """Two ranks on the second device, with such collectives."""
    pool = RankPool(2, "nccl")
    yield pool
    pool.stop()


def _call(name: str) -> None:
    from tests.second_device import nccl_behaviour  # registers the device, in a rank's process alone

    torch.accelerator.set_device_index(dist.get_rank())
    getattr(nccl_behaviour, name)()


@pytest.mark.sweep  # of the device itself; the faults of tests/failure hang on it by default
@pytest.mark.parametrize("name", NAMES)
def test_behaviour(nccl_pool2: RankPool, name: str) -> None:
    """Queued work, blocked reads, order of streams, connecting, abort and shutdown."""
    nccl_pool2.run(_call, name, timeout_s=30)


def _trained(**options: Any) -> dict[str, torch.Tensor]:
    """Full weights after a fit with accumulation, clipping and validation."""
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        limit_val_batches=2,
    )
    module = LabelledModule()
    trainer.fit(module, loader(), loader())
    return full_weights(module)


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}], ids=["fsdp2", "ddp"])
def test_fits_are_those_of_the_plain_device(
    pool2: RankPool, nccl_pool2: RankPool, options: dict[str, Any]
) -> None:
    """To the bit."""
    expected, found = (pool.run(_trained, **options)[0] for pool in (pool2, nccl_pool2))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
