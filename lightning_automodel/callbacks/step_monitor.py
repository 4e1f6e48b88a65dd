"""The callback that logs what each optimizer step does and costs."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.expert_parallel import dispatch
from lightning_automodel.gradients.token_loss import StepReport, wide_dtype
from lightning_automodel.internals import lightning as lightning_internals


class StepMonitor(Callback):
    """Logs what the newest optimizer step did and what steps cost, to every logger and the progress bar.

    The values are ``train/`` followed by ``loss``, ``grad_norm``, ``learning_rate``, ``label_tokens``, ``tokens``,
    ``padding``, ``tokens_per_second``, ``tokens_per_second_per_device``, ``data_wait``, ``peak_memory_gib``,
    ``tflops_per_device``, ``peak_flops_share``, ``expert_tokens`` and ``busiest_expert_rank``: docs/watching.md says
    what each is.

    Unknown values are left out: tokens without ``input_ids``, padding without an ``attention_mask`` of the same shape,
    memory on a CPU, the loss and label tokens under other strategies, label tokens with ``per_token_loss=False``,
    expert tokens where none were dispatched.

    Counts, rates and shares cover all steps since the last logged one, without validation, saving and logging.

    Between logged steps nothing is read from the device. A logged step waits for it, and is a collective over all
    ranks: one all-gather of ten numbers. If a rank has failed, the others raise under ``AutomodelStrategy``; under
    other strategies they wait until the timeout of the process group.

    Args:
        every_n_steps: Optimizer steps from one log to the next. None: the Trainer's ``log_every_n_steps``.
        flops: Count floating-point operations: matrix products, convolutions and attention, by ``FlopCounterMode``.
            Recomputed activations count again; kernels that torch does not know do not count. The first micro-batch of
            each shape takes longer.
        peak_flops: The device's dense peak per second, in the dtype that it computes in, for ``peak_flops_share``.
        expert_tokens: Count the tokens that each rank's experts compute under expert parallelism, those of all layers:
            as a mean over ranks, and how many times as many the busiest rank has, for which the others wait.

    Raises:
        ValueError: If ``every_n_steps`` is not positive.

    Attributes:
        history: One dict per logged step: the logged values, ``"step"``, and ``"seconds"``, the time since the previous
            logged step by phase: ``data`` (waiting for batches), ``forward``, ``backward``, ``optimizer``, ``device``,
            ``validation``, ``checkpoint`` (with the wait for the batch after it) and ``logging``. They are this rank's
            times on the host. A GPU runs behind the host: waiting for it is ``device``. In manual optimization
            ``optimizer`` lasts until the next backward.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        flops: bool = False,
        peak_flops: float | None = None,
        expert_tokens: bool = False,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self.history: list[dict[str, Any]] = []
        self._every_n_steps, self._peak_flops = every_n_steps, peak_flops
        self._flops = _FlopMeter(flops)
        self._counts_expert_tokens = expert_tokens
        self._observing = ExitStack()
        self._counted: Tensor | None = None
        self._phase, self._entered_at = "data", 0.0
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._label_tokens: Any = 0  # stays on its device, like `_used_tokens`
        self._tokens: Any = 0  # NaN once a batch has none
        self._used_tokens: Any = 0
        self._operations = 0  # floating-point
        self._expert_tokens = 0

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._entered_at
        self._phase, self._entered_at = phase, now

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = automodel(trainer)
        self._counts_label_tokens = strategy is not None and strategy.describe()["options"]["per_token_loss"]
        if self._counts_expert_tokens:
            self._observing.enter_context(dispatch.observed(self._add_expert_tokens))
        self._logged_step = trainer.global_step
        self._phase, self._entered_at = "data", time.perf_counter()
        self._begin_interval()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = automodel(trainer)
        self._drawn = strategy.seconds_drawing if strategy is not None else 0.0
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
        self._learning_rate = rate.clone() if isinstance(rate, Tensor) else rate  # before a scheduler changes it
        strategy = automodel(trainer)
        report = None if strategy is None else strategy.last_step
        # Unless another optimizer has stepped on the same windows.
        if report is not None and report.num_label_tokens is not self._counted:
            self._counted = report.num_label_tokens
            self._label_tokens = self._label_tokens + self._counted

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = automodel(trainer)
        if strategy is not None:  # batches drawn ahead since this batch's first hook are a wait for data
            drawn = strategy.seconds_drawing - self._drawn
            self._seconds["data"] += drawn
            self._seconds["forward"] -= drawn
        self._count(batch, strategy is not None and strategy.is_filler)
        every, step = self._every_n_steps or trainer.log_every_n_steps, trainer.global_step  # type: ignore[attr-defined]
        if self._steps and every and step // every > self._logged_step // every:
            self._log(trainer, pl_module, step, None if strategy is None else strategy.last_step)
            self._logged_step = step
            self._begin_interval()
        self._enter("data")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flops.stop(is_whole=False)  # of a batch that `on_train_batch_start` has skipped

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._flops.stop(is_whole=False)
        self._observing.close()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._observing.close()

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

    def _add_expert_tokens(self, number: int) -> None:
        # A backward may repeat its forward, and validation is not counted.
        if self._phase == "forward":
            self._expert_tokens += number

    def _count(self, batch: Any, is_filler: bool) -> None:
        """Add the tokens and operations of a micro-batch, unless it is a padding batch."""
        operations = self._flops.stop()
        if is_filler:
            return
        self._operations += operations
        entries = batch if isinstance(batch, Mapping) else {}
        tokens, mask = entries.get("input_ids"), entries.get("attention_mask")
        self._tokens += tokens.numel() if isinstance(tokens, Tensor) else math.nan
        if isinstance(mask, Tensor) and mask.shape == getattr(tokens, "shape", None):
            self._used_tokens = self._used_tokens + torch.count_nonzero(mask)
        else:
            self._used_tokens = math.nan

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int, report: StepReport | None) -> None:
        seconds, strategy, device = self._seconds, trainer.strategy, trainer.strategy.root_device
        module = torch.get_device_module(device)
        self._enter("device")
        module.synchronize()
        self._enter("logging")
        training = sum(seconds[phase] for phase in ("data", "forward", "backward", "optimizer", "device"))
        allocated = getattr(module, "max_memory_allocated", None)
        own = {
            "loss": report.loss if report is not None else math.nan,
            "norm": report.grad_norm if report is not None and report.grad_norm is not None else math.nan,
            "label_tokens": self._label_tokens if self._counts_label_tokens else math.nan,
            "tokens": self._tokens,
            "used": self._used_tokens,
            "seconds": training,
            "data_wait": seconds["data"] / training,
            "memory": allocated(device) / 2**30 if allocated is not None else math.nan,
            "flops": self._operations / training,
            "expert_tokens": self._expert_tokens,
        }
        dtype = wide_dtype(device)
        packed = torch.stack([torch.as_tensor(value, dtype=dtype, device=device) for value in own.values()])
        by_rank = dict(zip(own, strategy.all_gather(packed).reshape(-1, len(own)).T.tolist(), strict=True))
        num_ranks = len(by_rank["tokens"])
        # Tensor-parallel peers hold the same data.
        copies = num_ranks / getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1})["num_replicas"]
        label_tokens = by_rank["label_tokens"][0]
        tokens, used = (sum(by_rank[name]) / copies for name in ("tokens", "used"))
        longest = max(by_rank["seconds"])
        flops = statistics.mean(by_rank["flops"])
        expert_tokens = statistics.mean(by_rank["expert_tokens"]) or math.nan
        values = {
            "train/learning_rate": float(self._learning_rate),
            "train/label_tokens": label_tokens / self._steps,
            "train/tokens_per_second": label_tokens / longest,
            "train/tokens_per_second_per_device": label_tokens / longest / num_ranks,
            "train/tokens": tokens / self._steps,
            "train/padding": 1 - used / tokens if tokens else math.nan,
            "train/data_wait": max(by_rank["data_wait"]),
            "train/peak_memory_gib": max(by_rank["memory"]),
            "train/expert_tokens": expert_tokens / self._steps,
            "train/busiest_expert_rank": max(by_rank["expert_tokens"]) / expert_tokens,
            "train/tflops_per_device": flops / 1e12 if self._flops.is_on else math.nan,
            "train/peak_flops_share": flops / self._peak_flops if self._flops.is_on and self._peak_flops else math.nan,
        }
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        if report is not None:
            values["train/loss"] = by_rank["loss"][0]  # NaN is shown
            if report.grad_norm is not None:
                values["train/grad_norm"] = by_rank["norm"][0]
        # Through `pl_module.log` loggers would get only those that fall on `log_every_n_steps`.
        for logger in trainer.loggers:
            logger.log_metrics(values, lightning_internals.logging_step(trainer))
        for name, value in values.items():
            # On the host, since Lightning reads values of the progress bar in every batch.
            on_bar = name in ("train/loss", "train/grad_norm", "train/tokens_per_second")
            value = torch.tensor(value, dtype=torch.float64)
            pl_module.log(name, value, prog_bar=on_bar, logger=False, on_step=True, on_epoch=False)
        self.history.append({"step": step, **values, "seconds": dict(self._seconds)})


class _FlopMeter:
    """Counts floating-point operations of each shape of batch once, since counting runs each of them through Python."""

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
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            if is_whole:
                self._known[self._key] = counter.get_total_flops()
        return self._known.get(self._key, 0)
