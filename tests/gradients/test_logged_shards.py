"""Reductions of FSDP2 gradients in a hook: logged they are those of the whole gradient, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import Optimizer

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.runs import STRATEGIES, LabelledModule, by_default, loader, make_trainer


class LogsNorms(LabelledModule):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        grad = next(iter(self.model.parameters())).grad
        assert grad is not None
        norm = grad.norm()
        self.log("norm", norm)
        self.log("mean_norm", norm, sync_dist=True)
        self.log_dict({"summed": norm, "other": 1.0}, sync_dist=True, reduce_fx="sum")
        self.reduced = self.trainer.strategy.reduce(norm, reduce_op="sum")
        self.norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def _log(options: dict[str, Any]) -> tuple[dict[str, float], float, float]:
    module = LogsNorms()
    trainer = make_trainer(AutomodelStrategy(**options), max_steps=1)
    trainer.fit(module, loader())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return metrics, module.reduced.item(), module.norm


@pytest.mark.parametrize("options", by_default({"fsdp2": {}, "ddp": STRATEGIES["ddp"]}, "fsdp2"))
def test_logged_reductions_are_of_all_shards(pool2: RankPool, options: dict[str, Any]) -> None:
    for metrics, reduced, norm in pool2.run(_log, options):
        assert norm > 0
        assert (metrics["norm"], metrics["mean_norm"]) == (pytest.approx(norm), pytest.approx(norm))
        assert (metrics["summed"], reduced) == (pytest.approx(2 * norm), pytest.approx(2 * norm))
