"""Trains an image classifier on batches `(x, y)`: digits, drawn in fonts that come with matplotlib.

    python examples/classify_images.py

`count="samples"` is all that the strategy needs to know: each image weighs the same, in a short last batch
too. With class weights, return their sum instead (docs/tell_the_count.md). At the end it prints the accuracy
of the best checkpoint on images in fonts that the model has not seen; guessing gives 10 %.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import lightning as L  # noqa: N812
import matplotlib
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_automodel import AutomodelStrategy

SIDE = 20  # pixels
FONTS = ("DejaVu*[!y].ttf", "STIXGeneral*.ttf", "cm[brt]*.ttf")  # matplotlib's fonts that have digits


def draw_digits(fonts: Sequence[Path], copies: int) -> TensorDataset:
    """Draws each digit in each font, at random sizes, places and angles, with noise."""
    drawing = random.Random(0)
    images = []
    labels = []
    for path in fonts:
        for digit in list(range(10)) * copies:
            font = ImageFont.truetype(path, drawing.randint(14, 18))
            centre = [SIDE / 2 + drawing.uniform(-2, 2) for _ in "xy"]
            image = Image.new("L", (SIDE, SIDE))
            ImageDraw.Draw(image).text(centre, str(digit), 255, font, anchor="mm")
            images.append(np.asarray(image.rotate(drawing.uniform(-10, 10))))
            labels.append(digit)
    x = torch.from_numpy(np.stack(images)).unsqueeze(1) / 255  # [n, 1, side, side]
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x + 0.2 * noise, torch.tensor(labels))


class Classifier(L.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Conv2d(1, 16, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        self.network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 3 * 3, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self.network(x), y)
        self.log("accuracy", self.accuracy, prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--copies", type=int, default=10, help="images of each digit in each font (%(default)s)"
    )
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    fonts = [
        font for names in FONTS for font in sorted(Path(matplotlib.get_data_path(), "fonts/ttf").glob(names))
    ]
    unseen = draw_digits(fonts[::5], args.copies)
    train = draw_digits([font for font in fonts if font not in fonts[::5]], args.copies)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutomodelStrategy(count="samples"),
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        logger=False,
        callbacks=[ModelCheckpoint("outputs/classify_images", monitor="accuracy", mode="max")],
    )
    module = Classifier()
    loader = DataLoader(unseen, batch_size=64)
    trainer.fit(module, DataLoader(train, batch_size=16, shuffle=True), loader)
    trainer.test(module, loader, ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        print(f"\n{len(train):,} images to train on, {len(unseen):,} in fonts that the model has not seen")
        print(f"Accuracy on these: {trainer.callback_metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
