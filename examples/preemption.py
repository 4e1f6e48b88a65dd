"""A job that may be stopped at any time, and resumes bit for bit when its command runs again.

    python examples/preemption.py --preempt-at 12  # plays the scheduler: SIGTERM to one rank after 12 steps
    python examples/preemption.py                  # the same job again: it resumes from the newest checkpoint
    python examples/preemption.py --output-dir outputs/undisturbed  # for comparison: the same weights

SIGTERM to any rank stops all ranks after the same step, a moment later. They save nothing then:
`ModelCheckpoint` has saved every fifth step. `ckpt_path="last"` finds the newest checkpoint, if there is
one. At the end it prints a checksum of the weights.
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import lightning as L  # noqa: N812
from docstring_writer import DocstringWriter
from docstrings import DocstringData
from lightning.pytorch.callbacks import ModelCheckpoint
from one_process import whole

from lightning_automodel import AutomodelStrategy


class Scheduler(L.Callback):
    """Sends SIGTERM to the last rank after a step, and prints where training began and the weights' checksum."""

    def __init__(self, preempt_at: int | None) -> None:
        self.preempt_at = preempt_at

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"Training starts after step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.global_step == self.preempt_at and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = whole(pl_module.parameters())  # gathers shards: a collective
        if trainer.is_global_zero:
            checksum = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
            print(f"Weights after step {trainer.global_step}: {checksum}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preempt-at", type=int, metavar="STEP", help="stop after this step, by SIGTERM")
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/preemption"))
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutomodelStrategy(),
        accumulate_grad_batches=2,
        max_steps=args.max_steps,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(args.output_dir, "last", every_n_train_steps=5, enable_version_counter=False),
            Scheduler(args.preempt_at),
        ],
    )
    data = DocstringData()
    trainer.fit(DocstringWriter(width=32, num_layers=2), data, ckpt_path="last")


if __name__ == "__main__":
    main()
