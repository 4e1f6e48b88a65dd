"""One micro-batch, from the batch that a training step gets to the backward whose gradients a window keeps."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.advice import Advice
from lightning_automodel.context_parallel.steps import ContextParallelSteps
from lightning_automodel.data.uneven_inputs import UnevenInputs
from lightning_automodel.gradients.token_loss import Count, WindowTotals, check_range
from lightning_automodel.gradients.windows import GradientWindows
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.sharding import checks
from lightning_automodel.sharding.engine import Engine


@dataclass
class _Step:
    """What the backwards of one training step need of it."""

    batch: Any = None
    count: Count | None = None  # its label tokens, under automatic optimization
    aux_loss: Tensor | None = None  # [] the part of the loss that is not a token loss
    # By toggled optimizer, how many resets there were when the whole batch was counted.
    counted: dict[Optimizer | None, int] = field(default_factory=dict)


class MicroBatches:
    """Runs the training steps and backwards of a fit, one micro-batch after the other."""

    def __init__(
        self,
        module: pl.LightningModule,
        plugin: Precision,
        engine: Engine,
        windows: GradientWindows,
        context: ContextParallelSteps | None,
        inputs: UnevenInputs,
        advice: Advice,
    ) -> None:
        self.module, self.plugin, self.engine, self.windows = module, plugin, engine, windows
        self.context, self.inputs, self.ahead, self.advice = context, inputs, inputs.ahead, advice
        self.weighting = windows.weighting
        self._draws_its_batches = lightning_internals.draws_its_batches(module.training_step)
        self._step = _Step()
        self._ends_window = True

    # --- The forward --------------------------------------------------------------------------------------------------

    def training_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``step``, and count the label tokens of the loss that it returns under automatic optimization."""
        args, attention = self.sliced(args, "training_step")
        batch = args[0] if args else next(iter(kwargs.values()), None)
        self._step = _Step(batch)
        # Only in the first window, since it reads the device.
        if self.ahead is not None and self.windows.last_step is None and not self.inputs.is_filler:
            self.weighting.check_unchanged(batch, self.ahead.count)
        # First of all: a rank whose data has ended waits for it, and not for the buffers that the forward broadcasts.
        self.inputs.check_training_goes_on()
        self.engine.start_forward(batch)  # may broadcast buffers, before `inputs` copies them
        with checks.explained_errors(), self.inputs.training_step(), attention:
            output = step(*args, **kwargs)
        if not self.module.automatic_optimization:
            self.engine.sync.end_step()
        if self.module.automatic_optimization and output is not None:
            self._count(output)
        else:
            self.inputs.end_padding()
        return output

    def sliced(self, args: tuple[Any, ...], step: str) -> tuple[tuple[Any, ...], AbstractContextManager[None]]:
        """A step's arguments, the batch first, and its context. Under context parallelism, the batch is a slice."""
        if self.context is None:
            return args, nullcontext()
        return (self.context.slice(args[0]), *args[1:]), self.context.step(step)

    def _count(self, output: Any) -> None:
        step = self._step
        if self.inputs.is_filler:
            step.count = 0
        elif self.ahead is None:
            step.count = self._checked_count(output)
        else:
            self.weighting.check_returned_count(output, self.ahead.count, reads_device=self.windows.last_step is None)
            step.count = self.ahead.count
        step.aux_loss = self.weighting.aux_loss(output, self.ahead is not None)
        self.advice.about_count(self.module, self.weighting, output)

    def _checked_count(self, output: Any) -> Count:
        if self.context is not None:
            self.context.check_count(self.weighting, self._step.batch, output, "training_step")
        count = self.weighting.count(self._step.batch, output)
        if isinstance(count, Tensor) and self.windows.last_step is None:
            check_range(count.item())  # in the first window, which may read the device
        return count

    @contextmanager
    def communicating(self, is_last: bool) -> Generator[None, None, None]:
        """Context for the forward and backward of one micro-batch; ``is_last``: its backward ends the window."""
        if not is_last and self._draws_its_batches:
            raise ValueError(
                f"accumulate_grad_batches={self.module.trainer.accumulate_grad_batches} does not work with"
                " training_step(dataloader_iter): Lightning zeroes gradients one batch late there, and does not step"
                " the short last window of an epoch. Let the step take the batch, or pass accumulate_grad_batches=1."
            )
        before, self._ends_window = self._ends_window, is_last
        try:
            with checks.explained_errors(), self.engine.sync.micro_batch(is_last):
                yield
        finally:
            self._ends_window = before

    # --- The backward -------------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """See :meth:`AutomodelStrategy.backward`."""
        module, plugin, is_filler = self.module, self.plugin, self.inputs.is_filler
        if optimizer is not None and not self.windows.open_windows:
            self._zero_if_skipped(optimizer)
        count, accumulate = self._take_count(kwargs)
        window = self.windows.open(count * accumulate)
        window.ahead = None if self.ahead is None else self.ahead.totals()
        plugin_loss = plugin.pre_backward(loss, module)
        self.advice.about_half_precision(loss, count)
        if self._step.aux_loss is None:
            self.advice.about_loss(module, self.weighting, loss, count, accumulate)
        is_first_window = self.windows.last_step is None
        if is_first_window:
            self.advice.about_backward_hooks(module, self.windows.divisor, self.ahead is not None)
        reported, objective = self._objective(loss, count, accumulate, window.ahead)
        if self.windows.scaling.scaler is None and plugin_loss is not loss:
            # A plugin may have changed the loss: its own is backpropagated, the user's is reported.
            objective = self._objective(plugin_loss, count, accumulate, window.ahead)[1]
        self._step.aux_loss = None
        if is_filler:
            objective = objective * 0
        # Checkpointed blocks recompute their attention.
        attention = nullcontext() if self.context is None else self.context.backward()
        with (
            checks.explained_errors(),
            self.windows.backward(window, loss, self._ends_window, counts=not is_filler),
            attention,
        ):
            scaled = objective if window.scale is None else objective * window.scale.to(objective.device)
            plugin.backward(scaled, module, optimizer, *args, **kwargs)
            if not is_filler:
                window.add(reported, count)
        if is_first_window and self.windows.last_step is not None:
            self.advice.about_first_window(self.windows.last_step)
        if module.automatic_optimization:
            self.inputs.end_padding()
        with self.engine.sync.showing_shards():
            return plugin.post_backward(loss, module)

    def _objective(
        self, loss: Tensor, count: Count, accumulate: int, ahead: WindowTotals | None
    ) -> tuple[Tensor, Tensor]:
        """[] the sum of token losses behind a loss that was divided by ``accumulate``, and [] what to backpropagate."""
        aux_loss = self._step.aux_loss
        token_loss = loss if aux_loss is None else loss - aux_loss / accumulate
        token_losses = self.weighting.objective(token_loss, count) * accumulate
        if ahead is None:
            return token_losses, token_losses
        denominator = ahead.num_label_tokens if self.weighting.per_token_loss else ahead.num_micro_batches
        objective = token_losses * (self.windows.divisor / denominator if denominator else 0.0)
        if aux_loss is not None:
            objective = objective + aux_loss * (self.windows.divisor / ahead.num_micro_batches)
        return token_losses, objective

    def _take_count(self, kwargs: dict[str, Any]) -> tuple[Count, int]:
        """The label tokens of this backward, and what Lightning has divided its loss by."""
        step = self._step
        if self.module.automatic_optimization and step.count is not None:
            count, step.count = step.count, None
            return count, self.module.trainer.accumulate_grad_batches
        kwargs.pop("optimizer", None)
        if self.inputs.is_filler:
            kwargs.pop("num_label_tokens", None)
            return 0, 1
        given = {"num_label_tokens": kwargs.pop("num_label_tokens")} if "num_label_tokens" in kwargs else None
        if given is None and self.weighting.per_token_loss:
            self._check_not_counted_before()
        return self._checked_count(given), 1

    def _check_not_counted_before(self) -> None:
        """Refuse chunks of a batch that would each weigh as all of it.

        Only warn where both may be of all of it: a GAN's samples, or SAM's with a step or ``zero_grad`` in between.
        """
        key, resets, counted = self.windows.toggled, self.windows.num_resets, self._step.counted
        before, counted[key] = counted.get(key), resets
        counts_samples = self.weighting.unit == "sample"
        if before is None or (counts_samples and before != resets):
            return
        text = (
            f"manual_backward is called again for the same batch, and each loss weighs by all {self.weighting.unit}s of"
            " that batch. For the loss of a chunk, give the chunk's count: self.manual_backward(loss,"
            " num_label_tokens=n)."
        )
        if before == resets and not counts_samples:
            raise ValueError(f"{text} Losses of the whole batch: add them up for one manual_backward, or give counts.")
        self.advice.say_once(f"{text} Losses of the whole batch, as of a GAN, are right as they are.")

    def _zero_if_skipped(self, optimizer: Optimizer) -> None:
        """Zero gradients as Lightning does, which has not if it skipped the window's first batch (None)."""
        trainer = self.module.trainer
        index = trainer.fit_loop.epoch_loop.batch_idx
        if index % trainer.accumulate_grad_batches:
            self.module.optimizer_zero_grad(trainer.current_epoch, index, optimizer)

    def reset(self) -> None:
        """Drop open windows and the data of the current step: an exception was raised, or the run ends."""
        self.windows.reset()
        self._step = _Step()
