"""`uneven_inputs="pad"`: a rank whose data has ended takes part, and weights, metrics and logs are as without it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

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
        assert result["seen"] == 2 * counts[rank]
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


class Manual(Padded):
    """Manual optimization, with accumulation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        tokens = int((batch["labels"] != -100).sum())
        if batch_idx % 2:
            self.manual_backward(self(batch), num_label_tokens=tokens)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self(batch), num_label_tokens=tokens)


def _fit_manually(options: dict[str, Any], counts: list[int]) -> dict[str, Tensor]:
    module = Manual()
    batches = micro_batches(CASE)[dist.get_rank()][: counts[dist.get_rank()]]
    trainer = make_trainer(AutomodelStrategy(uneven_inputs="pad", **options), max_epochs=2)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return full_weights(module.model)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_manual_optimization(pool2: RankPool, engine: str) -> None:
    counts = [3, 6]
    expected = Outcome(full_weights(_train_plainly(counts, 2)[0]), None)
    for weights in pool2.run(_fit_manually, ENGINES[engine][1], counts):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


class BatchNormHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.linear = nn.Linear(7, 11)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.norm(hidden.flatten(0, 1))).unflatten(0, hidden.shape[:2])


class Normalises(LabelledModule):
    """Its running statistics follow rank 0's data."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head = BatchNormHead().double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = self.model.head.norm.running_mean.clone()
        loss = super().training_step(batch, batch_idx)
        assert not torch.equal(before, self.model.head.norm.running_mean)
        return loss


def _normalise(options: dict[str, Any], counts: list[int]) -> list[float]:
    module = Normalises()
    batches = micro_batches(CASE)[dist.get_rank()][: counts[dist.get_rank()]]
    strategy = AutomodelStrategy(uneven_inputs="pad", **options)
    make_trainer(strategy).fit(module, DataLoader(batches, batch_size=None))
    return [float(module.model.head.norm.num_batches_tracked)]


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_buffers_do_not_follow_padding_batches(pool2: RankPool, engine: str) -> None:
    """Batch norm counts the two batches of rank 0, whose buffers all ranks have where the fit ends."""
    assert pool2.run(_normalise, ENGINES[engine][1], [2, 4]) == [[2.0], [2.0]]


# --- Resuming ---------------------------------------------------------------------------------------------------------


class Saves(Callback):
    """Saves after a batch, and keeps going."""

    def __init__(self, folder: Path, after: int) -> None:
        self.path = folder / "checkpoint"
        self.after = after
        self.batches = 0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1
        if self.batches == self.after:
            trainer.save_checkpoint(self.path)


def _resume(options: dict[str, Any], folder: Path, after: int) -> tuple[Any, Any]:
    counts = [2, 6]
    found = []
    for kwargs in ({}, {"ckpt_path": folder / "checkpoint"}):
        module = Padded()
        batches = [dict(batch) for batch in micro_batches(CASE)[dist.get_rank()][: counts[dist.get_rank()]]]
        trainer = make_trainer(
            AutomodelStrategy(uneven_inputs="pad", **options),
            max_epochs=2,
            accumulate_grad_batches=2,
            callbacks=[] if kwargs else [Saves(folder, after)],
            enable_checkpointing=True,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None, collate_fn=dict), **kwargs)
        found.append({name: tensor.clone() for name, tensor in full_weights(module.model).items()})
        found.append((int(trainer.global_step), int(module.tokens)))
    return found[0], found[2], found[1], found[3]  # type: ignore[return-value]


@pytest.mark.every_case
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
@pytest.mark.parametrize("after", [*(pytest.param(after, marks=pytest.mark.sweep) for after in (2, 4)), 8])
def test_resuming(pool2: RankPool, tmp_path: Path, engine: str, after: int) -> None:
    """Also after the end of one rank's data, within an epoch: weights are bit for bit those of a calm run."""
    for calm, resumed, *counts in pool2.run(_resume, ENGINES[engine][1], tmp_path, after):
        assert counts[0] == counts[1]
        assert {name: float((calm[name] - resumed[name]).abs().max()) for name in calm} == dict.fromkeys(
            calm, 0.0
        )


# --- Random settings --------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(200))
def test_random_counts(pool2: RankPool, pool4: RankPool, seed: int) -> None:
    """Any engine, counts, accumulation, sized or stream."""
    _check_random(pool2, pool4, seed)


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(1000, 1002))
def test_some_random_counts(pool2: RankPool, pool4: RankPool, seed: int) -> None:
    _check_random(pool2, pool4, seed)


def _check_random(pool2: RankPool, pool4: RankPool, seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, options = ENGINES[rng.choice(list(ENGINES))]
    tensor_parallel = options.get("tensor_parallel_size", 1)
    counts = [rng.randrange(6) for _ in range(num_ranks // tensor_parallel)]
    counts[rng.randrange(len(counts))] += 1
    accumulate = rng.randrange(1, 5)
    is_stream = rng.random() < 0.5
    results = (pool2 if num_ranks == 2 else pool4).run(_fit, options, counts, is_stream, accumulate)
    _check(results, counts, accumulate, tensor_parallel)
