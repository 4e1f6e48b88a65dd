"""Options that trade memory for communication: shards in host memory, parameters freed between forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Outcome, full_weights, weight_error
from tests.trainer.plain import ModelModule, plain_weights, prefixed
from tests.trainer.runs import CASE, TOLERANCE, by_default, loader, make_trainer
from tests.trainer.test_models import Scalars

ACCUMULATE = 3
CASE4 = replace(CASE, num_ranks=4)
CLIPPING: dict[str, tuple[float, Any]] = {
    "norm": (0.05, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05)),
    "value": (0.005, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.005)),
}


def fit(
    options: dict[str, Any], num_ranks: int, clipping: str | None = None
) -> tuple[Outcome, set[str], Any]:
    """Weights; devices of the optimizer's tensors; what `describe` says."""
    module = ModelModule(Scalars())
    strategy = AutomodelStrategy(**options)
    clip = (
        {}
        if clipping is None
        else {"gradient_clip_algorithm": clipping, "gradient_clip_val": CLIPPING[clipping][0]}
    )
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, **clip)
    trainer.fit(module, loader(replace(CASE, num_ranks=num_ranks)))
    state = [v for s in trainer.optimizers[0].state.values() for v in s.values() if isinstance(v, Tensor)]
    return Outcome(full_weights(module)), {str(tensor.device) for tensor in state}, strategy.describe()


OFFLOADED = {
    "kept": {"reshard_during_accumulation": False},
    "resharded": {"reshard_during_accumulation": True},
    "undeferred": {"defer_fsdp_grad_sync": False},
}


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("options", by_default(OFFLOADED, "undeferred"))
def test_offloaded_shards_are_clipped(pool2: RankPool, options: dict[str, Any], clipping: str) -> None:
    """Exact with plain parameters beside, whatever a micro-batch communicates; clipping matters."""
    clipped = prefixed(plain_weights(Scalars(), ACCUMULATE, clip=CLIPPING[clipping][1]))
    assert weight_error(prefixed(plain_weights(Scalars(), ACCUMULATE)), clipped) > 1e-6
    for outcome, devices, described in pool2.run(fit, {"cpu_offload": True, **options}, 2, clipping):
        assert weight_error(outcome, clipped) <= TOLERANCE
        assert devices == {"cpu"}
        assert described["cpu_offload"] is True


@pytest.mark.parametrize(
    "options",
    by_default(
        {
            "two": {"reshard_after_forward": 2},
            "two-undeferred": {"reshard_after_forward": 2, "defer_fsdp_grad_sync": False},
            "two-offloaded": {
                "reshard_after_forward": 2,
                "cpu_offload": True,
                "activation_checkpointing": True,
            },
            "all": {"reshard_after_forward": 4},
            "never": {"reshard_after_forward": False},
            "kept": {"reshard_after_forward": 2, "reshard_during_accumulation": False},
        },
        "two",
    ),
)
def test_reshard_after_forward(pool4: RankPool, options: dict[str, Any]) -> None:
    """To a part of the ranks, to all of them, or not at all, as where parameters are kept for the window."""
    expected = prefixed(plain_weights(Scalars(), ACCUMULATE, CASE4))
    for outcome, _, described in pool4.run(fit, {"reshard_during_accumulation": True, **options}, 4):
        assert weight_error(outcome, expected) <= TOLERANCE
        is_kept = options.get("reshard_during_accumulation") is False
        assert described["reshard_after_forward"] == (not is_kept and options["reshard_after_forward"])
