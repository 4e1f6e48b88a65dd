"""Fits that are to raise, in tables: all rows of one run in one call on the ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.runs import loader, make_trainer


@dataclass(frozen=True)
class Refused:
    """A fit that raises.

    The message, which begins with the kind of the error, has all ``sentences``. The ``options`` are the strategy's,
    the ``settings`` the Trainer's.
    """

    make_module: Callable[[], LightningModule]
    sentences: tuple[str, ...]
    batches: Callable[[], Iterable[Any]] = loader
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    validates_first: bool = False


def _messages(module: str, table: str) -> dict[str, str]:
    """Runs on every rank: what each row of the table raises."""
    raised = {}
    for name, refused in getattr(importlib.import_module(module), table).items():
        try:
            trainer = make_trainer(AutomodelStrategy(**refused.options), **refused.settings)
            trained = refused.make_module()
            data = DataLoader(list(refused.batches()), batch_size=None)
            if refused.validates_first:
                trainer.validate(trained, data, verbose=False)
            trainer.fit(trained, data, data)
        except Exception as error:  # judged by `check_refused`
            raised[name] = f"{type(error).__name__}: {error}"
    return raised


def check_refused(pool: RankPool, module: str, table: str = "REFUSED") -> None:
    """On every rank, each row of a module's table is to raise what it says."""
    rows: dict[str, Refused] = getattr(importlib.import_module(module), table)
    for raised in pool.run(_messages, module, table, timeout_s=200):
        for name, refused in rows.items():
            message = raised.get(name, "nothing was refused")
            assert all(sentence in message for sentence in refused.sentences), f"{name}: {message}"
