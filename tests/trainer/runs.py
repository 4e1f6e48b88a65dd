"""Runs that single out one behaviour: a tiny module with label keys, a Trainer on the pool's ranks, a plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests import devices
from tests.trainer.cases import Case
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    SILENT,
    Batch,
    TinyDecoder,
    full_weights,
    micro_batches,
)
from tests.trainer.exactness import TOLERANCE as TOLERANCE

CASE = Case(seed=20, telling="labels", num_batches=8, gap="micro_batches")
STRATEGIES: dict[str, dict[str, Any]] = {
    "kept": {"reshard_during_accumulation": False},
    "resharded": {"reshard_during_accumulation": True},
    "undeferred": {"defer_fsdp_grad_sync": False},
    "ddp": {"data_parallel": "ddp"},
}


def by_default(values: Mapping[str, Any], *names: str) -> list[Any]:
    """All values as parameters with their names; those that are not named run in the sweep alone."""
    return [
        pytest.param(value, id=name, marks=[] if name in names else [pytest.mark.sweep])
        for name, value in values.items()
    ]


def sampled(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """All values (of several arguments as tuples); those that are not `chosen` run in the sweep alone."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in chosen else [pytest.mark.sweep],
        )
        for value in values
    ]


def first_by_default(values: Iterable[Any], count: int = 1) -> list[Any]:
    """All values (of several arguments as tuples); those behind the first `count` run in the sweep alone."""
    listed = list(values)
    return sampled(listed, listed[:count])


def mean_loss(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Cross entropy of the model over the label tokens of a batch."""
    return F.cross_entropy(
        model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction=reduction
    )


def count_labels(batch: Batch) -> int:
    """Positions that have a label."""
    return int((batch["labels"] != -100).sum())


def decoder() -> nn.Module:
    """The model of `LabelledModule`."""
    return TinyDecoder(CASE.seed).double()


class LabelledModule(LightningModule):
    """Returns the bare mean loss; the strategy counts the labels."""

    def __init__(self, seed: int = CASE.seed) -> None:
        super().__init__()
        self.model = TinyDecoder(seed).double()

    def forward(self, batch: Batch) -> Tensor:
        return mean_loss(self.model, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class ManualModule(LabelledModule):
    """Calls its backwards and steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def make_trainer(strategy: Any, **kwargs: Any) -> Trainer:
    """A silent Trainer on the ranks of the pool that it runs in."""
    return Trainer(
        **{
            "strategy": strategy,
            "accelerator": devices.accelerator(dist.get_world_size()),
            "devices": dist.get_world_size(),
            "plugins": [LightningEnvironment()],
            "max_epochs": 1,
            **SILENT,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            **kwargs,
        }
    )


def warnings_of(part: str, call: Callable[..., Any], *args: Any) -> list[str]:
    """Call; the texts of the warnings that hold ``part``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [str(each.message) for each in caught if part in str(each.message)]


def loader(case: Case = CASE, peers: int = 1) -> DataLoader:
    """This rank's micro-batches of an epoch; ``peers`` neighbours share each of them."""
    return DataLoader(micro_batches(case)[dist.get_rank() // peers], batch_size=None)


def shares(counts: Iterable[int], case: Case = CASE) -> list[list[Batch]]:
    """The first micro-batches of each data-parallel rank, as many as it has."""
    return [batches[:count] for batches, count in zip(micro_batches(case), counts, strict=True)]


def fit_weights(
    make_module: Callable[[], Any], options: dict[str, Any], case: Case = CASE, **settings: Any
) -> dict[str, Tensor]:
    """Runs on every rank: weights of the module's model after a fit."""
    module = make_module()
    make_trainer(AutomodelStrategy(**options), **settings).fit(module, loader(case))
    return full_weights(module.model)


def train_plainly(
    steps: list[list[int]] | list[list[list[int]]], case: Case = CASE, clip_norm: float | None = None
) -> dict[str, Tensor]:
    """Weights of one plain process.

    ``steps`` has for each step its window, the indices of micro-batches that all ranks contribute to it; or the
    windows whose means add up for it.
    """
    model = TinyDecoder(case.seed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for step in steps:
        optimizer.zero_grad()
        for window in step if isinstance(step[0], list) else [step]:
            batches = [by_rank[index] for by_rank in micro_batches(case) for index in window]  # type: ignore[union-attr]
            num_label_tokens = sum(map(count_labels, batches))
            loss = torch.stack([mean_loss(model, batch, "sum") for batch in batches]).sum() / max(
                num_label_tokens, 1
            )
            loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return full_weights(model)
