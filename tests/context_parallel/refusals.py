"""Fits under context parallelism that are to raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch
from tests.trainer.runs import make_trainer


@dataclass(frozen=True)
class Refused:
    """A fit that raises.

    Attributes:
        make_module: What is trained.
        sentence: Part of the message.
        batches: What it is trained on, made on each rank.
        options: For `AutomodelStrategy`.
    """

    make_module: Callable[[], LightningModule]
    sentence: str
    batches: Callable[[], Iterable[Batch]]
    options: dict[str, Any] = field(default_factory=dict)


def messages(table: Mapping[str, Refused]) -> dict[str, str]:
    """Called on every rank: what each of these raises."""
    raised = {}
    for name, refused in table.items():
        trainer = make_trainer(AutomodelStrategy(context_parallel_size=2, **refused.options))
        try:
            trainer.fit(refused.make_module(), DataLoader(list(refused.batches()), batch_size=None))
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"
    return raised


def check_refused(
    pool: RankPool, raise_all: Callable[[], dict[str, str]], table: Mapping[str, Refused]
) -> None:
    """On every rank, `raise_all`, which calls `messages`, is to give the sentences of the table."""
    for raised in pool.run(raise_all):
        assert raised.keys() == table.keys()
        for name, refused in table.items():
            assert refused.sentence in raised[name], f"{name}: {raised[name]}"
