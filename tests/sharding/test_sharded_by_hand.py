"""Models that their own `configure_model` has sharded, in whole or in part, are exact or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, check_exact, fit_module
from tests.trainer.cases import Case
from tests.trainer.exactness import Outcome, assert_exact, weight_error
from tests.trainer.plain import ModelModule, differ_by_rank, filled_decoder, plain_weights, prefixed
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, first_by_default

CLIP = 0.05
CASE4 = Case(seed=22, telling="labels", num_batches=5, num_ranks=4, gap="micro_batches")
RECOMPUTED = {"reshard_during_accumulation": True, "activation_checkpointing": True}
REPLICAS = {"data_parallel_replicate_size": 2}


class ShardsByHand(ModelModule):
    """Shards some parts in `configure_model` over a mesh dimension that it names, and leaves the others plain."""

    dimension = "data_parallel"

    def configure_model(self) -> None:
        for part in (self.model.blocks[0], self.model.head):
            fully_shard(part, mesh=self.device_mesh[self.dimension])


class ShardsOverShards(ShardsByHand):
    dimension = "data_parallel_shard"


class ShardsOverReplicas(ShardsByHand):
    dimension = "data_parallel_replicate"


class ShardsManyRoots(ModelModule):
    """Several roots, one of them with a unit inside, and one with a divisor of its own."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.model.blocks[1].linear, mesh=mesh)
        for part in (*self.model.blocks, self.model.embedding, self.model.head):
            fully_shard(part, mesh=mesh)
        self.model.head.set_gradient_divide_factor(1.0)


PLAIN_PARTS = ("model.embedding.", "model.blocks.1.", "model.blocks.2.", "model.norm.")


def _fit_sharded_by_hand(
    make_module: type[ModelModule], options: dict[str, Any], plain_parts: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    module = make_module(filled_decoder())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(plain_parts):
                parameter.add_(dist.get_rank())
    weights, described = fit_module(module, options, gradient_clip_val=CLIP, max_epochs=2)
    assert "model.blocks.0 (Block)" in [*described["roots"], *described["units"]]
    return weights, [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]


@pytest.mark.parametrize(
    "options", by_default({"kept": STRATEGIES["kept"], "recomputed": RECOMPUTED}, "kept")
)
@pytest.mark.parametrize(
    ("make_module", "plain_parts"),
    [(ShardsByHand, PLAIN_PARTS), (ShardsOverShards, PLAIN_PARTS), (ShardsManyRoots, ("model.norm.",))],
)
def test_sharded_by_hand(
    pool2: RankPool, make_module: type[ModelModule], plain_parts: tuple[str, ...], options: dict[str, Any]
) -> None:
    """What `configure_model` left plain starts equal on all ranks, is averaged and clipped with the rest."""
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=CLIP)
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE, clip=clip, epochs=2))
    for weights, plain in pool2.run(_fit_sharded_by_hand, make_module, options, plain_parts):
        assert plain == [name for name in weights if name.startswith(plain_parts)]
        assert weight_error(Outcome(weights), expected) <= TOLERANCE


REFUSED = {
    "too few ranks": Refused(lambda: ShardsOverReplicas(filled_decoder()), ("blocks.0", "data_parallel"))
}


def test_sharded_by_hand_over_too_few_ranks_raises(pool2: RankPool) -> None:
    """A unit whose gradients would not be averaged over all data-parallel ranks is refused, never trained."""
    check_refused(pool2, __name__)


class ShardsReplicas(ModelModule):
    """Shards everything over both dimensions of the mesh."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel_replicate", "data_parallel_shard"]
        for part in (*self.model.blocks, self.model.embedding, self.model.norm, self.model.head):
            fully_shard(part, mesh=mesh)


@pytest.mark.parametrize("make_module", first_by_default([ShardsByHand, ShardsReplicas]))
def test_replicas_sharded_by_hand(pool4: RankPool, make_module: type[ModelModule]) -> None:
    """Over both dimensions, or over all ranks although the strategy itself would replicate."""
    check_exact(pool4, filled_decoder, REPLICAS, make_module, CASE4)


def _fit_replicas_that_differ() -> dict[str, Tensor]:
    module = ShardsReplicas(filled_decoder())
    differ_by_rank(module)
    return fit_module(module, REPLICAS, CASE4).weights


def test_replicas_sharded_by_hand_start_equal(pool4: RankPool) -> None:
    """Replicas whose ranks were seeded differently end with one model, not with two."""
    first, *others = pool4.run(_fit_replicas_that_differ)
    assert_exact(others, first, 0.0)
