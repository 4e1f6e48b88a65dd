"""`uneven_inputs="pad"`: a rank whose data has ended takes part, and weights, metrics and logs are as without it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_automodel import AutomodelStrategy
from tests.data.test_uneven_inputs import CASE4, Stream
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    PLAN,
    Outcome,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, make_trainer, mean_loss

ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "undeferred": (2, {"defer_fsdp_grad_sync": False, "reshard_during_accumulation": True}),
    "ddp": (2, {"data_parallel": "ddp"}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "tensor_parallel": (4, {"tensor_parallel_size": 2}),
}


class Padded(LabelledModule):
    """Logs, updates a metric, draws random numbers and spoils its batch, as users do."""

    def __init__(self, is_tensor_parallel: bool = False) -> None:
        super().__init__()
        self.is_tensor_parallel = is_tensor_parallel
        self.mean = MeanMetric()
        self.unregistered = {"steps": SumMetric(sync_on_compute=False)}  # no submodule
        self.seen = 0
        self.fillers = 0
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def configure_model(self) -> None:
        if self.is_tensor_parallel:
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch)
        tokens = int((batch["labels"] != -100).sum())
        torch.rand(1)
        self.tokens += tokens
        if tokens:
            self.mean.update(loss.detach(), tokens)
        value = loss.detach() if tokens else torch.zeros_like(loss)
        self.log("loss", value, batch_size=tokens, sync_dist=True, on_step=False, on_epoch=True)
        self.log("number", float(tokens), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("most", float(tokens), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.unregistered["steps"].update(1)
        self.seen += not self.trainer.strategy.is_filler
        self.fillers += self.trainer.strategy.is_filler
        batch.clear()
        return {"loss": loss, "num_label_tokens": tokens}


class Reports(Callback):
    """Keeps what each step reports."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        report = trainer.strategy.last_step
        if report is not None and report not in self.reports:
            self.reports.append(report)


def _fit(options: dict[str, Any], counts: list[int], is_stream: bool, accumulate: int) -> dict[str, Any]:
    module = Padded("tensor_parallel_size" in options)
    reports = Reports()
    strategy = AutomodelStrategy(uneven_inputs="pad", **options)
    trainer = make_trainer(strategy, accumulate_grad_batches=accumulate, max_epochs=2, callbacks=[reports])
    rank = dist.get_rank() // options.get("tensor_parallel_size", 1)
    case = CASE if len(counts) == 2 else CASE4
    batches = [dict(batch) for batch in micro_batches(case)[rank][: counts[rank]]]
    data: Any = Stream(batches) if is_stream else [dict(batch) for batch in batches]
    loader = DataLoader(data, batch_size=None, collate_fn=dict)
    torch.manual_seed(rank)
    trainer.fit(module, loader)
    return {
        "weights": full_weights(module.model),
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "micro_batches": [int(report.num_micro_batches) for report in reports.reports],
        "tokens": int(module.tokens),
        "seen": module.seen,
        "unregistered": int(module.unregistered["steps"].compute()),
        "fillers": module.fillers,
        "random": float(torch.rand(1)),
        "steps": trainer.global_step,
    }


def _train_plainly(counts: list[int], accumulate: int) -> tuple[nn.Module, list[int]]:
    case = CASE if len(counts) == 2 else CASE4
    by_rank = [own[:count] for own, count in zip(micro_batches(case), counts, strict=True)]
    model = LabelledModule().model
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    sizes = []
    for _ in range(2):
        for start in range(0, max(counts), accumulate):
            window = [batch for own in by_rank for batch in own[start : start + accumulate]]
            tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
            optimizer.zero_grad()
            (
                torch.stack([mean_loss(model, batch, "sum") for batch in window]).sum() / max(tokens, 1)
            ).backward()
            optimizer.step()
            sizes.append(len(window))
    return model, sizes


def _check(
    results: list[dict[str, Any]], counts: list[int], accumulate: int, tensor_parallel: int = 1
) -> None:
    model, sizes = _train_plainly(counts, accumulate)
    expected = Outcome(full_weights(model), None)
    for index, result in enumerate(results):
        rank = index // tensor_parallel
        assert weight_error(Outcome(result["weights"], None), expected) <= TOLERANCE
        assert result["seen"] == result["unregistered"] == 2 * counts[rank]
        assert result["fillers"] == 2 * (max(counts) - counts[rank])
        assert result["micro_batches"] == sizes
        assert result["logged"] == pytest.approx(results[0]["logged"])


@pytest.mark.parametrize("is_stream", [False, True], ids=["sized", "stream"])
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_equals_one_process(pool2: RankPool, engine: str, is_stream: bool) -> None:
    """Weights, counts, logs, metrics, random states; a window that one rank has nothing of; a rank without a batch."""
    _, options = ENGINES[engine]
    for counts, accumulate in (([5, 3], 2), ([2, 7], 3), ([4, 0], 1)):
        results = pool2.run(_fit, options, counts, is_stream, accumulate)
        _check(results, counts, accumulate)


def test_padding_batches_draw_no_random_numbers(pool2: RankPool) -> None:
    """The rank whose data ends is where it would be if all ended with it."""
    padded, equal = (pool2.run(_fit, {}, counts, False, 1) for counts in ([5, 3], [3, 3]))
    assert padded[1]["random"] == equal[1]["random"]
    assert padded[0]["random"] != equal[0]["random"]


def _values(counts: list[int]) -> dict[str, float]:
    """What a process with all data logs in its last epoch, but for losses, which weights change."""
    by_rank = [own[:count] for own, count in zip(micro_batches(CASE), counts, strict=True)]
    tokens = [float((batch["labels"] != -100).sum()) for own in by_rank for batch in own]
    return {"number": sum(tokens), "most": max(tokens)}


def test_logged_values_are_those_of_the_data(pool2: RankPool) -> None:
    """Sums, extremes, weighted means and TorchMetrics; learning nothing, the mean loss is that of the first weights."""
    counts = [2, 5]
    model = LabelledModule().model
    batches = [b for own, n in zip(micro_batches(CASE), counts, strict=True) for b in own[:n]]
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    mean = float(sum(mean_loss(model, batch, "sum") for batch in batches)) / tokens
    for result in pool2.run(_fit_frozen, counts):
        assert result == pytest.approx({**_values(counts), "loss": mean, "mean": mean}, rel=1e-6)


class LearnsNothing(Padded):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit_frozen(counts: list[int]) -> dict[str, float]:
    trainer = make_trainer(AutomodelStrategy(uneven_inputs="pad"), accumulate_grad_batches=2)
    batches = [dict(batch) for batch in micro_batches(CASE)[dist.get_rank()][: counts[dist.get_rank()]]]
    trainer.fit(LearnsNothing(), DataLoader(batches, batch_size=None, collate_fn=dict))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


# --- Random settings --------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    "seed", [1000, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(200))]
)
def test_random_counts(pool2: RankPool, pool4: RankPool, seed: int) -> None:
    """Any engine, counts, accumulation, sized or stream."""
    rng = random.Random(seed)
    num_ranks, options = ENGINES[rng.choice(list(ENGINES))]
    tensor_parallel = options.get("tensor_parallel_size", 1)
    counts = [rng.randrange(6) for _ in range(num_ranks // tensor_parallel)]
    counts[rng.randrange(len(counts))] += 1
    accumulate = rng.randrange(1, 5)
    is_stream = rng.random() < 0.5
    results = (pool2 if num_ranks == 2 else pool4).run(_fit, options, counts, is_stream, accumulate)
    _check(results, counts, accumulate, tensor_parallel)
