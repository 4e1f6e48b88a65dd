"""What `torchrun --max-restarts` runs: it saves each step and goes on from the newest; at first, one rank fails."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_automodel import AutomodelStrategy
from tests.checkpoint.checkpoints import ACCUMULATE, AdamModule, batches
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, SILENT

NUM_STEPS = 8


class FailsOnce(Callback):
    """SIGKILL of a random rank in a random micro-batch of the first attempt alone, or an exception there."""

    def __init__(self, seed: int, fault: str) -> None:
        generator = random.Random(seed)
        self.victim = generator.randrange(2)
        self.batch = generator.randrange(ACCUMULATE + 1, ACCUMULATE * NUM_STEPS - 1)
        self.fault = fault

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if not is_first_attempt or trainer.global_rank != self.victim or batch != self.batch:
            return
        if self.fault == "exception":
            raise ValueError("no labels here")
        os.kill(os.getpid(), signal.Signals[self.fault])


def main(folder: Path, seed: int, fault: str) -> None:
    """Train to the end, from wherever the newest checkpoint is, with other weights in memory."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    fails = FailsOnce(seed, fault)
    trainer = Trainer(
        **{**SILENT, "enable_checkpointing": True},
        strategy=AutomodelStrategy(timeout=0.5),
        accelerator="cpu",
        devices=2,
        callbacks=[fails, ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_last="link")],
        accumulate_grad_batches=ACCUMULATE,
        max_steps=NUM_STEPS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    module = AdamModule(CASE.seed + 2 * attempt)
    trainer.fit(module, batches(), ckpt_path="last")
    end = {
        "weights": full_weights(module.model),
        "from": str(trainer.ckpt_path),
        "attempt": attempt,
        "world_size": dist.get_world_size(),
    }
    torch.save(end, folder / f"end{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
