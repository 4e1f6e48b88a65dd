"""The batches of each rank, and one process that takes each window of all ranks' micro-batches as one batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.trainer.exactness import Batch, micro_batches
from tests.trainer.plain import sgd
from tests.trainer.runs import CASE, mean_loss

ENGINES: dict[str, dict[str, Any]] = {"fsdp2": {}, "ddp": {"data_parallel": "ddp"}}
Report = tuple[float, int, int]


class Stream(IterableDataset):
    """Batches of which nobody knows the number."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def own_batches(counts: tuple[int, ...] | list[int]) -> list[Batch]:
    """This rank's micro-batches, as many as its count says."""
    rank = dist.get_rank()
    return [dict(batch) for batch in micro_batches(CASE)[rank][: counts[rank]]]


def loader_of(counts: tuple[int, ...], is_stream: bool = False) -> DataLoader:
    own = own_batches(counts)
    return DataLoader(Stream(own) if is_stream else own, batch_size=None)


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
