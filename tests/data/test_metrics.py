"""TorchMetrics with an entry for each batch or sample, and values by name, of which ranks have unequal numbers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, Metric, MetricCollection
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.utilities import dim_zero_cat

from lightning_automodel import AutomodelStrategy
from tests.data.plain import ENGINES
from tests.rank_pool import RankPool
from tests.trainer.runs import LabelledModule, by_default, make_trainer


class Widths(Metric):
    """Keeps a tensor of its own shape of each sample, as `MeanAveragePrecision` keeps boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx=None)
        self.add_state("batches", default=[], dist_reduce_fx="cat")
        self.add_state("samples", default=[], dist_reduce_fx="cat")
        self.add_state("number", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, samples: Tensor) -> None:
        self.batches.append(samples)
        for sample in samples:
            self.samples.append(sample)
            self.rows.append(torch.ones(int(sample) % 3, 2))
            self.number += 1

    def compute(self) -> Tensor:
        assert len(self.rows) == self.number
        assert torch.equal(dim_zero_cat(self.samples), dim_zero_cat(self.batches))
        return torch.cat(self.rows).sum()


class Measured(LabelledModule):
    """Logs metrics, some by what is in a batch, and computes some by hand; this rank has `kept` entries afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.by_query = MetricCollection({"map": RetrievalMAP(), "sums": CatMetric()})
        self.widths = torch.nn.ModuleDict({"trained": Widths(), "evaluated": Widths()})
        self.beside: list[Any] = [CatMetric()]
        self.beside.append(self.beside)  # as nodes of a graph refer to each other

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.widths["trained"].update(batch["samples"])
        self.log("trained", self.widths["trained"], on_step=False, on_epoch=True)
        if 2 in batch["samples"]:
            self.log("of one", 5.0, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        """As a callback and the module may log, and a progress bar read in between."""
        for name in ("one", "another"):
            self.log(name, 1.0, sync_dist=True)
            if self.trainer.is_global_zero:
                assert self.trainer.callback_metrics[name] == 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        samples = batch["samples"]
        if 2 in samples:
            self.log("of one batch", 3.0, batch_size=1, sync_dist=True)
        self.by_query["map"].update(samples / 20, samples % 2, indexes=samples % 3)
        self.by_query["sums"].update(samples.sum())
        self.beside[0].update(float(samples.sum()))
        self.widths["evaluated"].update(samples)
        self.log("evaluated", self.widths["evaluated"])
        for sample in samples:
            kind = ("mean", sum, torch.max, min)[sample % 4]
            self.log(
                f"kind {sample % 4}", 1.0 + sample.double(), batch_size=1, reduce_fx=kind, sync_dist=True
            )

    def on_validation_epoch_end(self) -> None:
        for _ in range(2):
            found = self.by_query.compute()
        self.kept = len(self.by_query["sums"].value)
        beside = self.beside[0].compute().sum()
        pickled = pickle.loads(pickle.dumps(self.beside[0]))
        assert pickled.dist_sync_fn is None
        assert len(pickled.value) == self.kept
        self.by_query.reset()
        self.beside[0].reset()
        if self.trainer.world_size > 1:
            with pytest.raises(RuntimeError, match="A shallow copy of a CatMetric is computed"):
                copy.copy(self.beside[0]).compute()
        self.log_dict({"map": found["map"], "sums": found["sums"].sum(), "beside": beside})


def _loader(num_samples: int, batch_size: int) -> DataLoader:
    sequences = torch.arange(num_samples)[:, None] + torch.arange(4)
    samples = [
        {"input_ids": row[:-1], "labels": row[1:], "samples": torch.tensor(number)}
        for number, row in enumerate(sequences % 5)
    ]
    return DataLoader(samples, batch_size=batch_size)


def _measure(
    options: dict[str, Any] | None, num_samples: int, batch_size: int
) -> tuple[dict[str, float], int]:
    module = Measured()
    settings: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}
    if options is None:
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            **settings,
        )
    else:
        trainer = make_trainer(AutomodelStrategy(**options), use_distributed_sampler=True, **settings)
    trainer.fit(module, _loader(num_samples, batch_size), _loader(num_samples, batch_size))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.kept


@pytest.mark.every_case
@pytest.mark.parametrize("engine", by_default(ENGINES, "ddp"))
def test_equal_those_of_one_process(pool2: RankPool, engine: dict[str, Any]) -> None:
    """Also one entry beside several, which TorchMetrics does not concatenate, and a second computation."""
    for num_samples, batch_size in ((5, 1), (5, 2), (3, 1), (6, 2)):
        expected, _ = _measure(None, num_samples, batch_size)
        for found, kept in pool2.run(_measure, engine, num_samples, batch_size):
            assert found == pytest.approx(expected)
            assert 0 < kept < num_samples


class LogsAlone(LabelledModule):
    """What all ranks reduce together."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.metric = CatMetric()
        self.kind = kind

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("all", 1.0, sync_dist=True, batch_size=1)
        if self.global_rank == 1 and self.kind == "metric":
            self.metric.update(1.0)
            self.log("alone", self.metric)
        elif self.kind != "metric":
            name = "one" if self.global_rank else "other"
            self.log(name, 1.0, sync_dist=True, on_step=True, on_epoch=self.kind == "on_epoch", batch_size=1)


def _refusal(kind: str) -> str:
    trainer = make_trainer(AutomodelStrategy())
    with pytest.raises(RuntimeError) as raised:
        trainer.validate(LogsAlone(kind), _loader(4, 2))
    return str(raised.value)


def test_what_some_ranks_log_alone_is_refused(pool2: RankPool) -> None:
    """Values that were reduced at once would have been those of other names."""
    messages = {
        "metric": "'alone' was logged on some ranks alone.",
        "on_epoch": "'one' was logged on some ranks alone.",
        "on_step": "Ranks have logged values with on_step=True and sync_dist=True under other names",
    }
    for kind, message in messages.items():
        assert [message in found for found in pool2.run(_refusal, kind)] == [True, True], kind


class OfGroups(LabelledModule):
    """Rank 0 logs for a group of its own, in training steps and over the epoch, and in validation."""

    def on_fit_start(self) -> None:
        self.group = dist.new_group([0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 0:
            options: dict[str, Any] = {"sync_dist": True, "sync_dist_group": self.group, "batch_size": 1}
            self.log("step", 2.0, on_step=True, on_epoch=False, **options)
            self.log("epoch", float(batch_idx), on_step=False, on_epoch=True, **options)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any) -> None:
        if self.global_rank == 0:
            self.log("val", 3.0, sync_dist=True, sync_dist_group=self.group, batch_size=1)


def _log_for_a_group() -> dict[str, float]:
    trainer = make_trainer(AutomodelStrategy(), num_sanity_val_steps=0)
    trainer.fit(OfGroups(), _loader(6, 2), _loader(6, 2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_of_a_group_of_the_users(pool2: RankPool) -> None:
    """Other ranks neither log nor reduce it."""
    assert pool2.run(_log_for_a_group) == [{"step": 2.0, "epoch": 1.0, "val": 3.0}, {}]
