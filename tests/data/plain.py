"""One process that takes each window of all ranks' micro-batches as one batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from tests.trainer.exactness import Batch
from tests.trainer.plain import sgd
from tests.trainer.runs import mean_loss

Report = tuple[float, int, int]


def train_windows(model: nn.Module, windows: Iterable[list[Batch]]) -> list[Report]:
    """Train `model` in place; of each step the mean loss, the number of label tokens, and that of micro-batches."""
    optimizer = sgd(model)
    reports = []
    for window in windows:
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
        loss = torch.stack([mean_loss(model, batch, "sum") for batch in window]).sum() / max(tokens, 1)
        reports.append((loss.item() if tokens else math.nan, tokens, len(window)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return reports
