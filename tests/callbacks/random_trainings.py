"""Random trainings for ExactnessCheck, right and wrong."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import nn

from tests.callbacks.exactness import WORDS, Training, run, sentences
from tests.rank_pool import RankPool

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
STRATEGIES = ("fsdp2", "ddp", "lightning")


class RandomNet(LightningModule):
    """Layers of random width and kind, and an attention whose key bias has no gradient but rounding."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        draw = random.Random(number)
        width = draw.choice([5, 16, 33, 64])
        depth = draw.choice([1, 3, 8])
        activation = draw.choice([nn.Tanh, nn.ReLU, nn.GELU])
        dropout = draw.choice([0.0, 0.0, 0.2])
        self.is_residual = draw.random() < 0.6
        self.width = width
        self.rate = draw.choice([1e-3, 1e-2])
        self.is_adaptive = draw.random() < 0.5
        self.embedding = nn.Embedding(WORDS, width)
        self.head = nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), activation(), nn.Dropout(dropout))
            for _ in range(depth)
        )
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        scale = draw.choice([0.5, 1.0, 3.0])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(scale)
        self.embedding.weight.requires_grad_(draw.random() < 0.8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        states = self.embedding(batch["input_ids"])
        for layer in self.layers:
            states = states + layer(states) if self.is_residual else layer(states)
        scores = self.query(states) @ self.key(states).mT / self.width**0.5
        logits = self.head(torch.softmax(scores, dim=-1) @ states + states)
        return F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            batch["labels"].flatten(),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.is_adaptive else torch.optim.SGD
        return kind([p for p in self.parameters() if p.requires_grad], self.rate)


def random_training(number: int, strategy: str, precision: str, equal: bool = False) -> Training:
    draw = random.Random(-number)
    accumulate = draw.choice([1, 2, 3, 4])
    rows = draw.choice([1, 2, 3])
    return Training(
        lambda: RandomNet(number),
        data=lambda rank: sentences(1000 * rank + number, 3 * accumulate, rows, equal),
        strategy=strategy,
        options={"auto_wrap_policy": {RandomNet}} if strategy == "fsdp2" and draw.random() < 0.3 else {},
        trainer={
            "max_steps": 1,
            "precision": precision,
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": draw.choice([None, None, 0.1, 1.0]),
        },
    )


def random_verdicts(numbers: list[int], *training: Any) -> list[tuple[int, str | None, str]]:
    """The number, the verdict and the report of each training that could be wrong: some happen to have equal counts."""
    found = []
    for number in numbers:
        check, _ = run(random_training(number, *training))
        found.append((number, check.verdict, check.report))
    return found


def right(pool: RankPool, numbers: list[int], strategy: str, precision: str) -> list[tuple[int, Any, str]]:
    """Those that are right: under Lightning's ddp if micro-batches have equal counts."""
    return pool.run(random_verdicts, numbers, strategy, precision, strategy == "lightning", timeout_s=300)[0]


def wrong(pool: RankPool, numbers: list[int], precision: str) -> list[tuple[int, Any, str]]:
    """Those on unequal counts under Lightning's ddp, without those that happen to have equal ones."""
    found = pool.run(random_verdicts, numbers, "lightning", precision, timeout_s=300)[0]
    return [each for each in found if "were not seen" not in each[2]]
