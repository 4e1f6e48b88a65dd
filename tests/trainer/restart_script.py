"""What the ranks of `test_restart.py` run: in the first attempt, one of them fails."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, _compat
from lightning_automodel.watchdog import ENDED, FAILURE
from tests.trainer.faults import Model, Ragged
from tests.trainer.runs import SILENT

FAILING_RANK = 1
NUM_STEPS = 6


class FailsAtFirst(Model):
    """Raises in the third batch of the first attempt; notes what the store of an attempt holds at its beginning."""

    found: dict[str, str]

    def on_train_start(self) -> None:
        store = dist.PrefixStore("lightning_automodel/run/1", _compat.default_store().clone())  # type: ignore[attr-defined]
        self.found = {key: store.get(key).decode() for key in (FAILURE, ENDED)}

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if batch_idx == 2 and dist.get_rank() == FAILING_RANK and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("no labels here")


def main(folder: Path) -> None:
    """Train, and write down what an attempt that trained to its end was like."""
    model = FailsAtFirst()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=AutomodelStrategy(timeout=1), max_steps=NUM_STEPS, **SILENT
    )
    trainer.fit(model, DataLoader(Ragged(lambda: None), 2))
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_automodel")]
    attempt, rank, world_size = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank(), dist.get_world_size()
    told = {"rank": rank, "world_size": world_size, "steps": trainer.global_step, "threads": threads, **model.found}
    (folder / f"attempt{attempt}_rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
