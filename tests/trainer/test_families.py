"""One step of families of transformers, replicated and sharded on two ranks, beside one process with the whole batch.

`pytest tests/trainer/test_families.py -m sweep --support-table benchmarks/results/support_cpu2.md` writes the
table there, and a dated record of every family.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests import markdown
from tests.rank_pool import RankPool
from tests.trainer.exactness import full
from tests.trainer.families import FAMILIES, ROWS, make_batch, make_model, own_loss, shift
from tests.trainer.runs import make_trainer

TOLERANCE = 2e-5
"""Of float32 gradients, relative to the largest of their tensor; each model rounds in ways of its own."""
DIFFERS = 1e-2
NEGLIGIBLE = 1e-3
"""Gradients below this part of the model's largest are measured by that part: some are zero but for rounding."""
ENGINES: dict[str, dict[str, Any]] = {
    "replicated": {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}},
    "sharded": {},
}
COMMAND = (
    "python -m pytest tests/trainer/test_families.py -m sweep"
    " --support-table benchmarks/results/support_cpu2.md"
)


class Family(LightningModule):
    """Trains a family's model on its own loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.model = make_model(name)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return own_loss(
            self.name, self.model, batch, lambda x: self.all_gather(x, sync_grads=True).flatten(0, 1)
        )

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = gradients_of(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, gathered where they are sharded: a collective."""
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def fit(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on every rank: the gradients of one step on its half of the batch."""
    rows = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
    batch = {key: value[rows] for key, value in make_batch(name).items()}
    counting = {"label_shift": shift(name)} if "labels" in batch else {"count": "samples"}
    module = Family(name)
    trainer = make_trainer(AutomodelStrategy(**counting, **options), max_steps=1)
    trainer.fit(module, DataLoader([batch], batch_size=None))
    return module.gradients


def one_process(name: str) -> dict[str, Tensor]:
    """The gradients of the whole batch."""
    model: nn.Module = make_model(name)
    own_loss(name, model, make_batch(name)).backward()
    return gradients_of(model)


def deviation(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest deviation of a gradient, relative to the largest of its tensor."""
    assert found.keys() == expected.keys()
    smallest = NEGLIGIBLE * max(float(gradient.abs().max()) for gradient in expected.values())
    return max(
        float((found[name] - right).abs().max()) / max(float(right.abs().max()), smallest)
        for name, right in expected.items()
    )


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, list[float]]]:
    """The deviations of each family; with --support-table, they are written at the end."""
    found: dict[str, list[float]] = {}
    yield found
    if (path := request.config.getoption("--support-table")) and found:
        record = markdown.write_record("families", "# Hugging Face families\n\n" + as_markdown(found))
        markdown.write_section(Path(path), "families", summary(found, record))


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAMILIES)
def test_family(pool2: RankPool, name: str, table: dict[str, list[float]]) -> None:
    """Gradients of one process, or known not to be; both engines alike."""
    expected = one_process(name)
    found = table[name] = []
    for options in ENGINES.values():
        found.append(max(deviation(gradients, expected) for gradients in pool2.run(fit, name, options)))
    if FAMILIES[name].differs is None:
        assert max(found) <= TOLERANCE
    else:
        assert min(found) > DIFFERS


def method(found: dict[str, list[float]]) -> str:
    """What was run, and what the numbers are."""
    import transformers

    return (
        f"{len(found)} families, {datetime.date.today()}, transformers {transformers.__version__}, torch"
        f" {torch.__version__}, Lightning {lightning.__version__}, written by `{COMMAND}`: one step in"
        " float32 on the loss that the model computes itself, on two ranks with different numbers of labels,"
        " compared with one process that has the whole batch. Dropout is off. A number is the largest"
        " deviation of a gradient, relative to the largest of its tensor."
    )


def summary(found: dict[str, list[float]], record: Path) -> str:
    """A row for each kind of model that agrees, with its largest deviations, and for each family that differs."""
    names: dict[tuple[str, str], list[str]] = {}
    for name in found:
        family = FAMILIES[name]
        kind = re.sub(r"^.*?(?=For|LMHead|MT|Model)", "…", family.model)
        names.setdefault((kind, family.differs or ""), []).append(name)
    rows = []
    for (kind, reason), members in names.items():
        largest = [max(deviations) for deviations in zip(*(found[name] for name in members), strict=True)]
        rows.append([", ".join(members), f"`{kind}`", *map(_shown, largest), reason])
    intro = f"{method(found)} Here it is the largest of a row's families ([each of them](../{record}))."
    return "\n".join([intro, "", *markdown.table(["families", "class", *ENGINES, ""], rows), ""])


def _shown(deviation: float) -> str:
    return f"{'agrees' if deviation <= TOLERANCE else 'differs'}, {deviation:.0e}"


def as_markdown(found: dict[str, list[float]]) -> str:
    """A row for each family."""
    rows = [
        [name, FAMILIES[name].model, *map(_shown, deviations), FAMILIES[name].differs or ""]
        for name, deviations in found.items()
    ]
    return "\n".join([method(found), "", *markdown.table(["family", "model", *ENGINES, ""], rows), ""])
