"""Trains a small byte transformer with Muon on the matrices of its blocks, sharded over two CPU processes.

    python examples/muon.py
    python examples/muon.py --optimizer-step shards  # every rank gathers each matrix, and computes all of it

Muon orthogonalises whole matrices, and FSDP2 gives each rank a part of each. The strategy knows Muon: each
matrix has one rank as its owner, which steps the whole of it.
"""

import argparse
import logging
import warnings

import lightning as L  # noqa: N812
from docstring_writer import DocstringWriter
from docstrings import DocstringData
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from muon_and_adamw import MuonAndAdamW
from torch.optim.lr_scheduler import LinearLR

from lightning_automodel import AutomodelStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", ".*(LeafSpec|many workers|is not empty|no `val_dataloader`).*")


class MuonWriter(DocstringWriter):
    """Its schedule lowers both learning rates to nothing."""

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [parameter for parameter in self.model.blocks.parameters() if parameter.ndim == 2]
        of_muon = set(matrices)
        others = [parameter for parameter in self.parameters() if parameter not in of_muon]
        muon = {"lr": 0.02, "weight_decay": 0.01}
        optimizer = MuonAndAdamW(matrices, others, muon, adamw={"lr": 5e-3, "betas": (0.9, 0.95)})
        schedule = LinearLR(optimizer, 1.0, 0.0, total_iters=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    args = parse_arguments()
    L.seed_everything(0, verbose=False)
    strategy = AutomodelStrategy(optimizer_step=args.optimizer_step)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        max_steps=args.max_steps,
        max_epochs=1000,  # max_steps decides
        limit_train_batches=args.max_steps * 4,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    writer = MuonWriter(width=64, num_layers=2)
    data = DocstringData()
    [before] = trainer.validate(writer, data, verbose=False)
    trainer.fit(writer, data)
    [described] = strategy.describe()["optimizer_step"]
    [after] = trainer.validate(writer, data, verbose=False)
    if trainer.is_global_zero:
        for parameters, how in zip(("Matrices of blocks", "The rest"), described["groups"], strict=True):
            print(f"{parameters}: {how}")
        print(f"Loss on {len(data.val_set)} held-back functions, nats a byte")
        print(f"  step 0    {before['val/loss']:.3f}")
        print(f"  step {args.max_steps:<4} {after['val/loss']:.3f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-steps", type=int, default=60, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--optimizer-step", choices=["auto", "shards", "whole"], default="auto", help="(%(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
