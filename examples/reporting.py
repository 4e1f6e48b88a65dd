"""What the main job prints at its end: losses before and after, the first steps against one process, and a picture."""

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L  # noqa: N812
import matplotlib
from docstrings import DocstringDataset
from one_process import NUM_RANKS, Writer, draw_windows, relative_distance, train, train_alone, whole

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

OURS = "AutomodelStrategy"
DDP = "Lightning DDPStrategy"
COMPARED_STEPS = 3

FirstSteps = dict[str, tuple[float, float]]
"""By strategy, the median gradient error, and the distance of the weights relative to how far they moved."""


class Summary(L.Callback):
    """Prints one line at the start, and at the end the loss on held-back files and where everything is."""

    def __init__(self) -> None:
        self.val_losses: dict[int, float] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started_at = time.perf_counter()
        if trainer.is_global_zero:
            num_parameters = sum(parameter.numel() for parameter in pl_module.parameters())
            print(
                f"Training {num_parameters:,} parameters on {len(trainer.datamodule.train_set):,} functions"
                f" of the standard library: {trainer.world_size} ranks, {type(trainer.strategy).__name__}",
                flush=True,
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.first_step = trainer.global_step  # not 0 in a resumed run

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The validation before training is step 0.
        self.val_losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            num_functions = len(trainer.datamodule.val_set)
            print(f"\n\nLoss on {num_functions} held-back functions, nats a byte")
            for step in sorted({min(self.val_losses), max(self.val_losses)}):
                print(f"  step {step:<4} {self.val_losses[step]:.3f}")
            seconds = time.perf_counter() - self.started_at
            print(f"\nTook {seconds:.0f} s, {trainer.global_step - self.first_step} steps.")
            print(f"Checkpoint: {os.path.relpath(trainer.checkpoint_callback.best_model_path)}")
            print(f"Report:     {Path(trainer.default_root_dir) / 'report.html'}", flush=True)


def compare_first_steps(dataset: DocstringDataset, rank: int) -> FirstSteps:
    """Trains a few steps from the same weights under both strategies and in one process, and prints the distances.

    Every rank must call this, after any other Trainer has ended. Only rank 0 returns the result.
    """
    windows = draw_windows(0, COMPARED_STEPS, len(dataset))
    found = {
        name: train(strategy, Writer(0, COMPARED_STEPS), dataset, windows, rank, measure=True)
        for name, strategy in ((OURS, "automodel"), (DDP, "ddp"))
    }
    if rank != 0:
        return {}
    start = whole(Writer(0, COMPARED_STEPS).parameters())
    truth = train_alone(Writer(0, COMPARED_STEPS), dataset, windows)
    first_steps = {
        name: (median(each.errors), relative_distance(each.weights - start, truth - start))
        for name, each in found.items()
    }
    print("\nThree steps drawn for this comparison, against one process that takes each window as one batch")
    print(f"  {NUM_RANKS} ranks".ljust(25), "gradients off by".rjust(17), "weights off by".rjust(17))
    for name, (gradients, weights) in first_steps.items():
        print(f"  {name:<23} {percent(gradients):>17} {percent(weights):>17}")
    print("  Relative distances, of the weights as a share of how far one process has moved.\n", flush=True)
    return first_steps


def percent(share: float) -> str:
    return f"{share:.0%}" if share > 0.01 else f"{share:.5%}"


def draw_picture(
    history: list[dict[str, Any]], val_losses: dict[int, float], first_steps: FirstSteps, path: Path
) -> None:
    """Draws the loss by step, and beside it how far the first steps are from one process."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=[3, 2])
    steps = [step for step in history if "train/loss" in step]  # none under Lightning's own strategies
    left.plot(
        [step["step"] for step in steps], [step["train/loss"] for step in steps], alpha=0.5, label="training"
    )
    left.plot(list(val_losses), list(val_losses.values()), "o-", label="held-back files")
    left.set(title="Loss", xlabel="optimizer step", ylabel="nats a byte")
    left.legend()
    colors = ["#0072B2", "#D55E00"]
    bars = right.barh(list(first_steps), [gradients for gradients, _ in first_steps.values()], color=colors)
    right.bar_label(bars, [percent(gradients) for gradients, _ in first_steps.values()], padding=4)
    right.set(title=f"Gradient error, {COMPARED_STEPS} compared steps", xscale="log", xlim=(1e-8, 100))
    right.set_xlabel("distance from one process, relative")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"Picture:    {path}")
