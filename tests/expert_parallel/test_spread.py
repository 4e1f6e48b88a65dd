"""Experts spread over ranks train as in one process that holds all of them.

A rank's experts see the tokens of all ranks of their group, so that the average over the ranks that hold the
same experts is too large by the number of ranks in the group. Numbers of experts are chosen so that shards
are uneven, and empty.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tests.expert_parallel.mixtures import (
    ACCUMULATE,
    CASE,
    MixtureDecoder,
    SpreadModule,
    error,
    fit,
)
from tests.rank_pool import RankPool
from tests.trainer.plain import plain_weights
from tests.trainer.runs import TOLERANCE, by_default

CLIP = 0.3

MODES: dict[str, dict[str, Any]] = {
    "kept": {},
    "all ranks": {"expert_parallel_size": 4},
    "hsdp": {"data_parallel_replicate_size": 2},
    "hsdp, all-reduce": {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"},
    "hsdp, undeferred": {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": False},
    "resharded": {"reshard_during_accumulation": True, "prefetch": 2},
    "undeferred": {"defer_fsdp_grad_sync": False},
    "recomputed": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": "selective"},
    "counted ahead": {"count_window_ahead": True},
    "offloaded": {"cpu_offload": True},
}


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(MODES, "kept", "hsdp, all-reduce"))
def test_as_one_process(pool4: RankPool, options: dict[str, Any]) -> None:
    """Also the norm of all gradients, which clipping uses."""
    norms: list[Tensor] = []
    expected = plain_weights(
        MixtureDecoder(), ACCUMULATE, CASE, clip=lambda p: norms.append(nn.utils.clip_grad_norm_(p, CLIP))
    )
    for found in pool4.run(fit, options, gradient_clip_val=CLIP):
        assert error(found.weights, expected) <= TOLERANCE
        assert found.grad_norm == pytest.approx(float(norms[-1]), rel=TOLERANCE)


class ClippedByTorch(SpreadModule):
    """Clips as in a plain loop, over the gradients of two meshes."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), CLIP)


def test_clipped_by_torch(pool4: RankPool) -> None:
    clipped = plain_weights(
        MixtureDecoder(6),
        ACCUMULATE,
        CASE,
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, CLIP),
    )
    assert error(plain_weights(MixtureDecoder(6), ACCUMULATE, CASE), clipped) > 1e-3, "nothing was clipped"
    for found in pool4.run(fit, {}, ClippedByTorch, number=6):
        assert error(found.weights, clipped) <= TOLERANCE


@pytest.mark.parametrize("number", [2, 6])
def test_uneven_shards(pool4: RankPool, number: int) -> None:
    expected = plain_weights(MixtureDecoder(number), ACCUMULATE, CASE)
    assert error(pool4.run(fit, {}, number=number)[0].weights, expected) <= TOLERANCE
