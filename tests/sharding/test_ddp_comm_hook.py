"""Communication hooks of DDP compress the gradient itself, not a sum over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Outcome,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, make_trainer, mean_loss


def _power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )


HOOKS: dict[str, tuple[Any, Any, Any]] = {
    "power sgd": (powerSGD_hook.powerSGD_hook, _power_sgd, None),
    "half": (default_hooks.fp16_compress_hook, lambda: None, None),
    "wrapped": (default_hooks.allreduce_hook, lambda: None, default_hooks.fp16_compress_wrapper),
}


def _both_ways(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of the strategy, and of a loop with DDP and the same hook that weighs each loss before its backward."""
    hook, make_state, wrapper = HOOKS[name]
    module = LabelledModule()
    strategy = AutomodelStrategy(
        data_parallel="ddp",
        count_window_ahead=True,
        ddp_comm_hook=hook,
        ddp_comm_state=make_state(),
        ddp_comm_wrapper=wrapper,
    )
    own = micro_batches(CASE)[dist.get_rank()]
    make_trainer(strategy, accumulate_grad_batches=2).fit(module, DataLoader(own, batch_size=None))

    model = LabelledModule().model
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(make_state(), hook if wrapper is None else wrapper(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for start in range(0, CASE.num_batches, 2):
        window = [batch for batches in micro_batches(CASE) for batch in batches[start : start + 2]]
        factor = dist.get_world_size() / max(
            sum(int((batch["labels"] != -100).sum()) for batch in window), 1
        )
        with ddp.no_sync():
            (mean_loss(ddp, own[start], "sum") * factor).backward()
        (mean_loss(ddp, own[start + 1], "sum") * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(module.model), full_weights(model)


@pytest.mark.every_case
@pytest.mark.parametrize("name", HOOKS)
def test_hook_sees_the_gradient(pool2: RankPool, name: str) -> None:
    # A number that is rounded to half precision may fall to either side.
    tolerance = TOLERANCE if name == "power sgd" else 1e-3
    for ours, plain in pool2.run(_both_ways, name):
        assert weight_error(Outcome(ours), Outcome(plain)) <= tolerance
