"""The callback that logs what each optimizer step does and costs."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_automodel.callbacks.running_strategy import automodel, options_of
from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.gradients.token_loss import StepReport, wide_dtype
from lightning_automodel.internals import lightning as lightning_internals


class StepMonitor(Callback):
    """Logs what the newest optimizer step did and what steps cost, to every logger and the progress bar.

    The values are ``train/`` followed by ``loss``, ``grad_norm``, ``learning_rate``, ``label_tokens``,
    ``tokens``, ``padding``, ``tokens_per_second``, ``tokens_per_second_per_device``, ``data_wait``,
    ``peak_memory_gib``, ``tflops_per_device`` and ``peak_flops_share``; docs/watching.md explains
    each.

    Unknown values are left out: tokens without ``input_ids``, padding without an ``attention_mask`` of the
    same shape, memory on a CPU, the loss and label tokens under other strategies, label tokens with
    ``per_token_loss=False``.

    Counts, rates and shares cover all steps since the last logged one, without validation, saving and
    logging.

    Between logged steps nothing is read from the device. A logged step waits for the device, and is a
    collective over all ranks: one all-gather of nine numbers. If a rank has failed, the others raise under
    ``AutomodelStrategy``; under other strategies they wait until the timeout of the process group.

    Args:
        every_n_steps: Optimizer steps between two logs. None takes the Trainer's ``log_every_n_steps``.
        flops: Whether to count floating-point operations of matrix products, convolutions and attention,
            with ``FlopCounterMode``. Recomputed activations count again; kernels that torch does not know do
            not count. The first micro-batch of each shape takes longer.
        peak_flops: The device's dense peak per second, in the dtype that it computes in, for
            ``peak_flops_share``.

    Raises:
        ValueError: If ``every_n_steps`` is not positive.

    Attributes:
        history: One dict per logged step: the logged values, ``"step"``, and ``"seconds"``, the time since
            the previous logged step by phase: ``data`` (waiting for batches), ``forward``, ``backward``,
            ``optimizer``, ``device``, ``validation``, ``checkpoint`` (with the wait for the batch after it)
            and ``logging``. They are this rank's times on the host. A GPU runs behind the host; ``device``
            is the wait for it. In manual optimization ``optimizer`` lasts until the next backward.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        flops: bool = False,
        peak_flops: float | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self.history: list[dict[str, Any]] = []
        self._every_n_steps = every_n_steps
        self._peak_flops = peak_flops
        self._flops = _FlopMeter(flops)
        self._counted: Tensor | None = None
        self._phase = "data"
        self._entered_at = 0.0
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._label_tokens: Any = 0  # stays on its device, like `_used_tokens`
        self._tokens: Any = 0  # NaN once a batch has no `input_ids`
        self._used_tokens: Any = 0
        self._operations = 0  # floating-point operations

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._entered_at
        self._phase = phase
        self._entered_at = now

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._counts_label_tokens = options_of(trainer).get("per_token_loss", False)
        self._logged_step = trainer.global_step
        self._phase = "data"
        self._entered_at = time.perf_counter()
        self._begin_interval()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = automodel(trainer)
        if strategy is not None:
            self._drawn = strategy.seconds_drawing
        else:
            self._drawn = 0.0
        self._enter("forward")
        self._flops.start(pl_module, batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._enter("backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._enter("forward")
        if pl_module.automatic_optimization:
            self._flops.stop()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._enter("optimizer")
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
        strategy = automodel(trainer)
        if strategy is not None:  # drawing batches ahead since this batch's first hook is a wait for data
            drawn = strategy.seconds_drawing - self._drawn
            self._seconds["data"] += drawn
            self._seconds["forward"] -= drawn
        self._count(batch, strategy is not None and strategy.is_filler)
        step = trainer.global_step
        every = self._every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._steps and every and step // every > self._logged_step // every:
            self._log(trainer, pl_module, step)
            self._logged_step = step
            self._begin_interval()
        self._enter("data")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flops.stop(is_whole=False)  # of a batch that an `on_train_batch_start` has skipped

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._flops.stop(is_whole=False)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._enter("validation")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._enter("data")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._enter("checkpoint")

    def _count(self, batch: Any, is_filler: bool) -> None:
        """Add the tokens and operations of a micro-batch, unless it is a padding batch."""
        operations = self._flops.stop()
        if is_filler:
            return
        self._operations += operations
        entries: Mapping[Any, Any] = {}
        if isinstance(batch, Mapping):
            entries = batch
        tokens = entries.get("input_ids")
        mask = entries.get("attention_mask")
        self._tokens += tokens.numel() if isinstance(tokens, Tensor) else math.nan
        if isinstance(mask, Tensor) and mask.shape == getattr(tokens, "shape", None):
            self._used_tokens = self._used_tokens + torch.count_nonzero(mask)
        else:
            self._used_tokens = math.nan

    def _values_by_rank(self, trainer: pl.Trainer) -> dict[str, list[float]]:
        """The values of each rank since the last logged step. Waits for the device. A collective."""
        strategy = trainer.strategy
        device = strategy.root_device
        module = torch.get_device_module(device)
        self._enter("device")
        module.synchronize()
        self._enter("logging")
        phases = ("data", "forward", "backward", "optimizer", "device")
        training = sum(self._seconds[phase] for phase in phases)
        values = {
            "loss": math.nan,
            "norm": math.nan,
            "label_tokens": math.nan,
            "tokens": self._tokens,
            "used": self._used_tokens,
            "seconds": training,
            "data_wait": self._seconds["data"] / training,
            "memory": math.nan,
            "flops": self._operations / training,
        }
        report = _last_step(trainer)
        if report is not None:
            values["loss"] = report.loss
            if report.grad_norm is not None:
                values["norm"] = report.grad_norm
        if self._counts_label_tokens:
            values["label_tokens"] = self._label_tokens
        if hasattr(module, "max_memory_allocated"):
            values["memory"] = module.max_memory_allocated(device) / 2**30
        dtype = wide_dtype(device)
        packed = torch.stack(
            [torch.as_tensor(value, dtype=dtype, device=device) for value in values.values()]
        )
        gathered = strategy.all_gather(packed).reshape(-1, len(values)).T.tolist()
        return dict(zip(values, gathered, strict=True))

    def _values(self, trainer: pl.Trainer) -> dict[str, float]:
        """The values to log. A collective."""
        by_rank = self._values_by_rank(trainer)
        num_ranks = len(by_rank["tokens"])
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1})
        copies = num_ranks / sampler["num_replicas"]  # tensor-parallel peers hold the same data
        label_tokens = by_rank["label_tokens"][0]
        tokens = sum(by_rank["tokens"]) / copies
        longest = max(by_rank["seconds"])
        flops = statistics.mean(by_rank["flops"])
        values = {
            "train/learning_rate": float(self._learning_rate),
            "train/label_tokens": label_tokens / self._steps,
            "train/tokens_per_second": label_tokens / longest,
            "train/tokens_per_second_per_device": label_tokens / longest / num_ranks,
            "train/tokens": tokens / self._steps,
            "train/padding": math.nan,
            "train/data_wait": max(by_rank["data_wait"]),
            "train/peak_memory_gib": max(by_rank["memory"]),
        }
        if tokens:
            values["train/padding"] = 1 - sum(by_rank["used"]) / copies / tokens
        if self._flops.is_on:
            values["train/tflops_per_device"] = flops / 1e12
            if self._peak_flops:
                values["train/peak_flops_share"] = flops / self._peak_flops
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        report = _last_step(trainer)
        if report is not None:
            values["train/loss"] = by_rank["loss"][0]  # NaN is shown
            if report.grad_norm is not None:
                values["train/grad_norm"] = by_rank["norm"][0]
        return values

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> None:
        values = self._values(trainer)
        # Through `pl_module.log` loggers would get only steps that fall on `log_every_n_steps`.
        for logger in trainer.loggers:
            logger.log_metrics(values, lightning_internals.logging_step(trainer))
        for name, value in values.items():
            # A tensor on the host, since Lightning reads values of the progress bar in every batch.
            on_bar = name in ("train/loss", "train/grad_norm", "train/tokens_per_second")
            on_host = torch.tensor(value, dtype=torch.float64)
            pl_module.log(name, on_host, prog_bar=on_bar, logger=False, on_step=True, on_epoch=False)
        self.history.append({"step": step, **values, "seconds": dict(self._seconds)})


def _last_step(trainer: pl.Trainer) -> StepReport | None:
    """The newest step's report; None under strategies other than ``AutomodelStrategy``."""
    strategy = automodel(trainer)
    if strategy is None:
        return None
    return strategy.last_step


class _FlopMeter:
    """Counts the floating-point operations of each shape of batch once, since counting slows each of them down."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._known: dict[Any, int] = {}
        self._key: Any = None
        self._counter: FlopCounterMode | None = None

    def start(self, module: pl.LightningModule, batch: Any) -> None:
        """Begin a micro-batch."""
        if not self.is_on:
            return
        shapes = [tensor.shape for tensor in tensors_in(batch)]
        # Frozen parameters make a backward cheaper, so their number is part of the key.
        self._key = (*shapes, sum(parameter.requires_grad for parameter in module.parameters()))
        if self._key not in self._known:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def stop(self, is_whole: bool = True) -> int:
        """End the micro-batch and return its operations on this rank, 0 if off. Calling it again is harmless."""
        if self._counter is not None:
            counter = self._counter
            self._counter = None
            counter.__exit__(None, None, None)
            if is_whole:
                self._known[self._key] = counter.get_total_flops()
        return self._known.get(self._key, 0)
