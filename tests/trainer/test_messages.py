"""Errors and warnings that a Trainer can bring about say what is wrong, the value, and what to do, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_automodel import AutomodelStrategy
from tests.data.test_window_ahead import DrawsItsBatches
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch
from tests.trainer.plain import ModelModule
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import decoder, loader, make_trainer, warnings_of
from tests.trainer.test_precision import ShardsItself

DDP = {"data_parallel": "ddp"}


class CountsNothing(ModelModule):
    """Its batches hide their labels from the strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self({"input_ids": batch["input_ids"], "labels": batch["targets"]})


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


class SecondOrder(ModelModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class SpreadsItsStates(ModelModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


class Switches(ModelModule):
    """Ranks would train apart under DDP, and only the next validation would say so."""

    def __init__(self, model: nn.Module, starts_automatic: bool) -> None:
        super().__init__(model)
        self.automatic_optimization = self.starts_automatic = starts_automatic

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.automatic_optimization = self.starts_automatic != (batch_idx >= 2)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss


def refused(make: Callable[[nn.Module], ModelModule], *sentences: str, **kwargs: Any) -> Refused:
    return Refused(lambda: make(decoder()), sentences, **kwargs)


def without_labels() -> list[Any]:
    """Batches in which nobody finds labels."""
    return [{"input_ids": each["input_ids"], "targets": each["labels"]} for each in loader()]


REFUSED = {
    "no_count": refused(
        *(CountsNothing, "the keys ['input_ids', 'targets']; label_key is 'labels')"),
        "return {'loss': loss, 'num_label_tokens': n} from training_step",
        "put labels under batch['labels'] with -100",
        batches=without_labels,
        settings={"accumulate_grad_batches": 3},
    ),
    "drawn_batches": Refused(
        DrawsItsBatches,  # Lightning zeroes in mid-window there
        ("accumulate_grad_batches=3 does not work with training_step(dataloader_iter",),
        settings={"accumulate_grad_batches": 3},
    ),
    "pruning": refused(
        *(ModelModule, "ValueError", "which FSDP2 would not gather", "data_parallel='ddp'"),
        settings={
            "callbacks": [
                ModelPruning("l1_unstructured", amount=0.4, use_lottery_ticket_hypothesis=False),
            ]
        },
    ),
    "switched_to_manual": refused(
        lambda model: Switches(model, True), "automatic_optimization was switched", options=DDP
    ),
    "switched_to_automatic": refused(
        lambda model: Switches(model, False), "automatic_optimization was switched", options=DDP
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
    """Of options that nobody would take, and of clipping by no algorithm."""
    trainer = make_trainer(AutomodelStrategy())
    trainer.fit(ModelModule(decoder()), loader())
    messages = []
    for call in (
        lambda: trainer.save_checkpoint(Path(folder) / "some.ckpt", storage_options={"some": "option"}),
        lambda: trainer.strategy.clip_gradients(trainer.optimizers[0], 1.0, "L2"),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        messages.append(str(raised.value))
    return messages


def test_errors_after_a_fit(pool2: RankPool, tmp_path: Path) -> None:
    for of_storage, of_algorithm in pool2.run(_errors_after_a_fit, str(tmp_path)):
        assert "({'some': 'option'}) would have no effect" in of_storage
        assert "fsspec" in of_storage
        assert "got 'L2'" in of_algorithm


class HalfPrecisionLoss(ModelModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch).bfloat16()


def _warnings(make_module: type[ModelModule], options: dict[str, Any]) -> list[str]:
    """Of two fits."""
    trainer = make_trainer(AutomodelStrategy(**options))
    told = []
    for _ in range(2):
        told += warnings_of("", trainer.fit, make_module(decoder()), loader())
        trainer.fit_loop.max_epochs += 1
    return told


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
