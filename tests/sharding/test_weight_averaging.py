"""Averages of weights by Lightning's callbacks: exact against torch's averages in the plain loop, on shards and copies.

Validation in mid-window swaps the average in and out: training must not notice, gathered parameters not
outlive it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, fit_module
from tests.trainer.exactness import (
    VOCABULARY,
    assert_exact,
    full_weights,
    micro_batches,
    relative_error,
    weight_error,
)
from tests.trainer.plain import ModelModule, filled_decoder, sgd, train_model_plainly, windows
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, loader, make_trainer, mean_loss

EPOCHS = 2
VALIDATE_EVERY = 2
DECAY = 0.7
WRONG = 1e-6
ENGINES = {"fsdp2": STRATEGIES["kept"], "ddp": STRATEGIES["ddp"]}


class Tempered(nn.Module):
    """A decoder with a scalar parameter, which is never sharded, and a buffer that follows the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = filled_decoder()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("newest", torch.zeros(2, dtype=torch.float64))
        self.step = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.training:
            self.newest.fill_(self.step)
        return self.decoder(input_ids) / self.temperature


class Evaluates(ModelModule):
    """Keeps the summed token loss of the first batch of each validation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.losses.append(float(mean_loss(self.model, batch, "sum")))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Full weights and buffers; a collective where they are sharded."""
    return full_weights(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def first_losses(model: nn.Module) -> list[float]:
    """By rank: what a validation finds in its first batch."""
    model.eval()
    with torch.no_grad():
        return [float(mean_loss(model, batches[0], "sum")) for batches in micro_batches(CASE)]


def averaged_plainly() -> tuple[dict[str, Tensor], list[list[float]]]:
    """The average after all epochs, and what each validation finds with it."""
    model = Tempered()
    averaged = AveragedModel(model, use_buffers=True, avg_fn=get_ema_avg_fn(DECAY))
    optimizer = sgd(model)
    found: list[list[float]] = []  # with the average after none, one, ... of the windows of an epoch

    def end_window(*_: Any) -> None:
        averaged.update_parameters(model)
        found.append(first_losses(averaged.module))

    optimizer.register_step_post_hook(end_window)
    losses = []
    for _ in range(EPOCHS):
        found[:] = [first_losses(averaged.module)]
        train_model_plainly(model, ACCUMULATE, make_optimizer=lambda _: optimizer)
        for last in range(VALIDATE_EVERY - 1, CASE.num_batches, VALIDATE_EVERY):
            losses.append(found[sum(window[-1] <= last for window in windows(CASE, ACCUMULATE))])
    return state(averaged.module), losses


def _fit(options: dict[str, Any], callbacks: list[Callback], **settings: Any) -> Evaluates:
    module = Evaluates(Tempered())
    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, **settings}
    trainer = make_trainer(AutomodelStrategy(**options), callbacks=callbacks, **settings)
    trainer.fit(module, loader(), loader() if "val_check_interval" in settings else None)
    return module


def _average() -> tuple[dict[str, Tensor], list[float], int]:
    callback: Any = _ema()
    module = _fit(STRATEGIES["kept"], [callback], val_check_interval=VALIDATE_EVERY)
    held = sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        for parameter in callback._average_model.parameters()
    )
    return state(module.model), module.losses, held


def test_average(pool2: RankPool) -> None:
    """Training ends with the average, every validation sees it, and no rank holds more of it than of the weights.

    `tests/search` draws averages under everything else, on replicas too.
    """
    expected, losses = averaged_plainly()
    trained = Tempered()
    train_model_plainly(trained, ACCUMULATE, epochs=EPOCHS)
    total = sum(parameter.numel() for parameter in trained.parameters())
    assert weight_error(state(trained), expected) > WRONG, "an average differs"
    for rank, (weights, found, held) in enumerate(pool2.run(_average)):
        assert weight_error(weights, expected) <= TOLERANCE
        assert len(found) == len(losses)
        assert max(map(relative_error, found, [by_rank[rank] for by_rank in losses])) <= TOLERANCE
        assert held < 0.7 * total


class SavesWithinValidation(Callback):
    """Saves in a validation, when the module holds the average, and after it; keeps the module's weights of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[str, Tensor] = {}

    def _save(self, trainer: Trainer, module: Any, name: str) -> None:
        self.held[name] = module.state_dict()["model.decoder.head.weight"].detach().clone()
        trainer.save_checkpoint(self.folder / name)

    def on_validation_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step > 1 and not self.held:
            self._save(trainer, module, "average")

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if len(self.held) == 1:
            self._save(trainer, module, "trained")


def _saved_within_validation(folder: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    saves = SavesWithinValidation(folder)
    _fit(ENGINES["ddp"], [_ema(), saves], max_epochs=1, val_check_interval=VALIDATE_EVERY)
    files = [torch.load(folder / name, weights_only=False) for name in saves.held]
    states = [file[of] for file in files for of in ("state_dict", "current_model_state")]
    return saves.held, [state["model.decoder.head.weight"] for state in states]


def test_a_checkpoint_within_a_validation_holds_both(pool2: RankPool, tmp_path: Path) -> None:
    """The average as the average and the trained weights as such, though the module holds the average then."""
    for held, saved in pool2.run(_saved_within_validation, tmp_path):
        assert relative_error(held["average"], held["trained"]) > WRONG
        expected = [held["average"], held["trained"]] * 2
        assert all(torch.equal(*pair) for pair in zip(saved, expected, strict=True))


def _ema() -> Callback:
    return EMAWeightAveraging(decay=DECAY)


def _average_from_meta(options: dict[str, Any], meta: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = ModelModule(nn.Identity())
    with torch.device("meta" if meta else "cpu"):
        module.model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))
    return fit_module(module, options, callbacks=[_ema()]).weights


@pytest.mark.sweep
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_average_of_a_model_from_the_meta_device(pool2: RankPool, options: dict[str, Any]) -> None:
    """It has no values yet when the callback copies it."""
    expected = pool2.run(_average_from_meta, options, meta=False)
    assert_exact(pool2.run(_average_from_meta, options, meta=True), expected[0], 0.0)
