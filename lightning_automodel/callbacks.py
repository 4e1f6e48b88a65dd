"""What a person watches while it trains."""

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_automodel.gradients.token_loss import StepReport


class StepMonitor(Callback):
    """Logs after each optimizer step what it trained on, to the progress bar and the loggers.

    Logged are ``train/loss`` (mean per label token over the window and all ranks: what was optimised),
    ``train/tokens_per_second`` (label tokens of all ranks over the wall time since the step before) and
    ``train/grad_norm`` (before clipping; only where something asks for it, see ``track_grad_norm``). The strategy has
    reduced them already, so nothing is communicated here.

    Args:
        every_n_steps: Log each that many optimizer steps. Logging reads the values on the host, which waits for the
            device; on a GPU, a larger number keeps it busy.

    Raises:
        ValueError: If ``every_n_steps`` is not positive.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self._every_n_steps = every_n_steps
        self._last_report: StepReport | None = None
        self._last_logged_at = 0.0
        self._tokens: Any = 0
        self._steps = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_report = getattr(trainer.strategy, "last_step", None)
        self._last_logged_at = time.perf_counter()
        self._tokens = self._steps = 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        report = getattr(trainer.strategy, "last_step", None)
        if report is None or report is self._last_report:
            return
        self._last_report = report
        self._tokens = self._tokens + report.num_label_tokens
        self._steps += 1
        if self._steps % self._every_n_steps:
            return
        tokens = float(self._tokens)
        now = time.perf_counter()
        values = {"train/loss": report.loss, "train/tokens_per_second": tokens / (now - self._last_logged_at)}
        if report.grad_norm is not None:
            values["train/grad_norm"] = report.grad_norm
        pl_module.log_dict(values, prog_bar=True, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=False)
        self._last_logged_at = now
        self._tokens = 0
