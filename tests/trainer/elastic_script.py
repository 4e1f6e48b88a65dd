"""What `torchrun --max-restarts` runs: it saves each step and goes on from the newest; first, one rank is killed."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_automodel import AutomodelStrategy
from tests.trainer.checkpoints import ACCUMULATE, AdamModule, batches
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, SILENT

NUM_STEPS = 8


class DiesOnce(Callback):
    """SIGKILL of a random rank in a random micro-batch, in the first attempt alone."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.victim, self.batch = (
            generator.randrange(2),
            generator.randrange(ACCUMULATE + 1, ACCUMULATE * NUM_STEPS - 1),
        )

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if is_first_attempt and trainer.global_rank == self.victim and batch == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, seed: int, options: dict[str, Any]) -> None:
    """Train to the end, from wherever the newest checkpoint is, with other weights in memory."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    callbacks = [DiesOnce(seed), ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_last="link")]
    trainer = Trainer(
        **{**SILENT, "enable_checkpointing": True},
        strategy=AutomodelStrategy(timeout=0.5, **options),
        accelerator="cpu",
        devices=2,
        callbacks=callbacks,
        accumulate_grad_batches=ACCUMULATE,
        max_steps=NUM_STEPS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    module = AdamModule(CASE.seed + 2 * attempt)
    trainer.fit(module, batches(), ckpt_path="last")
    weights = full_weights(module.model)
    torch.save(
        {"weights": weights, "attempt": attempt, "from": str(trainer.ckpt_path)},
        folder / f"end{trainer.global_rank}.pt",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), {"async_checkpoint": sys.argv[3] == "in_background"})
