"""A callback that says what is trained, draws the loss, and lets the model write a docstring at the end."""

import time
from pathlib import Path
from textwrap import indent

import lightning as L  # noqa: N812
import matplotlib
from docstring_writer import DocstringWriter
from docstrings import SAMPLE_PROMPT

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt


class Report(L.Callback):
    """Prints one line at the start and a summary at the end, and saves `loss.png` in the Trainer's `default_root_dir`.

    Give it to the Trainer after `StepMonitor`, which logs the training loss that it reads.
    """

    def __init__(self) -> None:
        self.started_at = time.perf_counter()
        self.train_losses: dict[int, float] = {}
        self.val_losses: dict[int, float] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: DocstringWriter) -> None:
        if trainer.is_global_zero:
            num_parameters = sum(parameter.numel() for parameter in pl_module.parameters())
            print(
                f"Training {num_parameters:,} parameters on {len(trainer.datamodule.train_set):,} functions of the"
                f" standard library: {trainer.world_size} ranks, {type(trainer.strategy).__name__}",
                flush=True,
            )

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        # A Lightning strategy without a StepMonitor report has no token-weighted training loss, hence no such curve.
        if "train/loss" in trainer.callback_metrics and trainer.global_step not in self.train_losses:
            self.train_losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])

    def on_validation_end(self, trainer: L.Trainer, pl_module: DocstringWriter) -> None:
        # Includes the run before training, at step 0.
        self.val_losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])

    def on_fit_end(self, trainer: L.Trainer, pl_module: DocstringWriter) -> None:
        completion = pl_module.complete(SAMPLE_PROMPT)  # on all ranks
        if trainer.is_global_zero:
            figure = Path(trainer.default_root_dir) / "loss.png"
            plot_losses(self.train_losses, self.val_losses, figure)
            losses = list(self.val_losses.values())
            print(f"\nPrompt:\n{indent(SAMPLE_PROMPT, '    ')}\nDocstring, sampled:\n{indent(completion, '    ')}\n")
            print(f"Validation loss: {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte, {trainer.global_step} steps")
            print(f"Wall time:       {time.perf_counter() - self.started_at:.0f} s after the imports")
            print(f"Checkpoint:      {trainer.checkpoint_callback.best_model_path}")
            print(f"Loss curve:      {figure}")


def plot_losses(train_losses: dict[int, float], val_losses: dict[int, float], path: Path) -> None:
    """Draws both losses over the optimizer step.

    Args:
        train_losses: By optimizer step, mean over the label bytes of its whole window, all ranks.
        val_losses: By optimizer step, mean over the label bytes of the validation set.
        path: Of the PNG.
    """
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if train_losses:
        axes.plot(train_losses.keys(), train_losses.values(), linewidth=0.8, label="training, each optimizer step")
    axes.plot(val_losses.keys(), val_losses.values(), "o", label="validation, held-back files")
    axes.set(
        title="Writing docstrings of the Python standard library",
        xlabel="optimizer step",
        ylabel="loss (nats per byte, token-weighted)",
        xlim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
