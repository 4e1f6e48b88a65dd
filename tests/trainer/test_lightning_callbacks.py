"""Lightning's own callbacks: what each is for comes out right, and training is what it should be; DDP in the sweep.

Those that average weights or unfreeze them are in `tests/search` and `tests/sharding/test_weight_averaging.py`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateFinder,
    TQDMProgressBar,
)
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor
from torchmetrics import SumMetric

from lightning_automodel import AutomodelStrategy
from tests.checkpoint.checkpoints import Saves
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Batch,
    TinyDecoder,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.plain import ModelModule
from tests.trainer.runs import (
    CASE,
    TOLERANCE,
    LabelledModule,
    first_by_default,
    loader,
    make_trainer,
    train_plainly,
)

ACCUMULATE = 3
EPOCH = [[0, 1, 2], [3, 4, 5], [6, 7]]
ENGINES = first_by_default(["fsdp2", "ddp"])
GAPLESS = replace(CASE, gap="none")


def trainer_with(engine: str, callbacks: list[Callback], **settings: Any) -> Trainer:
    strategy = AutomodelStrategy(data_parallel=engine)
    return make_trainer(
        strategy, **{"accumulate_grad_batches": ACCUMULATE, "callbacks": callbacks, **settings}
    )


def assert_trained(weights: dict[str, Tensor], windows: list[list[int]]) -> None:
    assert weight_error(weights, train_plainly(windows)) <= TOLERANCE


class Summarised(ModelModule):
    """Shows the sizes of what goes through it."""

    def __init__(self) -> None:
        super().__init__(TinyDecoder(CASE.seed).double())
        self.example_input_array = torch.zeros(2, 5, dtype=torch.long)
        self.found: list[Any] = []

    def forward(self, batch: Any) -> Tensor:
        return self.model(batch) if isinstance(batch, Tensor) else super().forward(batch)

    def on_fit_start(self) -> None:
        self.found = sizes(self)


def sizes(module: Summarised) -> list[Any]:
    """What its summary shows. FSDP2 puts its own name before that of a unit's class."""
    summary = ModelSummary(module, max_depth=3)
    names = [name.removeprefix("FSDP") for name in summary.layer_types]
    return [summary.total_parameters, summary.param_nums, summary.out_sizes, summary.total_flops, names]


def _summarise(engine: str) -> tuple[Any, dict[str, Tensor]]:
    module = Summarised()
    trainer_with(engine, []).fit(module, loader())
    return module.found, full_weights(module.model)


@pytest.mark.parametrize("engine", ENGINES)
def test_model_summary(pool2: RankPool, engine: str) -> None:
    """Counts of the whole model, whatever a rank holds."""
    for found, weights in pool2.run(_summarise, engine):
        assert found == sizes(Summarised())
        assert_trained(weights, EPOCH)


class ValidatesByRank(LabelledModule):
    """Logs values of its own: on rank 1 they stop falling after the second epoch, on rank 0 never."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        value = float(-self.current_epoch if dist.get_rank() == 0 else -min(self.current_epoch, 1))
        self.log("by_rank", value, batch_size=1)
        self.log("together", torch.tensor(value), batch_size=1, sync_dist=True)


def _stop_early(engine: str, monitor: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int, Any]:
    module = ValidatesByRank()
    stopping = EarlyStopping(monitor, patience=1)
    trainer = trainer_with(
        engine, [stopping], max_epochs=4, limit_train_batches=4, limit_val_batches=1, **settings
    )
    trainer.fit(module, loader(), loader())
    return full_weights(module.model), stopping.stopped_epoch, trainer.callback_metrics["together"]


@pytest.mark.parametrize("engine", ENGINES)
def test_early_stopping(pool2: RankPool, engine: str) -> None:
    """What one rank alone sees stops all of them after the same epoch, unless `min_steps` is larger."""
    epoch = [[0, 1, 2], [3]]
    for weights, stopped_epoch, together in pool2.run(_stop_early, engine, "by_rank", {}):
        assert stopped_epoch == 2
        assert float(together) == -1.5
        assert_trained(weights, epoch * 3)
    for weights, stopped_epoch, _ in pool2.run(_stop_early, engine, "together", {}):
        assert stopped_epoch == 0
        assert_trained(weights, epoch * 4)
    for weights, _, _ in pool2.run(_stop_early, engine, "by_rank", {"min_steps": 7}):
        assert_trained(weights, [*epoch * 3, epoch[0]])


class ActsAtTheEnd(LabelledModule):
    """In the hook after which epochs end, calls the model, as a GAN does that saves samples, and updates a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self(batch)
        mean = {"on_step": False, "on_epoch": True, "batch_size": 1, "prog_bar": True, "sync_dist": True}
        self.log("loss", loss.detach(), **mean)
        self.total.update(1)
        self.log("total", self.total, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.sample = self.model(torch.zeros(1, 7, dtype=torch.long))
        self.total.update(100)


def _act_at_the_end(has_bar: bool) -> tuple[float, float]:
    module = ActsAtTheEnd()
    strategy = AutomodelStrategy(timeout=timedelta(seconds=20))
    bars = [TQDMProgressBar()] * has_bar
    trainer = make_trainer(strategy, callbacks=bars, enable_progress_bar=has_bar)
    trainer.fit(module, loader())
    return float(module.sample.sum()), float(trainer.callback_metrics["total"])


@pytest.mark.parametrize("has_bar", [False, True])
@pytest.mark.every_case
def test_hook_of_the_end_beside_a_progress_bar(pool2: RankPool, has_bar: bool) -> None:
    """Rank 0's bar would reduce the logged means while rank 1 gathers parameters: both would wait.

    What the hook adds is logged, though these means are reduced before it.
    """
    first, second = pool2.run(_act_at_the_end, has_bar)
    assert first == second
    assert first[1] == 2 * (len(micro_batches(CASE)[0]) + 100)


class Rated(LabelledModule):
    """Has a learning rate that can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = LEARNING_RATE

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=MOMENTUM)


class Notes(Callback):
    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.batches.append(index)


def _resume_with_finder(engine: str, folder: str) -> tuple[list[int], dict[str, Tensor], dict[str, Tensor]]:
    """The batches of a resumed run that searches first, its weights, and those of a run that was not stopped."""
    path = f"{folder}/at_2.ckpt"
    finder = LearningRateFinder(
        1e-3, 0.5, num_training_steps=4, early_stop_threshold=None, update_attr=False
    )
    weights = []
    settings = {"accumulate_grad_batches": 1, "default_root_dir": folder}
    for ckpt_path, more in ((None, [Saves("on_train_batch_end", 2, path)]), (path, [finder])):
        module = Rated()
        notes = Notes()
        trainer_with(engine, [notes, *more], **settings).fit(module, loader(GAPLESS), ckpt_path=ckpt_path)
        weights.append(full_weights(module.model))
    return notes.batches, weights[1], weights[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_resume_with_learning_rate_finder(pool2: RankPool, tmp_path: Path, engine: str) -> None:
    """The run goes on where it was saved, though the search has trained before the checkpoint is loaded."""
    for batches, weights, undisturbed in pool2.run(_resume_with_finder, engine, str(tmp_path)):
        assert batches == list(range(2, GAPLESS.num_batches))
        assert weight_error(weights, undisturbed) <= TOLERANCE
