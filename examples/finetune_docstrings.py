"""Fine-tunes a small byte transformer to write docstrings, sharded over two CPU processes, in about two minutes.

    python examples/finetune_docstrings.py
    python examples/finetune_docstrings.py --strategy automodel_ddp  # replicated: the same losses
    python examples/finetune_docstrings.py --strategy ddp            # Lightning's own: weighs micro-batches alike

The data comes from the Python standard library of this machine. Its sequences are ragged, so micro-batches and ranks
hold different numbers of label tokens; `AutomodelStrategy` gives the gradient of one big single-process batch anyway.
While it trains, the progress bar shows the loss per label byte, label bytes a second, and the gradient norm. At the end
stand a sample docstring, the validation loss before and after, and the paths of the checkpoint and of the report:
a page with all curves, the time of each phase and the configuration, which any browser shows.
"""

import argparse
import warnings

import lightning as L  # noqa: N812
from docstring_writer import DocstringWriter
from docstrings import DocstringData
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from reporting import Summary

from lightning_automodel import AutomodelStrategy, StepMonitor, TrainingReport

ACCUMULATE = 4  # micro-batches of each rank in a window
NUM_VALIDATIONS = 5  # besides the one before training

# Encoding a few hundred bytes takes no time beside training on them.
warnings.filterwarnings("ignore", ".*does not have many workers.*")


def main() -> None:
    args = parse_arguments()
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=AutomodelStrategy() if args.strategy == "automodel" else args.strategy,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        max_steps=args.max_steps,
        max_epochs=1000,  # max_steps decides; without a number here the progress bar takes steps for batches
        num_sanity_val_steps=-1,  # the whole validation set, for the loss before training
        val_check_interval=max(1, args.max_steps // NUM_VALIDATIONS) * ACCUMULATE,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        default_root_dir=args.output_dir,
        logger=CSVLogger(args.output_dir, name="logs"),
        callbacks=[
            StepMonitor(),
            TrainingReport(),
            Summary(),
            ModelCheckpoint(save_on_train_epoch_end=True),
            TQDMProgressBar(refresh_rate=ACCUMULATE),
        ],
        enable_model_summary=False,
    )
    trainer.fit(DocstringWriter(), DocstringData(cache_dir=args.output_dir))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="automodel", help="name of any Lightning strategy (%(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="CPU processes (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=200, help="optimizer steps (%(default)s)")
    parser.add_argument("--output-dir", default="outputs/finetune_docstrings", help="(%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
