"""EvaluationLoss gives the value of one process over the whole set; StepMonitor logs steps, TrainingReport draws them.

The reference knows neither ranks nor batches: the sum of the token losses of the whole set over its label
tokens.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, EvaluationLoss, StepMonitor, TrainingReport
from lightning_automodel.callbacks import report_page, training_report
from tests.data.plain import Stream
from tests.rank_pool import RankPool
from tests.trainer.exactness import SILENT, Batch, TinyDecoder, full_weights, micro_batches
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, loader, make_trainer, mean_loss
from tests.trainer.test_lightning_callbacks import Recorder

COUNTS = (5, 3)  # batches of each data-parallel rank; some of them have no label token


def count_labels(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def in_rows(batches: list[Batch]) -> list[Batch]:
    """The same data, one row a batch."""
    return [
        {k: v[i : i + 1] for k, v in batch.items()} for batch in batches for i in range(len(batch["labels"]))
    ]


def without_labels(batches: list[Batch]) -> list[Batch]:
    return [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in batches]


def hidden(batches: list[Batch]) -> list[Any]:
    """Batches in which nobody finds labels."""
    return [(batch["input_ids"], batch["labels"]) for batch in batches]


def shares(counts: tuple[int, ...] = COUNTS) -> list[list[Batch]]:
    """The batches of each data-parallel rank."""
    return [batches[:count] for batches, count in zip(micro_batches(CASE), counts, strict=True)]


def expected(batches: list[Batch], model: torch.nn.Module | None = None) -> float:
    model = TinyDecoder(CASE.seed).double() if model is None else model
    with torch.no_grad():
        losses = [float(mean_loss(model, batch, "sum")) for batch in batches]
    return math.fsum(losses) / max(sum(map(count_labels, batches)), 1)


def expected_by_batch(weight: Callable[[Batch], int]) -> float:
    """The mean of the means of batches with label tokens."""
    model = TinyDecoder(CASE.seed).double()
    batches = [batch for share in shares() for batch in share if count_labels(batch)]
    with torch.no_grad():
        losses = [float(mean_loss(model, batch)) * weight(batch) for batch in batches]
    return math.fsum(losses) / sum(map(weight, batches))


def is_near(found: Any, wanted: float) -> bool:
    return abs(float(found) - wanted) <= TOLERANCE * abs(wanted)


class Evaluated(LabelledModule):
    """Returns its loss in a given way."""

    def __init__(self, way: str = "labels") -> None:
        super().__init__()
        self.way = way

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if self.way == "tuple":
            batch = {"input_ids": batch[0], "labels": batch[1]}
        loss = mean_loss(self.model, batch, "sum" if self.way == "sum" else "mean")
        if self.way == "nothing":
            return None
        if self.way == "returned":
            return {"loss": loss, "num_label_tokens": count_labels(batch)}
        return loss

    test_step = validation_step


def evaluate(trainer: Trainer, way: str, batches: Any, stage: str = "validate") -> dict[str, float]:
    """What is logged."""
    loader = DataLoader(batches, batch_size=None)
    (values,) = getattr(trainer, stage)(Evaluated(way), loader, verbose=False)
    return values


# --- Ways to tell the count -------------------------------------------------------------------------------------------

# For each way: what the strategy is told, and whether batches hide their labels.
WAYS: dict[str, dict[str, Any]] = {
    "returned": {},
    "labels": {},
    "tuple": {"count_label_tokens": lambda batch: (batch[1] != -100).sum()},
    "sum": {"loss_reduction": "sum"},
}


def _evaluate_ways(engine: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    own = shares()[dist.get_rank()]
    for way, options in WAYS.items():
        found[way] = []
        for stage, batches in (("validate", own), ("test", in_rows(own))):
            trainer = make_trainer(
                AutomodelStrategy(data_parallel=engine, **options),
                callbacks=[EvaluationLoss("{stage}/loss")],
            )
            values = evaluate(trainer, way, hidden(batches) if way == "tuple" else batches, stage)
            found[way].append(values[{"validate": "val", "test": "test"}[stage] + "/loss"])
    return found


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_each_way_to_tell_the_count(pool2: RankPool, engine: str) -> None:
    """Whole batches and single rows, on ranks with unequally many, have the value of one process."""
    wanted = expected([batch for share in shares() for batch in share])
    for found in pool2.run(_evaluate_ways, engine):
        assert set(found) == set(WAYS)
        for values in found.values():
            assert all(is_near(value, wanted) for value in values), found


def _evaluate_otherwise() -> list[float]:
    own = [batch for batch in shares()[dist.get_rank()] if count_labels(batch)]
    found: list[float] = []
    for options, batches in (
        ({"per_token_loss": False}, own),
        ({"count": "samples"}, own),
        ({}, without_labels(own)),
    ):
        trainer = make_trainer(AutomodelStrategy(**options), callbacks=[EvaluationLoss()])
        found.append(evaluate(trainer, "labels", batches)["val_loss"])
    return found


def test_means_of_batches_of_samples_and_of_nothing(pool2: RankPool) -> None:
    """Batches weigh what they weigh in training; a set without label tokens has no mean."""
    for by_batch, by_sample, nothing in pool2.run(_evaluate_otherwise):
        assert is_near(by_batch, expected_by_batch(lambda batch: 1))
        assert is_near(by_sample, expected_by_batch(lambda batch: len(batch["labels"])))
        assert math.isnan(nothing)


# --- Layouts, loaders, and a fit --------------------------------------------------------------------------------------


def _fit(folder: str) -> tuple[Any, ...]:
    module = Evaluated("labels")
    best = ModelCheckpoint(folder, monitor="val_loss", save_weights_only=True)
    stopping = EarlyStopping("val_loss", min_delta=100.0, patience=2)
    own = shares()[dist.get_rank()]
    trainer = make_trainer(
        AutomodelStrategy(),
        callbacks=[EvaluationLoss(perplexity="{stage}_perplexity"), best, stopping],
        enable_checkpointing=True,
        num_sanity_val_steps=2,
        max_epochs=5,
    )
    trainer.fit(module, DataLoader(own[:3], batch_size=None), DataLoader(own, batch_size=None))
    value = float(trainer.callback_metrics["val_loss"])
    score = float(best.best_model_score)
    assert is_near(trainer.callback_metrics["val_perplexity"], math.exp(value))
    return value, score, trainer.current_epoch, full_weights(module.model)


def test_a_fit_that_watches_it(pool2: RankPool, tmp_path: Path) -> None:
    """After a sanity check, at the end of each epoch, on all ranks, for what saves and stops by it."""
    model = TinyDecoder(CASE.seed).double()
    for value, score, epochs, weights in pool2.run(_fit, str(tmp_path)):
        model.load_state_dict(weights)
        assert is_near(value, expected([batch for share in shares() for batch in share], model))
        assert score <= value
        assert epochs == 3  # it never improves by 100


# --- Other strategies, and what is refused ----------------------------------------------------------------------------


EMPTY = (5, 0)


def _evaluate_under_ddp() -> float:
    trainer = make_trainer(DDPStrategy(), callbacks=[EvaluationLoss()])
    # A stream, since Lightning skips the evaluation on a rank that knows that it has nothing.
    return evaluate(trainer, "returned", Stream(shares(EMPTY)[dist.get_rank()]))["val_loss"]


def test_under_lightnings_own_strategy(pool2: RankPool) -> None:
    """Also where a rank has no batch at all."""
    wanted = expected([batch for share in shares(EMPTY) for batch in share])
    assert all(is_near(value, wanted) for value in pool2.run(_evaluate_under_ddp))


def test_in_one_process_without_a_group() -> None:
    """The module runs as it is under the strategy."""
    (own, _) = shares()
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=[EvaluationLoss()], **SILENT)
    assert is_near(evaluate(trainer, "returned", own)["val_loss"], expected(own))


def _refusals() -> list[str]:
    messages = []
    own = shares((2, 2))[dist.get_rank()]
    for strategy, way, batches in (
        (AutomodelStrategy(), "nothing", own),
        (AutomodelStrategy(), "tuple", hidden(own)),
        (DDPStrategy(), "labels", own),
    ):
        trainer = make_trainer(strategy, callbacks=[EvaluationLoss()])
        with pytest.raises(ValueError, match="label") as raised:
            evaluate(trainer, way, batches, "test")
        messages.append(str(raised.value))
    return messages


def test_a_step_that_tells_too_little(pool2: RankPool) -> None:
    """What it returned, and what it should return."""
    for none, no_count, other_strategy in pool2.run(_refusals):
        assert "test_step returned None: return {'loss': loss, 'num_label_tokens': n}" in none
        assert "found no count (the batch is a list)" in no_count
        assert "return {'loss': loss, 'num_label_tokens': n} from test_step" in no_count
        assert "DDPStrategy does not count them (AutomodelStrategy does). Return" in other_strategy
        assert "{'loss': mean, 'num_label_tokens': n}" in other_strategy


# --- A page with all that was logged, which fetches nothing -----------------------------------------------------------

HOSTILE = "</script><script>throw 1</script><img src=x onerror=throw/**/2>&amp;<b>"


class Validated(LabelledModule):
    """Has a loss in validation, and one more value, whose name is no user's friend."""

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        self.log(HOSTILE, float(batch_idx), batch_size=1)
        self.log("val/loss", 0.5, batch_size=1)
        return self(batch)


def charts(page: str) -> dict[str, dict[str, Any]]:
    """The traces that are drawn, by heading and name."""
    found = re.search(r'Plotly\.newPlot\(\s*"[^"]+",\s*(\[.*\]),\s*(\{.*\}),\s*\{"responsive', page)
    assert found is not None
    headings = [html.unescape(annotation["text"]) for annotation in json.loads(found[2])["annotations"]]
    drawn: dict[str, dict[str, Any]] = {heading: {} for heading in headings}
    for trace in json.loads(found[1]):
        row = int(trace["xaxis"].removeprefix("x") or 1)
        drawn[headings[row - 1]][html.unescape(trace["name"])] = trace
    return drawn


def single_process(folder: Path, **settings: Any) -> Trainer:
    """With one of Lightning's own strategies."""
    quiet = {**SILENT, "callbacks": [StepMonitor(every_n_steps=1), TrainingReport()], **settings}
    return Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder, **quiet)


def _fit_and_report(folder: Path, engine: str) -> tuple[Any, ...]:
    monitor = StepMonitor(every_n_steps=1)
    trainer = make_trainer(
        AutomodelStrategy(data_parallel=engine, track_grad_norm=True),
        callbacks=[TrainingReport(), monitor, EvaluationLoss()],
        default_root_dir=folder / str(dist.get_rank()),
        accumulate_grad_batches=2,
        val_check_interval=4,
        num_sanity_val_steps=-1,
    )
    trainer.fit(Validated(), loader(), loader())
    return monitor.history, float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_two_ranks(pool2: RankPool, tmp_path: Path, engine: str) -> None:
    """Rank 0 writes what StepMonitor has recorded and validation logged, and alone: nothing in it can communicate."""
    (history, val_loss), _ = pool2.run(_fit_and_report, tmp_path, engine)
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["report.html"]
    assert not (tmp_path / "1" / "report.html").exists()
    page = (tmp_path / "0" / "report.html").read_text()
    drawn = charts(page)
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_per_second"):
        trace = drawn["loss" if name == "train/loss" else name][name]
        assert trace["x"] == [entry["step"] for entry in history] == [1, 2, 3, 4]
        assert trace["y"] == pytest.approx([entry[name] for entry in history], rel=1e-5)
    for name in ("val_loss", "val/loss"):
        assert drawn["loss"][name]["x"] == [2, 4]
    assert drawn["loss"]["val_loss"]["y"][-1] == pytest.approx(val_loss, rel=1e-5)
    assert drawn[HOSTILE][HOSTILE]["x"] == [2, 4]
    assert "<h1>Validated</h1>" in page
    assert not re.search(r'<(?:script|link|img)[^>]* (?:src|href)="?https?:', page)
    assert f"&#x27;data_parallel&#x27;: &#x27;{engine}&#x27;" in page
    assert re.search(r"'Ranks': 2,\s*'Steps': 4,", html.unescape(page))
    assert "&#x27;label_shift&#x27;: 0," in page


def test_another_strategy(tmp_path: Path) -> None:
    """It has what is known: no training loss, no configuration. A second fit has its own steps alone."""
    trainer = single_process(tmp_path, num_sanity_val_steps=1)
    batches = DataLoader(micro_batches(CASE)[0][:3], batch_size=None)
    trainer.fit(Validated(), batches, batches)
    page = (tmp_path / "report.html").read_text()
    assert list(charts(page)["loss"]) == ["val/loss"]
    assert charts(page)["loss"]["val/loss"]["x"] == [3]  # not that of a part of the set
    assert "SingleDeviceStrategy" in page
    assert "label_shift" not in page
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Validated(), batches)
    page = (tmp_path / "report.html").read_text()
    assert charts(page)["train/learning_rate"]["train/learning_rate"]["x"] == [4, 5, 6]


class Fails(LabelledModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise RuntimeError(HOSTILE)
        return super().training_step(batch, batch_idx)


def test_exception(tmp_path: Path) -> None:
    """What there is by then, and what ended it; evaluation that fails later leaves the page as it is."""
    batches = DataLoader(micro_batches(CASE)[0][:3], batch_size=None)
    trainer = single_process(tmp_path)
    with pytest.raises(RuntimeError, match="throw 1"):
        trainer.fit(Fails(), batches)
    page = (tmp_path / "report.html").read_text()
    assert charts(page)["train/learning_rate"]["train/learning_rate"]["x"] == [1, 2]
    assert "&#x27;Ended by&#x27;: &#x27;RuntimeError: &lt;/script&gt;" in page
    assert "<script>throw" not in page
    with pytest.raises(IndexError):
        trainer.validate(Fails(), DataLoader([0]))
    assert (tmp_path / "report.html").read_text() == page


def test_not_written(tmp_path: Path) -> None:
    """A run does not fail for its report, and nothing of it is left; it may lie in any place that fsspec knows."""
    (tmp_path / "report.html").mkdir()
    with pytest.warns(UserWarning, match=r"TrainingReport could not write report\.html: IsADirectoryError"):
        single_process(tmp_path).fit(
            LabelledModule(), DataLoader(micro_batches(CASE)[0][:1], batch_size=None)
        )
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    callbacks = [StepMonitor(), TrainingReport("memory://of-a-test/report.html")]
    trainer = single_process(tmp_path, callbacks=callbacks)
    trainer.fit(LabelledModule(), DataLoader(micro_batches(CASE)[0][:1], batch_size=None))
    assert MemoryFileSystem().cat_file("/of-a-test/report.html").endswith(b"</pre>\n")


def test_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StepMonitor as the fit starts, plotly already before."""
    with pytest.raises(
        ValueError, match=r"the Trainer has none: pass callbacks=\[StepMonitor\(\), TrainingReport\(\)"
    ):
        single_process(tmp_path, callbacks=[TrainingReport()]).fit(LabelledModule(), DataLoader([0]))
    monkeypatch.setattr(training_report, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-automodel\[report\]'"):
        TrainingReport()


def test_numbers_that_cannot_be_drawn() -> None:
    """Gaps in the curves; without any step, a page without a chart and without the script that draws them."""
    page = report_page.render(title="Model", facts={"Steps": 0}, history=[], validated={})
    assert "No step was logged." in page
    assert len(page) < 5000
    history = [
        {"step": step, "train/loss": value} for step, value in enumerate([1.0, math.nan, math.inf], 1)
    ]
    validated = {"val_loss": {1: -math.inf}}
    drawn = charts(report_page.render(title="Model", facts={}, history=history, validated=validated))
    assert drawn["loss"]["train/loss"]["y"] == [1.0, None, None]
    assert drawn["loss"]["val_loss"]["y"] == [None]


# --- StepMonitor logs each optimizer step once, to every logger -------------------------------------------------------

STEP_COUNTS = (8, 5)  # batches of each rank; the rest are fillers
ACCUMULATE = 3
WINDOWS = [range(0, 3), range(3, 6), range(6, 8)]


class Halves(LabelledModule):
    """Halves its learning rate with each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _monitor(engine: str) -> tuple[Any, ...]:
    monitor = StepMonitor(every_n_steps=1)
    recorder = Recorder()
    reports: dict[int, dict[str, float]] = {}

    def keep(trainer: Trainer, *_: Any) -> None:
        report = trainer.strategy.last_step
        if trainer.global_step not in reports and report is not None:
            reports[trainer.global_step] = {
                "train/loss": float(report.loss),
                "train/grad_norm": float(report.grad_norm),
            }

    trainer = make_trainer(
        AutomodelStrategy(data_parallel=engine, uneven_inputs="pad", track_grad_norm=True),
        callbacks=[monitor, LambdaCallback(on_train_batch_end=keep)],
        logger=recorder,
        accumulate_grad_batches=ACCUMULATE,
    )
    trainer.fit(Halves(), DataLoader(shares(STEP_COUNTS)[dist.get_rank()], batch_size=None))
    return monitor.history, recorder.logged, reports, trainer.callback_metrics


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_each_step(pool2: RankPool, engine: str) -> None:
    """Ragged batches, fillers, windows of three and a short one: counts, loss, norm and rate, alike on all ranks."""
    results = pool2.run(_monitor, engine)
    for history, logged, reports, callback_metrics in results:
        assert [entry["step"] for entry in history] == [1, 2, 3]
        assert [{k: v for k, v in entry.items() if k.startswith("train/")} for entry in history] == logged
        assert float(callback_metrics["train/loss"]) == history[-1]["train/loss"]
        for step, (entry, window) in enumerate(zip(history, WINDOWS, strict=True)):
            batches = [batch for own in shares(STEP_COUNTS) for batch in own[window.start : window.stop]]
            assert entry["train/label_tokens"] == sum(map(count_labels, batches))
            assert entry["train/learning_rate"] == 0.1 * 0.5**step
            assert {name: entry[name] for name in ("train/loss", "train/grad_norm")} == reports[step + 1]
            assert set(entry) == {"step", *logged[step]}


class StepsByHand(LabelledModule):
    """Each batch is a window of its own, each second one is followed by a step of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parts = (self.model.head, self.model.blocks)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.manual_backward(self(batch))
        if batch_idx % 2:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()


def _monitor_windows() -> list[list[dict[str, Any]]]:
    found = []
    for module, strategy, settings in (
        (StepsByHand(), AutomodelStrategy(), {"log_every_n_steps": 2}),
        (LabelledModule(), AutomodelStrategy(per_token_loss=False), {"log_every_n_steps": 3}),
        (LabelledModule(), AutomodelStrategy(), {"log_every_n_steps": 0}),
    ):
        monitor = StepMonitor()
        trainer = make_trainer(strategy, callbacks=[monitor], **settings)
        batches = [batch for batch in micro_batches(CASE)[dist.get_rank()] if count_labels(batch)][:4]
        trainer.fit(module, DataLoader(batches, batch_size=None))
        found.append(monitor.history)
    return found


def test_steps_are_not_windows_nor_batches(pool2: RankPool) -> None:
    """Two windows and two optimizers: their tokens count once. It logs at the Trainer's pace."""
    batches = [[batch for batch in own if count_labels(batch)][:4] for own in micro_batches(CASE)]
    for by_hand, by_batch, never in pool2.run(_monitor_windows):
        assert [entry["step"] for entry in by_hand] == [2, 4]
        for entry, window in zip(by_hand, (slice(0, 2), slice(2, 4)), strict=True):
            num_label_tokens = sum(count_labels(batch) for own in batches for batch in own[window])
            assert entry["train/label_tokens"] * 2 == num_label_tokens  # of each of the two steps
        assert [entry["step"] for entry in by_batch] == [3]
        assert set(by_batch[0]) == {"step", "train/loss", "train/learning_rate"}
        assert never == []
