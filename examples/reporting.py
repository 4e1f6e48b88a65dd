"""A callback that says what is trained, and lets the model write a docstring at the end."""

import time
from pathlib import Path
from textwrap import indent

import lightning as L  # noqa: N812
from docstring_writer import DocstringWriter
from docstrings import SAMPLE_PROMPT


class Summary(L.Callback):
    """Prints one line at the start and a summary at the end."""

    def __init__(self) -> None:
        self.started_at = time.perf_counter()
        self.val_losses: list[float] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: DocstringWriter) -> None:
        if trainer.is_global_zero:
            num_parameters = sum(parameter.numel() for parameter in pl_module.parameters())
            print(
                f"Training {num_parameters:,} parameters on {len(trainer.datamodule.train_set):,} functions of the"
                f" standard library: {trainer.world_size} ranks, {type(trainer.strategy).__name__}",
                flush=True,
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: DocstringWriter) -> None:
        # Includes the run before training, at step 0.
        self.val_losses.append(float(trainer.callback_metrics["val/loss"]))

    def on_fit_end(self, trainer: L.Trainer, pl_module: DocstringWriter) -> None:
        completion = pl_module.complete(SAMPLE_PROMPT)  # on all ranks
        if trainer.is_global_zero:
            before, after = self.val_losses[0], self.val_losses[-1]
            print(f"\nPrompt:\n{indent(SAMPLE_PROMPT, '    ')}\nDocstring, sampled:\n{indent(completion, '    ')}\n")
            print(f"Validation loss: {before:.3f} -> {after:.3f} nats per byte, {trainer.global_step} steps")
            print(f"Wall time:       {time.perf_counter() - self.started_at:.0f} s after the imports")
            print(f"Checkpoint:      {trainer.checkpoint_callback.best_model_path}")
            print(f"Report:          {Path(trainer.default_root_dir) / 'report.html'}")
