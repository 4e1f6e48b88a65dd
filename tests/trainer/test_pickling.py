"""A module that trains can be pickled and copied, as for workers that are spawned: what is patched stays behind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.runs import LabelledModule, loader, make_trainer


class _Module(LabelledModule):
    """Pickles and copies itself in hooks, and uses what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.differing: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._compare(batch)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self._compare(None)

    def _compare(self, batch: Any) -> None:
        for other in (pickle.loads(pickle.dumps(self)), copy.deepcopy(self)):
            for name in ("zero_grad", "training_step", "on_validation_model_eval", "toggle_optimizer"):
                if getattr(other, name).__self__ is not other:
                    self.differing.append(name)
            if batch is None:
                continue
            with torch.enable_grad():
                other(batch).backward()
            other.zero_grad()
            self.differing += [name for name, p in other.named_parameters() if p.grad is not None]


def _fit() -> list[str]:
    module = _Module()
    trainer = make_trainer(AutomodelStrategy(data_parallel="ddp"), accumulate_grad_batches=2)
    trainer.fit(module, loader())
    return module.differing


def test_module_is_pickled_and_copied_during_a_fit(pool2: RankPool) -> None:
    assert pool2.run(_fit) == [[], []]
