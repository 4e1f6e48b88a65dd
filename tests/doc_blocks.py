"""Code blocks of README.md and docs/: found, compared with real names and signatures, and run in one process.

The blocks of a page run in its order in one namespace. `PRELUDE` is what readers are expected to have:
common imports, a module and a loader. `SETUP` is what one page needs beyond it. A class of a
LightningModule, or functions whose first argument is `self`, are then fitted for a few steps, on `Shown` for
what they lack. `<!-- not run: reason -->` above a block leaves out the running alone.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_automodel
from lightning_automodel import AutomodelStrategy
from tests.processes import ROOT
from tests.trainer.exactness import SILENT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
VOCABULARY = 11  # of the models of tests.trainer.hugging_face

PRELUDE = f"""
import lightning as L
import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader
from lightning_automodel import {", ".join(lightning_automodel.__all__)}
from tests.doc_blocks import Shown, batches
module, loader = Shown(), DataLoader(batches(), batch_size=None)
"""
SETUP = {
    "docs/api.md": """
trainer = Trainer(strategy=AutomodelStrategy())
""",
    "docs/coming_from.md": """
from tests.trainer.hugging_face import llama
llama(is_tied=False).float().save_pretrained("model")
class Block(torch.nn.Module):
    pass
model, window = torch.nn.Sequential(torch.nn.Embedding(11, 11)), batches()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    "docs/context_parallelism.md": """
query = key = value = torch.randn(2, 2, 8, 4)
batch = batches()[0]
""",
    "docs/failures.md": """
strategy, load_or_build_cache = AutomodelStrategy(), dict
""",
    "docs/launchers.md": """
import os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", RANK="0", WORLD_SIZE="2")
""",
    "docs/resume.md": """
trainer = Trainer(strategy=AutomodelStrategy(data_parallel="ddp"), max_steps=1)
trainer.fit(module, loader)
trainer.save_checkpoint("last.ckpt")
trainer = Trainer(strategy=AutomodelStrategy(data_parallel="ddp"))
model, datamodule = module, loader
""",
    "docs/tell_the_count.md": """
Shown.image_tower, Shown.text_tower = lambda self, x: self.model(x), lambda self, y: self.model(F.one_hot(y, 4).float())
""",
    "docs/watching.md": """
def make_model():
    return torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
""",
    "docs/token_loss.md": """
from examples.packing import Packer
documents = [{name: row for name, row in zip(batch, rows)} for batch in batches() for rows in zip(*batch.values())]
""",
}
HUGGING_FACE: dict[str, Any] = {"label_shift": 1}
STRATEGY: dict[str, Any] = {
    "docs/checkpoints.md": HUGGING_FACE,
    "docs/counting_ahead.md": {"count_window_ahead": True},
}
ARGUMENTS = {"Causal": ("model",)}


@dataclass(frozen=True)
class Block:
    """One block of a page; `reason` says why it does not run."""

    language: str
    text: str
    reason: str | None


def blocks(page: Path, *languages: str) -> list[Block]:
    """Those of these languages, in order. A diff counts as Python: what stands there after it was applied."""
    found = [Block(m["language"], m["text"], m["reason"]) for m in BLOCK.finditer(page.read_text())]
    return [
        block if block.language != "diff" else _applied(block)
        for block in found
        if block.language in languages
    ]


def _applied(diff: Block) -> Block:
    lines = [line[1:] for line in diff.text.splitlines() if not line.startswith("-")]
    return Block("diff", "\n".join(lines) + "\n", diff.reason)


# --- What readers have ------------------------------------------------------------------------------------------------


def batches() -> list[dict[str, Tensor]]:
    """Of a language model, with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for width in (5, 8, 3):
        input_ids = torch.randint(VOCABULARY, (2, width), generator=generator)
        made.append({"input_ids": input_ids, "labels": input_ids.masked_fill(torch.arange(width) < 2, -100)})
    return made


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Of a classifier."""
    return [(torch.randn(rows, 4), torch.arange(rows) % 3) for rows in (4, 4, 2)]


class Balanced(nn.Sequential):
    """Ids [b, s] to logits [b, s, v] and a balance loss []."""

    def forward(self, input_ids: Tensor) -> Any:
        logits = super().forward(input_ids)
        return logits, logits.square().mean()


class Shown(pl.LightningModule):
    """What the pages leave to the reader. `text` is the block that goes beyond it."""

    text = ""

    def __init__(self) -> None:
        from torchmetrics import MeanMetric

        from tests.trainer.hugging_face import llama, mixtral

        super().__init__()
        self.mean = MeanMetric()
        self.automatic_optimization = "manual_backward" not in self.text
        kind = Balanced if "balance" in self.text else nn.Sequential
        self.model: nn.Module = kind(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
        if "x, y = batch" in self.text:
            self.model = nn.Linear(4, 3)
            self.class_weights = torch.tensor([0.5, 1.0, 3.0])
        elif "**batch" in self.text or "hugging_face" in self.text:
            self.model = mixtral().float() if "router" in self.text else llama(is_tied=False).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss if "hugging_face" in self.text else self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneProcess(lightning.Trainer):
    """A Trainer on one CPU process, whatever it is asked for."""

    fitted: set[type]
    __signature__ = inspect.signature(lightning.Trainer)

    def __init__(self, **options: Any) -> None:
        here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, **SILENT}
        super().__init__(**{"max_epochs": 1, **options, **here})

    def fit(self, model: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        self.fitted.add(type(model))
        super().fit(model, *args, **kwargs)


# --- Running ----------------------------------------------------------------------------------------------------------


def run_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a page's blocks; returns its namespace. What a block defines, and does not fit itself, is fitted."""
    name = str(page.relative_to(ROOT))
    monkeypatch.setattr(lightning, "Trainer", OneProcess)
    monkeypatch.setattr(lightning, "LightningModule", Shown)
    monkeypatch.setattr(OneProcess, "fitted", set(), raising=False)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(PRELUDE + SETUP.get(name, ""), namespace)
    registered = set(StrategyRegistry)
    try:
        for block in blocks(page, "python", "diff"):
            before = dict(namespace)
            if block.reason is None:
                exec(compile(block.text, f"{name}: {block.text.splitlines()[0]}", "exec"), namespace)
            new = {key: value for key, value in namespace.items() if before.get(key) is not value}
            fit_what_is_new(new, block, STRATEGY.get(name, {}))
    finally:
        for strategy in set(StrategyRegistry) - registered:
            StrategyRegistry.remove(strategy)
    return namespace


def fit_what_is_new(new: dict[str, Any], block: Block, options: dict[str, Any]) -> None:
    """Fit the modules, or the one module of these methods, that a block has defined."""
    own = [value for value in new.values() if getattr(value, "__module__", None) == "__main__"]
    classes = [value for value in own if isinstance(value, type) and issubclass(value, Shown)]
    methods = {
        f.__name__: f
        for f in own
        if isinstance(f, FunctionType) and next(iter(inspect.signature(f).parameters), "") == "self"
    }
    if methods:
        classes.append(type("Methods", (Shown,), methods))
    data = DataLoader(pairs() if "x, y = batch" in block.text else batches(), batch_size=None)  # type: ignore[arg-type]
    for chosen in classes:
        if chosen not in OneProcess.fitted:
            chosen.text = block.text
            trainer = new.get("trainer") or OneProcess(strategy=AutomodelStrategy(**options))
            trainer.fit(
                chosen(*ARGUMENTS.get(chosen.__name__, ())),
                data,
                data if "validation_step" in methods else None,
            )


# --- Reading ----------------------------------------------------------------------------------------------------------


def undefined_names(folder: Path) -> str:
    """What ruff says of names that neither a page's blocks nor what readers have define."""
    for page in PAGES:
        texts = [block.text for block in blocks(page, "python", "diff")]
        setup = SETUP.get(str(page.relative_to(ROOT)), "")
        (folder / f"{page.stem}.py").write_text("\n".join([PRELUDE, setup, *texts]))
    options = ["--isolated", "--select", "F821,E9", "--output-format", "concise"]
    command = [sys.executable, "-m", "ruff", "check", *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def unknown_keywords(block: Block, namespace: dict[str, Any]) -> Iterator[str]:
    """Keyword arguments that the called function does not have, where it can be told which that is."""
    for node in ast.walk(ast.parse(textwrap.dedent(block.text))):
        if not isinstance(node, ast.Call) or not (function := _resolved(node.func, namespace)):
            continue
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            continue
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            names = {parameter.name for parameter in parameters}
            yield from (
                f"{ast.unparse(node.func)}({k.arg}=)" for k in node.keywords if k.arg and k.arg not in names
            )


def _resolved(function: ast.expr, namespace: dict[str, Any]) -> Callable[..., Any] | None:
    """The object that a dotted name means, where its first part is known."""
    if isinstance(function, ast.Attribute):
        owner = _resolved(function.value, namespace)
        return getattr(owner, function.attr, None) if owner is not None else None
    return namespace.get(function.id) if isinstance(function, ast.Name) else None
