"""Trains a small byte transformer to write docstrings, sharded over two CPU processes, in under two minutes.

    python examples/finetune_docstrings.py
    python examples/finetune_docstrings.py --strategy automodel_ddp  # replicated: the same losses
    python examples/finetune_docstrings.py --ckpt-path outputs/finetune_docstrings/step=60.ckpt  # resumes
    python examples/finetune_docstrings.py --strategy ddp --check --max-steps 4  # one batch's gradients?

The data is the Python standard library of this machine: a function is the prompt, its docstring has the
labels. Lengths differ, so micro-batches and ranks hold different numbers of label tokens. At the end the run
prints the loss on held-back files before and after training, and how far the first steps under this strategy
and under Lightning's DDP are from one process that takes each window as one batch. It saves checkpoints, a
report with all curves, and a picture.
"""

import argparse
import logging
import warnings
from pathlib import Path

import lightning as L  # noqa: N812
from docstring_writer import DocstringWriter
from docstrings import DocstringData
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from one_process import ACCUMULATE, NUM_RANKS
from reporting import Summary, compare_first_steps, draw_picture

from lightning_automodel import AutomodelStrategy, ExactnessCheck, StepMonitor, TrainingReport

# The progress bar and the tables say it all. Encoding a few hundred bytes needs no workers.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", ".*(LeafSpec|many workers|is not empty|no `val_dataloader`).*")


def main() -> None:
    args = parse_arguments()
    L.seed_everything(0, verbose=False)
    monitor = StepMonitor()
    summary = Summary()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=AutomodelStrategy() if args.strategy == "automodel" else args.strategy,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        max_steps=args.max_steps,
        max_epochs=1000,  # max_steps decides
        limit_train_batches=args.max_steps * ACCUMULATE,  # for the end of the progress bar
        num_sanity_val_steps=-1,  # the whole validation set, for the loss before training
        val_check_interval=max(1, args.max_steps // 4) * ACCUMULATE,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        default_root_dir=args.output_dir,
        logger=False,
        callbacks=[
            monitor,
            summary,
            TrainingReport(),
            # One after each validation.
            ModelCheckpoint(args.output_dir, "{step}", save_top_k=-1, enable_version_counter=False),
            TQDMProgressBar(refresh_rate=ACCUMULATE),
            *([ExactnessCheck()] if args.check else []),
        ],
        enable_model_summary=False,
    )
    data = DocstringData()
    trainer.fit(DocstringWriter(), data, ckpt_path=args.ckpt_path)
    first_steps = compare_first_steps(data.train_set, trainer.global_rank)
    if trainer.is_global_zero:
        draw_picture(monitor.history, summary.val_losses, first_steps, args.output_dir / "picture.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategy", default="automodel", help="name of any Lightning strategy (%(default)s)"
    )
    parser.add_argument(
        "--max-steps", type=int, default=120, help="optimizer steps, a multiple of 4 (%(default)s)"
    )
    parser.add_argument("--ckpt-path", help="checkpoint to resume from")
    parser.add_argument("--check", action="store_true", help="compare the first steps with one batch")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs/finetune_docstrings"), help="(%(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
