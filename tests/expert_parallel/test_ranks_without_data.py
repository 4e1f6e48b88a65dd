"""A rank without data serves the experts that it holds, and nothing else of it notices.

In evaluation it repeats its model's forward; in training with `uneven_inputs="pad"` its steps have no
weight.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_automodel import AutomodelStrategy, EvaluationLoss
from tests.expert_parallel.mixtures import ACCUMULATE, CASE, MixtureDecoder, SpreadModule, error
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, full_weights, micro_batches
from tests.trainer.plain import sgd
from tests.trainer.runs import TOLERANCE, by_default, make_trainer, mean_loss

NUM_BATCHES = (5, 2, 4, 1)
SEED = 11


def own_batches(counts: tuple[int, ...] = NUM_BATCHES) -> list[Batch]:
    """What the loader of this rank yields."""
    return micro_batches(CASE)[dist.get_rank()][: counts[dist.get_rank()]]


class CountingDecoder(MixtureDecoder):
    """Counts its forwards in a buffer, and draws a random number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.num_forwards += 1
        return super().forward(input_ids) + 0 * torch.rand(())


class Evaluates(SpreadModule):
    """Keeps count of its validation steps in every way that user code has."""

    def __init__(self) -> None:
        super().__init__(CountingDecoder())
        self.num_steps = 0
        self.mean = MeanMetric()

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.num_steps += 1
        loss = self(batch)
        num_label_tokens = int((batch["labels"] != -100).sum())
        self.mean.update(loss if num_label_tokens else 0.0, num_label_tokens)
        self.log("mean", self.mean)
        return loss

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"])


class Draws(Callback):
    """Which random number the rank would draw after a validation."""

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 0:
            torch.manual_seed(SEED)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.number = float(torch.rand(()))


def validate(options: dict[str, Any]) -> tuple[dict[str, float], int, int, float]:
    """Runs on every rank: logged values, and how many steps, forwards and draws the rank has seen."""
    module = Evaluates()
    draws = Draws()
    strategy = AutomodelStrategy(**options)
    trainer = make_trainer(strategy, callbacks=[EvaluationLoss(), draws])
    (logged,) = trainer.validate(module, DataLoader(own_batches(), batch_size=None), verbose=False)
    return logged, module.num_steps, int(module.model.num_forwards), draws.number


OPTIONS: dict[str, dict[str, Any]] = {
    "two ranks": {"expert_parallel_size": 2},
    "four ranks": {"expert_parallel_size": 4},
    "hsdp": {"expert_parallel_size": 2, "data_parallel_replicate_size": 2},
}


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(OPTIONS, "two ranks", "four ranks"))
def test_evaluation(pool4: RankPool, options: dict[str, Any]) -> None:
    """Each sample counts once, and steps, metrics, buffers and random states are as after the rank's own batches."""
    model = MixtureDecoder()
    batches = [
        batch for rank, number in enumerate(NUM_BATCHES) for batch in micro_batches(CASE)[rank][:number]
    ]
    total = sum(float(mean_loss(model, batch, "sum").detach()) for batch in batches)
    expected = total / sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for rank, (logged, num_steps, num_forwards, number) in enumerate(pool4.run(validate, options)):
        assert logged["mean"] == pytest.approx(expected, rel=1e-6)  # TorchMetrics add up in float32
        assert logged["val_loss"] == pytest.approx(expected, rel=TOLERANCE)
        assert num_steps == NUM_BATCHES[rank]
        assert num_forwards == NUM_BATCHES[rank]
        torch.manual_seed(SEED)
        draws = [float(torch.rand(())) for _ in range(NUM_BATCHES[rank] + 1)]
        assert number == draws[-1]


class PartByPart(SpreadModule):
    """Its steps call the model's parts themselves, so that no module contains all of them."""

    def __init__(self) -> None:
        super().__init__(MixtureDecoder())

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.model.embedding(batch["input_ids"])
        for block in self.model.blocks:
            hidden = block(hidden)
        return self.model.head(hidden)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch)


class ByHand(PartByPart):
    """Under manual optimization its child is the root."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def forward(self, batch: Batch) -> Tensor:
        return self.model(batch["input_ids"])


def predict(make: type[PartByPart]) -> list[Tensor]:
    """Runs on every rank: predictions for its batches."""
    trainer = make_trainer(AutomodelStrategy(expert_parallel_size=2))
    return trainer.predict(make(), DataLoader(own_batches(), batch_size=None))


@pytest.mark.every_case
@pytest.mark.parametrize("make", [PartByPart, ByHand])
def test_prediction(pool4: RankPool, make: type[PartByPart]) -> None:
    reference = make()
    for rank, outputs in enumerate(pool4.run(predict, make)):
        assert len(outputs) == NUM_BATCHES[rank]
        for output, batch in zip(outputs, micro_batches(CASE)[rank], strict=False):
            assert torch.allclose(output, reference(batch), rtol=0, atol=1e-14)


class ValidatesWhileTraining(Evaluates):
    """Trains on what it counts."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self(batch)


def fit_with_unequal_data() -> tuple[dict[str, Tensor], int]:
    """Runs on every rank: train on padded, unequal data, and validate on unequal data in between."""
    module = ValidatesWhileTraining()
    strategy = AutomodelStrategy(expert_parallel_size=2, uneven_inputs="pad")
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, max_epochs=2, val_check_interval=2)
    loader = DataLoader(own_batches(), batch_size=None)
    trainer.fit(module, loader, DataLoader(own_batches((1, 2, 1, 3)), batch_size=None))
    return full_weights(module.model), module.num_steps


def train_plainly_on_unequal_data() -> dict[str, Tensor]:
    """One process with the batches that are there."""
    model = MixtureDecoder()
    optimizer = sgd(model)
    for _ in range(2):
        for start in range(0, max(NUM_BATCHES), ACCUMULATE):
            window = range(start, start + ACCUMULATE)
            batches = [
                by_rank[index]
                for by_rank, number in zip(micro_batches(CASE), NUM_BATCHES, strict=True)
                for index in window
                if index < number
            ]
            num_label_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
            optimizer.zero_grad()
            losses = [mean_loss(model, batch, "sum") for batch in batches]
            (torch.stack(losses).sum() / max(num_label_tokens, 1)).backward()
            optimizer.step()
    return full_weights(model)


def test_padded_training_with_validation(pool4: RankPool) -> None:
    """Validations in between leave training as it is."""
    expected = train_plainly_on_unequal_data()
    num_validations = 2 * (max(NUM_BATCHES) // 2)
    for rank, (weights, num_steps) in enumerate(pool4.run(fit_with_unequal_data)):
        assert error(weights, expected) <= TOLERANCE
        assert num_steps == num_validations * (1, 2, 1, 3)[rank]
