"""`uneven_inputs="pad"`: a rank whose data has ended takes part, and weights, metrics and logs are as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.wrappers import Running

from lightning_automodel import AutomodelStrategy
from tests.data.plain import ENGINES, Stream, own_batches, train_windows
from tests.rank_pool import RankPool
from tests.trainer.exactness import assert_exact, full_weights, micro_batches
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


class LearnsNothing(Padded):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit(
    options: dict[str, Any], counts: list[int], is_stream: bool, accumulate: int, make: type[Padded] = Padded
) -> dict[str, Any]:
    module = make()
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


def test_logged_values_are_those_of_the_data(pool2: RankPool) -> None:
    """Sums, extremes, weighted means and TorchMetrics; learning nothing, the mean loss is that of the first weights."""
    counts = [2, 5]
    model = LabelledModule().model
    batches = [b for own, n in zip(micro_batches(CASE), counts, strict=True) for b in own[:n]]
    tokens = [int((batch["labels"] != -100).sum()) for batch in batches]
    mean = float(sum(mean_loss(model, batch, "sum") for batch in batches)) / sum(tokens)
    expected = {"number": sum(tokens), "most": max(tokens), "loss": mean, "mean": mean}
    for result in pool2.run(_fit, {}, counts, False, 2, LearnsNothing):
        assert result["logged"] == pytest.approx(expected, rel=1e-6)
