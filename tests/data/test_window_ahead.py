"""`count_window_ahead`: every loss is weighed before its backward, however batches reach the Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.data.plain import own_batches, train_windows
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import LEARNING_RATE, assert_exact, full_weights, micro_batches
from tests.trainer.runs import CASE, LabelledModule, make_trainer

# --- Misuse -----------------------------------------------------------------------------------------------------------


class HasAuxiliaryLoss(LabelledModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        aux = 0.1 * next(self.parameters()).square().sum()
        return {"loss": self(batch) + aux, "aux_loss": aux}


class ModelOutput(dict):
    """Named as transformers names it."""


class ReturnsModelOutput(HasAuxiliaryLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ModelOutput(super().training_step(batch, batch_idx))


class ReturnsAnotherCount(LabelledModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self(batch), "num_label_tokens": 1234}


class DropsLabels(LabelledModule):
    """After the batch was drawn: gradients would be divided by another number of tokens than they hold."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        labels = batch["labels"].clone()
        labels[:, ::2] = -100
        return {**batch, "labels": labels}


class LengthensTheWindow(LabelledModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.accumulate_grad_batches = 3
        return self(batch)


class DrawsItsBatches(LabelledModule):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self(next(dataloader_iter)[0])


class StepsInBackward(LabelledModule):
    """As torch's tutorial has it: an optimizer for each parameter, and no gradient outlives the backward."""

    def configure_optimizers(self) -> Any:
        optimizers = {p: torch.optim.SGD([p], lr=LEARNING_RATE, momentum=0.9) for p in self.parameters()}

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(step)


def _misuse(module: type[LabelledModule], options: dict[str, Any]) -> None:
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=2)
    trainer.fit(module(), DataLoader(own_batches((4, 4)), batch_size=None))


AHEAD = {"count_window_ahead": True}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ReturnsModelOutput, AHEAD, r"model.config.router_aux_loss_coef \* out.aux_loss"),
        (HasAuxiliaryLoss, {}, "Pass count_window_ahead=True"),
        (ReturnsAnotherCount, AHEAD, r"has counted \d+ label tokens .* training_step has 1234"),
        (DropsLabels, AHEAD, r"has counted \d+ label tokens .* training_step has \d+: change labels in the"),
        (LengthensTheWindow, AHEAD, r"counted ahead as \d micro-batches .* ends after 3 backward"),
        (DrawsItsBatches, AHEAD, "takes the batch instead of a dataloader_iter"),
        (
            StepsInBackward,
            {},
            "_hook on model.embedding.weight, which is sharded: .* with count_window_ahead=True",
        ),
        (
            StepsInBackward,
            {"data_parallel": "ddp"},
            "13 parameters have post-accumulate-gradient hooks .*pass count_window_ahead=True",
        ),
        (StepsInBackward, {**AHEAD, "data_parallel": "ddp"}, "before they are final"),
        (LabelledModule, {**AHEAD, "label_key": "targets"}, "counts a batch before training_step sees it"),
    ],
)
def test_misuse_is_told(pool2: RankPool, module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool2.run(_misuse, module, options)


# --- Steps in the backward --------------------------------------------------------------------------------------------


class HoldsNoGradient(Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert all(parameter.grad is None for parameter in module.parameters())


def _step_in_backward(accumulate: int) -> dict[str, Tensor]:
    module = StepsInBackward()
    trainer = make_trainer(
        AutomodelStrategy(count_window_ahead=True),
        accumulate_grad_batches=accumulate,
        callbacks=[HoldsNoGradient()],
    )
    trainer.fit(module, DataLoader(own_batches((6, 6)), batch_size=None))
    return full_weights(module.model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_within_the_backward(pool2: RankPool, accumulate: int) -> None:
    model = LabelledModule().model
    starts = range(0, 6, accumulate)
    train_windows(
        model,
        [
            [batch for own in micro_batches(CASE) for batch in own[start : start + accumulate]]
            for start in starts
        ],
    )
    assert_exact(pool2.run(_step_in_backward, accumulate), full_weights(model))
