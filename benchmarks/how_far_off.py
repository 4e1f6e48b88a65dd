"""How far weights are from those of one process, by kind of training: Lightning's `ddp` and this strategy.

Two ranks, accumulation 4, one epoch of 83 micro-batches a rank (21 steps, of which the last has three), plain
SGD, float64. One process takes each window of all ranks as one batch. Distances are a share of how far its weights
have moved.

    python benchmarks/how_far_off.py
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from report import describe_environment, publish, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))

from lightning_automodel import AutomodelStrategy
from tests import test_recipes as recipes
from tests.rank_pool import RankPool
from tests.trainer.exactness import SILENT, full_weights
from tests.trainer.runs import make_trainer

ACCUMULATE = 4
MICRO_BATCHES = 83
RANKS = 2


class Supervised(L.LightningModule):
    """A language model on `input_ids` and `labels`, or a classifier on `(x, y)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch if isinstance(batch, (tuple, list)) else (batch["input_ids"], batch["labels"])
        return F.cross_entropy(self.model(x).reshape(-1, recipes.VOCABULARY), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def language_model() -> tuple[L.LightningModule, dict[str, Any]]:
    torch.manual_seed(0)
    return Supervised(recipes.language_model()).double(), {}


def classifier() -> tuple[L.LightningModule, dict[str, Any]]:
    torch.manual_seed(0)
    return Supervised(nn.Linear(recipes.WIDTH, recipes.VOCABULARY)).double(), {"count": "samples"}


def images(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(recipes.VOCABULARY, (rows,), generator=generator)
    return recipes.random(rows, recipes.WIDTH, generator=generator), labels


def equal(index: int) -> int:
    return 4


def ragged(index: int) -> int:
    return (4, 1, 3, 6, 2)[index % 5]


Sizes = Callable[[int], int]
KINDS: dict[str, tuple[Callable[[], Any], Callable[..., Any], Sizes, int]] = {
    "language model, ragged sequences": (language_model, recipes.labelled, equal, MICRO_BATCHES),
    "classifier, equal batches, whole windows": (classifier, images, equal, MICRO_BATCHES - 3),
    "classifier, equal batches, a short last window": (classifier, images, equal, MICRO_BATCHES),
    "classifier, batches of 1 to 6": (classifier, images, ragged, MICRO_BATCHES),
    "DPO, batches of 1 to 6 pairs": (
        lambda: recipes.recipe("Preferences"),
        recipes.pairs,
        ragged,
        MICRO_BATCHES,
    ),
    "detection": (lambda: recipes.recipe("Detector"), recipes.boxes, equal, MICRO_BATCHES),
    "segmentation, ignored pixels": (
        lambda: recipes.recipe("Segmentation"),
        recipes.pictures,
        equal,
        MICRO_BATCHES,
    ),
}
"""Module and options, batch of so many rows, sizes of micro-batches, and their number."""


def batches(kind: str) -> list[list[Any]]:
    """Of each rank."""
    _, batch, size, number = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    return [
        [batch(size(index * RANKS + rank), generator) for index in range(number)] for rank in range(RANKS)
    ]


def train(kind: str, strategy: str) -> Tensor:
    """Runs on every rank: the weights, as one vector."""
    module, options = KINDS[kind][0]()
    chosen: Any = AutomodelStrategy(**options) if strategy == "automodel" else strategy
    trainer = make_trainer(chosen, accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, DataLoader(batches(kind)[dist.get_rank()], batch_size=None))
    return flat(module)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([weight.flatten() for weight in full_weights(module).values()])


def merged(window: list[Any]) -> Any:
    if isinstance(window[0], tuple) and isinstance(window[0][0], Tensor):
        return tuple(torch.cat(part) for part in zip(*window, strict=True))
    return recipes.merged(window)


def one_process(kind: str) -> tuple[Tensor, Tensor]:
    """The weights before and after."""
    module, _ = KINDS[kind][0]()
    before = flat(module)
    first, second = batches(kind)
    starts = range(0, len(first), ACCUMULATE)
    whole = [merged([*first[at : at + ACCUMULATE], *second[at : at + ACCUMULATE]]) for at in starts]
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **SILENT)
    trainer.fit(module, DataLoader(whole, batch_size=None))
    return before, flat(module)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pool = RankPool(RANKS)
    rows = []
    for kind in KINDS:
        before, expected = one_process(kind)
        distances = [(pool.run(train, kind, each)[0] - expected).norm() for each in ("ddp", "automodel")]
        shares = [(distance / (expected - before).norm()).item() for distance in distances]
        rows.append([kind, *(f"{share:.0%}" if share > 1e-3 else f"{share:.0e}" for share in shares)])
    pool.stop()
    head = [f"- {name}: {value}" for name, value in describe_environment().items()]
    columns = ["your training", "Lightning's `ddp`", "`AutomodelStrategy`"]
    report = "\n".join(["# How far off", "", *head, "", table(columns, rows)])
    publish(report, args.output)


if __name__ == "__main__":
    main()
