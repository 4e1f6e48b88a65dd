"""Errors and warnings that a Trainer can bring about say what is wrong, the value, and what to do, on every rank."""

from __future__ import annotations

import copy
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, TinyDecoder, full_weights, micro_batches
from tests.trainer.plain import ModelModule
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import CASE, first_by_default, loader, make_trainer

DDP = {"data_parallel": "ddp"}


def decoder() -> nn.Module:
    return TinyDecoder(CASE.seed).double()


class CountsNothing(ModelModule):
    """Its batches hide their labels from the strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self({"input_ids": batch["input_ids"], "labels": batch["targets"]})


def _no_count_found(options: dict[str, Any], accumulate: int) -> tuple[str, bool, int]:
    module = CountsNothing(decoder())
    own = micro_batches(CASE)[dist.get_rank()]
    hidden = [{"input_ids": each["input_ids"], "targets": each["labels"]} for each in own]
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=accumulate)
    with pytest.raises(ValueError, match="label tokens") as raised:
        trainer.fit(module, DataLoader(hidden, batch_size=None))
    before = full_weights(decoder())
    after = full_weights(module.model)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return str(raised.value), unchanged, len(traceback.extract_tb(raised.value.__traceback__))


@pytest.mark.parametrize(
    ("options", "accumulate"), first_by_default([({}, 3), (DDP, 1)]), ids=["fsdp2", "ddp"]
)
def test_no_count_found(pool2: RankPool, options: dict[str, Any], accumulate: int) -> None:
    """At the first step, before any weight has changed: what was found, three ways, and the way out."""
    for message, unchanged, num_frames in pool2.run(_no_count_found, options, accumulate):
        assert unchanged
        assert num_frames <= 6  # of the script, and of `fit` down to the launcher
        assert "found no count (the batch is a dict with the keys ['input_ids', 'targets'])" in message
        assert "return {'loss': loss, 'num_label_tokens': n} from training_step" in message
        assert "self.manual_backward(loss, num_label_tokens=n)" in message
        assert "pass count_label_tokens=<function of the batch>" in message
        assert "put labels under batch['labels'] with -100" in message
        assert "pass per_token_loss=False" in message


class ReturnsAuxLoss(ModelModule):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = self(batch)
        return {"loss": loss, "aux_loss": 0.1 * loss}


class ShardsItself(ModelModule):
    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class BackwardOfAVector(ModelModule):
    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        losses = self(batch).expand(3)
        self.manual_backward(losses, gradient=torch.ones_like(losses))


class CountsStepsInSetup(ModelModule):
    """After a validation, whose run is not that of the fit."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.steps = self.trainer.estimated_stepping_batches


class CollectsOthers(ModelModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.collected = list(copy.deepcopy(model).parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.collected, lr=0.1)


class OrdersByRank(ModelModule):
    """As `list(set(parameters))` does."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[:: 1 - 2 * dist.get_rank()], lr=0.1)


class FollowsItsOwnMetric(ModelModule):
    """Its scheduler halves the learning rate as soon as a metric rises: on rank 1 with the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("metric", float(batch_idx * (2 * dist.get_rank() - 1)))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        options = {"scheduler": scheduler, "monitor": "metric", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": options}


class SecondOrder(ModelModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class SpreadsItsStates(ModelModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


def refused(make: type[ModelModule], *sentences: str, **kwargs: Any) -> Refused:
    return Refused(lambda: make(decoder()), sentences, **kwargs)


REFUSED = {
    "aux_loss": refused(
        *(ReturnsAuxLoss, "ValueError", "returned 'aux_loss'", "first backward"),
        "Pass count_window_ahead=True, or per_token",
    ),
    "sharded_under_ddp": refused(
        *(ShardsItself, "ValueError", "ShardsItself is already sharded by FSDP2", "data_parallel='fsdp2'"),
        options=DDP,
    ),
    "vector": refused(BackwardOfAVector, "ValueError: The loss of a backward has the shape [3], but must"),
    "fewer_devices_than_the_group": refused(
        ModelModule,
        "ValueError: The process group that exists has 2 ranks, and the Trainer asks for 1 (devices x",
        settings={"devices": 1},
    ),
    "steps_in_setup": refused(
        CountsStepsInSetup, "take it in configure_optimizers or on_fit_start", validates_first=True
    ),
    "another_model": refused(
        CollectsOthers,
        "13 parameters of SGD are not those of CollectsOthers",
        "configure_optimizers, from self.parameters",
    ),
    "order_by_rank": refused(
        OrdersByRank,
        "their parameters in another order on each rank: number 0 of SGD 0 is model.",
        " on rank 0 and model.",
    ),
    "learning_rate_by_rank": refused(
        FollowsItsOwnMetric,
        "Ranks step with different options of their optimizers: lr of ",
        "sync_dist=True",
    ),
    "lbfgs": refused(
        *(SecondOrder, "LBFGS computes gradients again within one step", "Pass accumulate_grad_batches=1"),
        settings={"accumulate_grad_batches": 2},
    ),
    "spread_states": refused(
        *(SpreadsItsStates, "ZeroRedundancyOptimizer spreads its states", "data_parallel='fsdp2'"),
        options=DDP,
    ),
    "validation_after_a_time": refused(
        *(
            ModelModule,
            "ValueError",
            "is a time, which ends on each rank after another batch: pass a number",
        ),
        options=DDP,
        settings={"val_check_interval": timedelta(hours=1)},
    ),
}


def test_errors(pool2: RankPool) -> None:
    check_refused(pool2, __name__)


def test_error_of_a_mesh_that_is_not_there_yet() -> None:
    with pytest.raises(RuntimeError, match=r"device_mesh exists once .* from configure_model\(\) on"):
        _ = AutomodelStrategy().device_mesh


def _errors_after_a_fit(folder: str) -> list[str]:
    """Of options that nobody would take, and of clipping by no number or by no algorithm."""
    trainer = make_trainer(AutomodelStrategy())
    trainer.fit(ModelModule(decoder()), loader())
    messages = []
    for call in (
        lambda: trainer.save_checkpoint(Path(folder) / "some.ckpt", storage_options={"some": "option"}),
        lambda: trainer.strategy.clip_gradients(trainer.optimizers[0], -1),
        lambda: trainer.strategy.clip_gradients(trainer.optimizers[0], 1.0, "L2"),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        messages.append(str(raised.value))
    return messages


def test_errors_after_a_fit(pool2: RankPool, tmp_path: Path) -> None:
    for of_storage, of_value, of_algorithm in pool2.run(_errors_after_a_fit, str(tmp_path)):
        assert "({'some': 'option'}) would have no effect" in of_storage
        assert "fsspec" in of_storage
        assert "must be a positive number, got -1" in of_value
        assert "got 'L2'" in of_algorithm


class HalfPrecisionLoss(ModelModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch).bfloat16()


def _warnings(make_module: type[ModelModule], options: dict[str, Any]) -> list[str]:
    """Of two fits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(AutomodelStrategy(**options))
        for _ in range(2):
            trainer.fit(make_module(decoder()), loader())
            trainer.fit_loop.max_epochs += 1
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("options", [{**DDP, "cpu_offload": True, "reshard_during_accumulation": False}, {}])
def test_warnings_come_once(pool2: RankPool, options: dict[str, Any]) -> None:
    """Rank 0 says it, for two fits of eight micro-batches once, and nothing of a loss in full precision."""
    told, silent = pool2.run(_warnings, HalfPrecisionLoss, options)
    about = [message for message in told if "torch.bfloat16 loss" in message]
    assert ["compute the loss in float32" in message for message in about] == [True]
    named = [name for name in ("reshard_during_accumulation", "cpu_offload") if name in options]
    expected = [f"{name} has no effect with data_parallel='ddp'." for name in named]
    assert [message for message in told if "no effect" in message] == expected
    assert not any("bfloat16" in message or "no effect" in message for message in silent)
    assert not any("float32" in message for message in pool2.run(_warnings, ModelModule, options)[0])


class Switches(ModelModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.automatic_optimization = self.starts_automatic != (batch_idx >= 2)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss


def _switch(starts_automatic: bool) -> str:
    module = Switches(decoder())
    module.automatic_optimization = module.starts_automatic = starts_automatic
    with pytest.raises(RuntimeError) as raised:
        make_trainer(AutomodelStrategy(**DDP)).fit(module, loader(CASE))
    return str(raised.value)


@pytest.mark.parametrize("starts_automatic", [True, False])
def test_switched_optimization(pool2: RankPool, starts_automatic: bool) -> None:
    """Ranks would train apart under DDP, and only the next validation would say so."""
    for message in pool2.run(_switch, starts_automatic):
        assert "automatic_optimization was switched" in message
