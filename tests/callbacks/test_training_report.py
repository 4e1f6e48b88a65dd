"""TrainingReport draws what was logged on a page that fetches nothing."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, EvaluationLoss, StepMonitor, TrainingReport
from lightning_automodel.callbacks import report_page, training_report
from tests.rank_pool import RankPool
from tests.trainer.exactness import SILENT, Batch, micro_batches
from tests.trainer.runs import CASE, LabelledModule, loader, make_trainer

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
