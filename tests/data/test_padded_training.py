"""`uneven_inputs="pad"`: a rank whose data has ended takes part, and weights, metrics and logs are as without it."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.wrappers import Running

from lightning_automodel import AutomodelStrategy, EvaluationLoss
from tests.data.plain import ENGINES, Report, Stream, own_batches, train_windows
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import PLAN, Batch, TinyDecoder, assert_exact, full_weights, micro_batches
from tests.trainer.plain import ModelModule
from tests.trainer.runs import CASE, LabelledModule, make_trainer, mean_loss


class Padded(LabelledModule):
    """Logs, updates a metric, draws random numbers and spoils its batch, as users do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.unregistered = {"train": [SumMetric(sync_on_compute=False)]}  # no submodule
        self.newest = Running(SumMetric(sync_on_compute=False), window=50)
        self.seen = 0
        self.fillers = 0
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

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
        self.unregistered["train"][0].update(1)
        self.newest.update(1)
        for callback in self.trainer.callbacks:
            if isinstance(callback, Reports):
                callback.beside.update(1)
        self.seen += not self.trainer.strategy.is_filler
        self.fillers += self.trainer.strategy.is_filler
        batch.clear()
        return {"loss": loss, "num_label_tokens": tokens}

    def log(self, *args: Any, **options: Any) -> None:  # type: ignore[override]
        """As modules have one that adds to names or options."""
        super().log(*args, **options)


class Reports(Callback):
    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.beside = SumMetric(sync_on_compute=False)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        report = trainer.strategy.last_step
        if report is not None and report not in self.reports:
            self.reports.append(report)


def _fit(options: dict[str, Any], counts: list[int], is_stream: bool, accumulate: int) -> dict[str, Any]:
    module = Padded()
    reports = Reports()
    strategy = AutomodelStrategy(uneven_inputs="pad", **options)
    trainer = make_trainer(strategy, accumulate_grad_batches=accumulate, max_epochs=2, callbacks=[reports])
    own = own_batches(counts)
    loader = DataLoader(Stream(own) if is_stream else own, batch_size=None, collate_fn=dict)
    torch.manual_seed(dist.get_rank())
    trainer.fit(module, loader)
    return {
        "weights": full_weights(module.model),
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "micro_batches": [int(report.num_micro_batches) for report in reports.reports],
        "tokens": int(module.tokens),
        "seen": module.seen,
        "unregistered": int(module.unregistered["train"][0].compute()),
        "newest": int(module.newest.compute()),
        "beside": int(reports.beside.compute()),
        "fillers": module.fillers,
        "random": float(torch.rand(1)),
        "steps": trainer.global_step,
    }


def _check(results: list[dict[str, Any]], counts: list[int], accumulate: int) -> None:
    by_rank = [own[:count] for own, count in zip(micro_batches(CASE), counts, strict=True)]
    starts = range(0, max(counts), accumulate)
    windows = [[batch for own in by_rank for batch in own[start : start + accumulate]] for start in starts]
    model = LabelledModule().model
    reports = train_windows(model, windows * 2)
    assert_exact((result["weights"] for result in results), full_weights(model))
    first_tokens = sum(int((batch["labels"] != -100).sum()) for batch in by_rank[0])
    for rank, result in enumerate(results):
        metrics = [result[name] for name in ("unregistered", "newest", "beside")]
        assert metrics == [result["seen"]] * 3 == [2 * counts[rank]] * 3
        assert result["fillers"] == 2 * (max(counts) - counts[rank])
        assert result["micro_batches"] == [size for *_, size in reports]
        assert result["logged"] == pytest.approx(results[0]["logged"])
        # In a buffer: rank 0's, without those of its padding batches.
        assert result["tokens"] == 2 * first_tokens


@pytest.mark.parametrize("is_stream", [False, True], ids=["sized", "stream"])
@pytest.mark.parametrize("engine", ENGINES)
def test_equals_one_process(pool2: RankPool, engine: str, is_stream: bool) -> None:
    """Weights, counts, logs, metrics, random states; a window that one rank has nothing of; a rank without a batch."""
    for counts, accumulate in (([5, 3], 2), ([2, 7], 3), ([4, 0], 1)):
        results = pool2.run(_fit, ENGINES[engine], counts, is_stream, accumulate)
        _check(results, counts, accumulate)


def test_padding_batches_draw_no_random_numbers(pool2: RankPool) -> None:
    """The rank whose data ends is where it would be if all ended with it."""
    padded, equal = (pool2.run(_fit, {}, counts, False, 1) for counts in ([5, 3], [3, 3]))
    assert padded[1]["random"] == equal[1]["random"]
    assert padded[0]["random"] != equal[0]["random"]


# --- Settings of what draws, counts, pads and evaluates ---------------------------------------------------------------

# For each engine: ranks, tensor-parallel ranks, options.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "fsdp2": (2, 1, {}),
    "resharded": (2, 1, {"reshard_during_accumulation": True}),
    "undeferred": (2, 1, {"defer_fsdp_grad_sync": False}),
    "ddp": (2, 1, {"data_parallel": "ddp"}),
    "hsdp": (4, 1, {"data_parallel_replicate_size": 2}),
    "tensor_parallel": (4, 2, {"tensor_parallel_size": 2}),
}


def pool_of(engine: str, pool2: RankPool, pool4: RankPool) -> RankPool:
    return pool2 if LAYOUTS[engine][0] == 2 else pool4


def data_ranks(engine: str) -> int:
    return LAYOUTS[engine][0] // LAYOUTS[engine][1]


@functools.cache
def data(ranks: int, has_gaps: bool, num_batches: int = 8) -> list[list[Batch]]:
    """Micro-batches by rank; some have no label token."""
    gap: Any = "micro_batches" if has_gaps else "none"
    return micro_batches(Case(seed=23, telling="labels", num_batches=num_batches, gap=gap, num_ranks=ranks))


def limited(count: int, limit: int | float | None) -> int:
    """How many of `count` batches Lightning takes."""
    if limit is None:
        return count
    return int(count * limit) if isinstance(limit, float) else min(count, limit)


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One fit of two epochs; what the fields mean, the Trainer's and the strategy's arguments tell."""

    engine: str
    counts: tuple[int, ...]
    accumulate: int
    pads: bool = False
    ahead: bool = True
    is_stream: bool = False
    num_workers: int = 0
    limit: int | float | None = None
    val_check_interval: int | None = None
    max_steps: int | None = None
    without: tuple[int, ...] = ()

    def batches(self) -> list[list[Batch | None]]:
        """Those of each rank."""
        return [
            [None if index in self.without else batch for index, batch in enumerate(own[:count])]
            for own, count in zip(data(len(self.counts), True), self.counts, strict=True)
        ]

    def windows(self) -> list[list[Batch]]:
        """Those of an epoch; Lightning steps where the last batch of a window is one."""
        number = limited(max(self.counts), self.limit)
        starts = range(0, number, self.accumulate)
        ends = [min(start + self.accumulate, number) for start in starts]
        return [
            [batch for own in self.batches() for batch in own[start:end] if batch is not None]
            for start, end in zip(starts, ends, strict=True)
            if end - 1 not in self.without
        ]


TRAININGS = {
    "peers that are padded together": Training(
        "tensor_parallel", (2, 5), 2, pads=True, is_stream=True, val_check_interval=2
    ),
    "peers that are not counted ahead": Training("tensor_parallel", (6, 3), 4, pads=True, ahead=False),
    "ranks without a batch": Training("hsdp", (0, 3, 1, 4), 3, pads=True),
    "a rank without a batch, not counted ahead": Training("ddp", (4, 0), 2, pads=True, ahead=False, limit=3),
    "batches that are None": Training("fsdp2", (7, 7), 2, without=(2, 5)),
    "a fraction, and validations": Training("ddp", (7, 7), 3, limit=0.6, val_check_interval=1),
    "workers, and an end in an epoch": Training(
        "resharded", (5, 3), 2, pads=True, num_workers=1, max_steps=4
    ),
    "a limited stream": Training("undeferred", (6, 6), 4, is_stream=True, limit=5, max_steps=3),
}
"""What `tests/search` does not draw."""


class Trained(ModelModule):
    def __init__(self, setting: Training | Evaluation) -> None:
        super().__init__(TinyDecoder(23).double())
        self.setting = setting

    def configure_model(self) -> None:
        if self.setting.engine == "tensor_parallel":
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)


def _train(setting: Training) -> tuple[dict[str, Tensor], Report | None, int]:
    ranks, tensor, options = LAYOUTS[setting.engine]
    own = setting.batches()[dist.get_rank() // tensor]
    strategy = AutomodelStrategy(
        count_window_ahead=setting.ahead,
        uneven_inputs="pad" if setting.pads else "error",
        timeout=0.3,
        **options,
    )
    validates = setting.val_check_interval is not None
    trainer = make_trainer(
        strategy,
        max_epochs=2,
        max_steps=setting.max_steps or -1,
        accumulate_grad_batches=setting.accumulate,
        limit_train_batches=setting.limit,
        val_check_interval=setting.val_check_interval,
    )
    source: Any = Stream(own) if setting.is_stream else own
    module = Trained(setting)
    loader = DataLoader(source, batch_size=None, num_workers=setting.num_workers)
    # Of an unequal number of batches.
    validation = DataLoader(data(ranks, False)[0][: 1 + dist.get_rank() // tensor], batch_size=None)
    trainer.fit(module, loader, validation if validates else None)
    step = strategy.last_step
    report = (
        None if step is None else (float(step.loss), int(step.num_label_tokens), int(step.num_micro_batches))
    )
    return full_weights(module.model), report, trainer.global_step


@pytest.mark.every_case
@pytest.mark.parametrize("setting", TRAININGS.values(), ids=TRAININGS)
def test_training(pool2: RankPool, pool4: RankPool, setting: Training) -> None:
    model = TinyDecoder(23).double()
    reports = train_windows(model, (setting.windows() * 2)[: setting.max_steps])
    results = pool_of(setting.engine, pool2, pool4).run(_train, setting, timeout_s=60)
    assert_exact((weights for weights, *_ in results), full_weights(model))
    for _, report, steps in results:
        assert report == (pytest.approx(reports[-1], rel=1e-12, nan_ok=True) if reports else None)
        assert steps == len(reports)


class Lazy(LightningModule):
    """Steps the rows of an embedding that batches have used, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 2, sparse=True, dtype=torch.float64)
        nn.init.ones_(self.rows.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.rows(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(self.parameters(), lr=0.1)


LOOKED_UP = [[[1, 2], [3], [1, 1, 4]], [[5, 1]]]
"""Of each rank: whose batches are rows."""


def _train_lazily() -> Tensor:
    module = Lazy()
    batches = [torch.tensor(rows) for rows in LOOKED_UP[dist.get_rank()]]
    strategy = AutomodelStrategy(data_parallel="ddp", uneven_inputs="pad", count="samples")
    make_trainer(strategy, max_epochs=2).fit(module, DataLoader(batches, batch_size=None))
    return module.rows.weight.detach()


def test_rows_of_padding_batches_are_not_stepped(pool2: RankPool) -> None:
    plain = Lazy()
    optimizer = plain.configure_optimizers()
    for index in [0, 1, 2] * 2:
        rows = [row for own in LOOKED_UP for batch in own[index : index + 1] for row in batch]
        optimizer.zero_grad()
        plain.training_step(torch.tensor(rows), index).backward()
        optimizer.step()
    for weight in pool2.run(_train_lazily):
        torch.testing.assert_close(weight, plain.rows.weight.detach(), rtol=1e-12, atol=0)


# --- Evaluation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: of each loader the batches of each rank, and whether it is a stream."""

    engine: str
    stage: str
    counts: tuple[tuple[int, ...], ...]
    streams: tuple[bool, ...]
    limit: int | float | None
    sanity_steps: int
    train_counts: tuple[int, ...]

    def batches(self) -> list[list[list[Batch]]]:
        by_rank = data(data_ranks(self.engine), True)
        return [
            [own[index:][: limited(count, self.limit)] for own, count in zip(by_rank, counts, strict=True)]
            for index, counts in enumerate(self.counts)
        ]


def draw_evaluation(seed: int) -> Evaluation:
    rng = random.Random(seed)
    engine = rng.choice(list(LAYOUTS))
    ranks = data_ranks(engine)
    loaders = rng.choice([1, 1, 2, 3])
    streams = tuple(rng.random() < 0.4 for _ in range(loaders))
    floats = [0.5, 1.0] if not any(streams) else [None]
    limit: Any = rng.choice([None, None, rng.randrange(1, 6), rng.choice(floats)])
    smallest = 2 if isinstance(limit, float) else 1
    return Evaluation(
        engine=engine,
        stage=rng.choice(["validate", "test", "fit"]),
        counts=tuple(tuple(rng.randrange(smallest, 6) for _ in range(ranks)) for _ in range(loaders)),
        streams=streams,
        limit=limit,
        sanity_steps=rng.choice([0, 1, 2, -1]),
        train_counts=tuple(rng.randrange(1, 4) for _ in range(ranks)),
    )


class Evaluated(Trained):
    """Learns nothing, and logs in every way."""

    def __init__(self, setting: Evaluation) -> None:
        super().__init__(setting)
        torch.set_default_dtype(torch.float64)  # in which Lightning adds up
        self.means = torch.nn.ModuleList(MeanMetric() for _ in setting.counts)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self(batch)
        tokens = int((batch["labels"] != -100).sum())
        value = loss.detach() if tokens else torch.zeros_like(loss)
        self.means[dataloader_idx].update(value, tokens)
        each: dict[str, Any] = {"add_dataloader_idx": False, "on_step": False, "on_epoch": True}
        self.log(f"metric{dataloader_idx}", self.means[dataloader_idx], **each)
        each["sync_dist"] = True
        self.log(f"mean{dataloader_idx}", value, batch_size=tokens, **each)
        self.log(f"sum{dataloader_idx}", float(tokens), reduce_fx="sum", **each)
        self.log(f"most{dataloader_idx}", float(tokens), reduce_fx="max", **each)
        return loss

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _evaluate(setting: Evaluation) -> dict[str, float]:
    _, tensor, options = LAYOUTS[setting.engine]
    rank = dist.get_rank() // tensor
    by_rank = data(data_ranks(setting.engine), True)
    loaders = []
    for index, (counts, is_stream) in enumerate(zip(setting.counts, setting.streams, strict=True)):
        own = by_rank[rank][index:][: counts[rank]]
        loaders.append(DataLoader(Stream(own) if is_stream else own, batch_size=None))
    trainer = make_trainer(
        AutomodelStrategy(uneven_inputs="pad", timeout=0.3, **options),
        callbacks=[EvaluationLoss()],
        num_sanity_val_steps=setting.sanity_steps,
        max_epochs=2,
        **{f"limit_{'test' if setting.stage == 'test' else 'val'}_batches": setting.limit},
    )
    module = Evaluated(setting)
    several: Any = loaders if len(loaders) > 1 else loaders[0]
    if setting.stage == "fit":
        own = data(data_ranks(setting.engine), True)[rank][: setting.train_counts[rank]]
        trainer.fit(module, DataLoader(own, batch_size=None), several)
    else:
        getattr(trainer, setting.stage)(module, several, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _expected_values(setting: Evaluation, model: TinyDecoder) -> dict[str, float]:
    values = {}
    loss_name = "test_loss" if setting.stage == "test" else "val_loss"
    for index, by_rank in enumerate(setting.batches()):
        batches = [batch for own in by_rank for batch in own]
        counts = [int((batch["labels"] != -100).sum()) for batch in batches]
        mean = math.nan
        if sum(counts):
            mean = math.fsum(float(mean_loss(model, batch, "sum")) for batch in batches) / sum(counts)
        values |= {
            f"metric{index}": mean,
            f"mean{index}": mean,
            f"sum{index}": sum(counts),
            f"most{index}": max(counts),
        }
        values[loss_name if len(setting.counts) == 1 else f"{loss_name}/dataloader_idx_{index}"] = mean
    return values


@pytest.mark.every_case
@pytest.mark.parametrize(
    "seed",
    [1003, 1007, 1010, 1012, 1014, 1017, *(pytest.param(n, marks=pytest.mark.sweep) for n in range(300))],
)
def test_evaluation(pool2: RankPool, pool4: RankPool, seed: int) -> None:
    """Each batch counts once in what is logged."""
    setting = draw_evaluation(seed)
    expected = _expected_values(setting, TinyDecoder(23).double())
    for values in pool_of(setting.engine, pool2, pool4).run(_evaluate, setting, timeout_s=60):
        assert values == pytest.approx(expected, rel=1e-12, nan_ok=True)
