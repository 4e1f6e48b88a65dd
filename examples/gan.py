"""Trains a GAN by manual optimization: two optimizers, each with accumulation, clipping and a schedule of its own.

    python examples/gan.py
    python examples/gan.py --data-parallel fsdp2     # sharded, for networks that do not fit on one device
    python examples/gan.py --epochs 30 --resume      # goes on from the newest checkpoint

The module is plain Lightning: `count="samples"` tells the strategy that each loss is a mean over the rows of
the batch. Gradients are final when the `manual_backward` with `sync_grad=True` returns. The data is a ring
of radius 1, 0.05 wide. Each epoch ends with points of the generator in a file, and a checkpoint. At the end
it prints the distance of generated points from the centre, and how many of the ring's eight sectors they
reach.
"""

import argparse
from pathlib import Path

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy

FOLDER = Path("outputs/gan")
NOISE = 8  # numbers that the generator makes a point from
ACCUMULATE = 2  # micro-batches of a step


def ring(num_points: int) -> Tensor:
    """Draws points of the ring, [num_points, 2]."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * torch.pi * torch.rand(num_points, generator=generator)
    radius = 1 + 0.05 * torch.randn(num_points, generator=generator)
    return radius[:, None] * torch.stack((angle.cos(), angle.sin()), dim=1)


def network(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Gan(L.LightningModule):
    """Generator and discriminator, each with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = network(NOISE, 2)
        self.discriminator = network(2, 1)

    def setup(self, stage: str) -> None:
        # Otherwise all ranks draw the same noise.
        self.random = torch.Generator().manual_seed(self.global_rank)

    def noise(self, rows: int) -> Tensor:
        return torch.randn(rows, NOISE, generator=self.random).to(self.device)

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        generating, discriminating = self.optimizers()
        fake = self.generator(self.noise(len(real)))
        per_epoch = {
            "batch_size": len(real),
            "on_step": False,
            "on_epoch": True,
            "sync_dist": True,
            "prog_bar": True,
        }

        is_last = (batch_idx + 1) % ACCUMULATE == 0 or self.trainer.is_last_batch

        with discriminating.toggle_model(sync_grad=is_last):
            loss = (
                F.softplus(-self.discriminator(real)).mean()
                + F.softplus(self.discriminator(fake.detach())).mean()
            )
            # Not divided by ACCUMULATE: `sync_grad` makes a window, divided by its rows.
            self.manual_backward(loss)
        self.log("discriminator", loss, **per_epoch)
        if is_last:
            self.step(discriminating)

        with generating.toggle_model(sync_grad=is_last):  # its loss leaves no gradients in the discriminator
            loss = F.softplus(-self.discriminator(fake)).mean()
            self.manual_backward(loss)
        self.log("generator", loss, **per_epoch)
        if is_last:
            self.step(generating)

    def step(self, optimizer: LightningOptimizer) -> None:
        self.clip_gradients(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():
            schedule.step()
        points = self.generator(self.noise(2000))  # on all ranks: each may hold a part of the generator
        if self.trainer.is_global_zero:
            torch.save(points, FOLDER / f"epoch={self.current_epoch}.pt")

    def on_train_end(self) -> None:
        if not self.trainer.is_global_zero:
            return
        points = torch.load(FOLDER / f"epoch={self.trainer.max_epochs - 1}.pt")
        distance = points.norm(dim=1)
        angle = torch.atan2(points[:, 1], points[:, 0])
        share = torch.histc(angle, bins=8, min=-torch.pi, max=torch.pi) / len(points)
        print("\nDistance from the centre: 1.00 +- 0.05 on the ring,", end=" ")
        print(f"{distance.mean():.2f} +- {distance.std():.2f} generated")
        print(f"Sectors with at least 3 % of the points: {int((share >= 0.03).sum())} of 8")

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[LRScheduler]]:
        optimizers = [
            torch.optim.Adam(each.parameters(), 1e-3, betas=(0.5, 0.9)) for each in self.children()
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.97) for each in optimizers]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--data-parallel", default="ddp", choices=["ddp", "fsdp2"], help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Each loss uses a part of the parameters, and DDP wants to know.
    ddp_kwargs = {"find_unused_parameters": True} if args.data_parallel == "ddp" else None
    L.seed_everything(0, workers=True, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutomodelStrategy(data_parallel=args.data_parallel, count="samples", ddp_kwargs=ddp_kwargs),
        max_epochs=args.epochs,
        logger=False,
        callbacks=[ModelCheckpoint(FOLDER, "last", enable_version_counter=False)],
    )
    loader = DataLoader(ring(4096), batch_size=64 // ACCUMULATE, shuffle=True)
    trainer.fit(Gan(), loader, ckpt_path="last" if args.resume else None)


if __name__ == "__main__":
    main()
