"""The callback that logs what each optimizer step did."""

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_automodel.gradients.token_loss import StepReport
from lightning_automodel.internals import lightning as lightning_internals


class StepMonitor(Callback):
    """Logs what the newest optimizer step did, to every logger and the progress bar.

    The values are ``train/`` followed by ``loss``, ``grad_norm``, ``learning_rate``, ``label_tokens`` and
    ``tokens_per_second``; docs/watching.md explains each, and has Lightning's monitors for memory, samples per
    second and FLOPs.

    Unknown values are left out: all but the learning rate under other strategies, label tokens with
    ``per_token_loss=False``, the norm if nothing asks for it. Values are those of all ranks. Counts and rates
    cover all steps since the last logged one, and all that happened between, as a validation or a save.

    A logged step waits for the device; others read nothing from it. Nothing is communicated.

    Args:
        every_n_steps: Optimizer steps between two logs. None or 0 takes the Trainer's ``log_every_n_steps``.

    Attributes:
        history: One dict per logged step: the logged values and ``"step"``.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.history: list[dict[str, Any]] = []
        self._every_n_steps = every_n_steps
        self._counted: Tensor | None = None  # the count that was added last

    def _begin_interval(self, step: int) -> None:
        self._logged_step = step
        self._steps = 0
        self._label_tokens: Any = 0  # stays on its device
        self._started_at = time.perf_counter()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_interval(trainer.global_step)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._steps += 1
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(rate, Tensor):
            rate = rate.clone()  # before a scheduler changes it
        self._learning_rate = rate
        report = _last_step(trainer)
        # Do not count twice if another optimizer has stepped on the same windows.
        if report is not None and report.num_label_tokens is not self._counted:
            self._counted = report.num_label_tokens
            self._label_tokens = self._label_tokens + self._counted

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        every = self._every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._steps and every and step // every > self._logged_step // every:
            self._log(trainer, step)
            self._begin_interval(step)

    def _log(self, trainer: pl.Trainer, step: int) -> None:
        """Log the values, which waits for the device."""
        values = {"train/learning_rate": float(self._learning_rate)}
        report = _last_step(trainer)
        if report is not None:
            values["train/loss"] = float(report.loss)
            if report.grad_norm is not None:
                values["train/grad_norm"] = float(report.grad_norm)
        label_tokens = float(self._label_tokens)
        if label_tokens:
            values["train/label_tokens"] = label_tokens / self._steps
            values["train/tokens_per_second"] = label_tokens / (time.perf_counter() - self._started_at)
        # Through `pl_module.log` loggers would get only steps that fall on `log_every_n_steps`.
        for logger in trainer.loggers:
            logger.log_metrics(values, lightning_internals.logging_step(trainer))
        # Lightning drops what a rank logs for a padding batch too, but these values are of all ranks.
        trainer.progress_bar_metrics.update(values)
        for name, value in values.items():
            trainer.callback_metrics[name] = torch.tensor(value, dtype=torch.float64)
        self.history.append({"step": step, **values})


def _last_step(trainer: pl.Trainer) -> StepReport | None:
    """The newest step's report; None under strategies other than ``AutomodelStrategy``."""
    report: StepReport | None = getattr(trainer.strategy, "last_step", None)
    return report
