"""What people write first, with no option but the strategy: Lightning's BoringModel, a classifier, weighted classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import Outcome, full_weights, weight_error
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, make_trainer

ENGINES = {"fsdp2": {}, "ddp": STRATEGIES["ddp"]}
CLASSES = 3
FEATURES = 5
BATCH_SIZE = 4
ACCUMULATE = 2


def _boring(options: dict[str, Any]) -> tuple[int, int]:
    """Everything that a Trainer can be asked for, on Lightning's own model and data."""
    trainer = make_trainer(AutomodelStrategy(per_token_loss=False, **options), use_distributed_sampler=True)
    module = BoringModel()
    data = BoringDataModule()
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    return trainer.global_step, len(trainer.predict(module, data))


@pytest.mark.parametrize("options", by_default(ENGINES, "fsdp2"))
def test_boring_model(pool2: RankPool, options: dict[str, Any]) -> None:
    """Half of the 64 samples for each rank, one by one."""
    assert pool2.run(_boring, options) == [(32, 32)] * 2


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(24, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(features, torch.randint(CLASSES, (24,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double()


class Classifier(LightningModule):
    """As in every tutorial: tuples for batches, a mean over samples, accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        return F.cross_entropy(self.network(features), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        self.accuracy(self.network(features), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WeightedClasses(Classifier):
    """`F.cross_entropy(weight=...)` divides by the weights of the labels, so their sum is the count: no integer."""

    weights = torch.tensor([0.3, 1.1, 2.7], dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        loss = F.cross_entropy(self.network(features), labels, weight=self.weights)
        return {"loss": loss, "num_label_tokens": self.weights[labels].sum()}


def _classify(
    make: type[Classifier], options: dict[str, Any], batch_size: int = BATCH_SIZE
) -> tuple[Outcome, float, float]:
    module = make()
    strategy = AutomodelStrategy(**options)
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
    mine = torch.utils.data.Subset(samples(), range(dist.get_rank(), 24, dist.get_world_size()))
    trainer.fit(module, DataLoader(mine, batch_size=batch_size), DataLoader(mine, batch_size=batch_size))
    assert strategy.last_step is not None
    accuracy = float(trainer.callback_metrics["accuracy"])
    return Outcome(full_weights(module.network), None), accuracy, float(strategy.last_step.loss)


def _plainly(weights: Tensor | None, batch_size: int = BATCH_SIZE) -> tuple[Outcome, float, float]:
    """The same windows in one process: the batches of both ranks together, which are in the order of the samples."""
    features, labels = samples().tensors
    model = network()
    step = 2 * batch_size * ACCUMULATE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 24, step):
        optimizer.zero_grad()
        window = slice(start, start + step)
        loss = F.cross_entropy(model(features[window]), labels[window], weight=weights)
        loss.backward()
        optimizer.step()
    correct = (model(features).argmax(1) == labels).double().mean()
    return Outcome(full_weights(model), None), float(correct), loss.item()


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(
    ("make", "weights"),
    [(Classifier, None), (WeightedClasses, WeightedClasses.weights)],
    ids=["plain", "weighted"],
)
def test_classifier(
    pool2: RankPool, make: type[Classifier], weights: Tensor | None, options: dict[str, Any]
) -> None:
    """Weights, accuracy and loss of one process, the short last window included; float counts are not rounded."""
    outcome, accuracy, loss = _plainly(weights)
    for found in pool2.run(_classify, make, {**options, "per_token_loss": weights is not None}):
        assert weight_error(found[0], outcome) <= TOLERANCE
        assert found[1] == pytest.approx(accuracy)
        assert found[2] == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_short_last_batch_of_a_classifier(pool2: RankPool, options: dict[str, Any]) -> None:
    """`count="samples"`: the last batch has 2 samples for 5, and each sample weighs the same."""
    expected = _plainly(None, batch_size=5)
    for found in pool2.run(_classify, Classifier, {**options, "count": "samples"}, batch_size=5):
        assert weight_error(found[0], expected[0]) <= TOLERANCE
        assert found[1:] == pytest.approx(expected[1:])


class Graphs(LightningModule):
    """One loss a graph; a rank's second batch has more nodes than graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.network(batch["nodes"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _count_graphs(options: dict[str, Any]) -> None:
    sizes = (3, 3 + 6 * dist.get_rank(), 3)
    batches = [{"nodes": torch.ones(size, FEATURES).double(), "graph": torch.ones(3)} for size in sizes]
    make_trainer(AutomodelStrategy(count="samples", **options)).fit(
        Graphs(), DataLoader(batches, batch_size=None)
    )


AHEAD = {"count_window_ahead": True}


@pytest.mark.parametrize(
    "options", by_default({**ENGINES, "ahead": AHEAD, "ddp ahead": AHEAD | ENGINES["ddp"]}, "ahead")
)
def test_one_rank_whose_batch_is_not_of_samples(pool2: RankPool, options: dict[str, Any]) -> None:
    """Every rank raises, the other one with this rank's error."""
    with pytest.raises(RankError) as raised:
        pool2.run(_count_graphs, options)
    for rank in (0, 1):
        assert "has first dimensions of 9, 3: pass count_label_tokens" in raised.value.failures[rank]


def test_a_copied_strategy_and_its_original_leave_plugins_to_the_trainer() -> None:
    """Libraries copy the arguments of a Trainer before each fit."""
    strategy = AutomodelStrategy()
    for each in (copy.deepcopy(strategy), strategy):
        plugins: list[Any] = [TorchCheckpointIO(), Precision(), LightningEnvironment()]
        trainer = Trainer(strategy=each, accelerator="cpu", devices=1, plugins=plugins, logger=False)
        assert trainer.strategy.checkpoint_io is plugins[0]
