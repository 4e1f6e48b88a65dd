"""One micro-batch, from the batch that a training step gets to the backward whose gradients a window keeps."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.advice import Advice, BackwardHooks, stop_iteration_error
from lightning_automodel.context_parallel.steps import ContextParallelSteps
from lightning_automodel.data.uneven_inputs import UnevenInputs
from lightning_automodel.gradients.engine import Engine
from lightning_automodel.gradients.loss_weights import FirstLooks
from lightning_automodel.gradients.rank_agreement import Position
from lightning_automodel.gradients.token_loss import Count, check_range, has_count, sums_of
from lightning_automodel.gradients.window_records import Window
from lightning_automodel.gradients.windows import GradientWindows
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.sharding.buffers import SharedBuffers
from lightning_automodel.sharding.replicas import check_gradients_of_peers
from lightning_automodel.sharding.tensor_parallel import check_same_batch

NESTED_BACKWARD = (
    "manual_backward was called within a backward of the strategy, by a hook of autograd. Call"
    " loss.backward() there: what it computes from the gradients that the hook is given is already"
    " weighed, and joins the backward that runs."
)
"""Why a backward of the strategy is refused within another one."""

SECOND_BACKWARD = (
    "LightningModule.backward runs a second backward, after that of its loss, with which gradients were"
    " final. Add up what is backpropagated, for one loss.backward(). For gradients that shall train"
    " nothing, call torch.autograd.grad(loss, inputs)."
)
"""Why a module's own ``backward`` must not run another one."""

NO_BACKWARD = (
    "LightningModule.backward has run no backward, or one that reaches no trained parameter of the module,"
    " while other ranks may wait for gradients in theirs. For a micro-batch that shall train nothing,"
    " backpropagate loss * 0. What torch.autograd.grad(loss, parameters) returns is neither accumulated"
    " nor averaged over ranks: run loss.backward(), and edit .grad after it. Make a tensor that is trained"
    " an nn.Parameter."
)
"""Why a module's own ``backward`` must run one."""


@dataclass
class _Step:
    """What the backwards of one training step need of it."""

    # The batch that the step was given.
    batch: Any = None
    # Whether it is a padding batch, which has no label tokens.
    is_padding: bool = False
    # Whether it began in the first window of this run, also of a run that was resumed: slower checks run.
    is_first: bool = False
    # What the step has returned, under automatic optimization, until its backward.
    output: Any = None
    # The number of resets when the whole batch was counted, for each toggled optimizer.
    counted: dict[Optimizer | None, int] = field(default_factory=dict)


class MicroBatches:
    """Runs the training steps and backwards of a fit, one micro-batch after the other.

    Attributes:
        module: The user's, whose steps and backwards run.
        plugin: The Trainer's precision plugin, which runs the backward.
        engine: Distributes the module, and reduces gradients.
        buffers: What ranks take from the first one where a window begins; None if nothing.
        windows: The open accumulation windows, to which each backward adds.
        context: Slices batches under context parallelism; else None.
        inputs: Knows whether a batch is a padding batch, and with ``count_window_ahead`` what its window counts.
        advice: Says what the first micro-batches show.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        engine: Engine,
        buffers: SharedBuffers | None,
        windows: GradientWindows,
        context: ContextParallelSteps | None,
        inputs: UnevenInputs,
        advice: Advice,
    ) -> None:
        self.module = module
        self.plugin = module.trainer.precision_plugin
        self.engine = engine
        self.buffers = buffers
        self.windows = windows
        self.context = context
        self.inputs = inputs
        self.advice = advice
        # Checkpointed blocks compute their attention again in the backward.
        self._recomputing: Callable[[], AbstractContextManager[None]] = (
            nullcontext if context is None else context.backward
        )
        self._draws_its_batches = lightning_internals.draws_its_batches(module.training_step)
        self._has_hooks_before_backward = lightning_internals.has_hooks_before_backward(module.trainer)
        self._looks = FirstLooks(module, windows.weighting)
        self._backward_hooks = BackwardHooks(
            module, windows.divisor, inputs.ahead is not None, advice.say_once
        )
        # The step whose backwards run.
        self._step = _Step()

    # --- The forward --------------------------------------------------------------------------------------------------

    def training_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``step``. What it returns under automatic optimization is counted in its backward."""
        args, attention = self.sliced(args, "training_step")
        if args:
            batch = args[0]
        else:
            batch = next(iter(kwargs.values()), None)
        self._step = _Step(batch, self.inputs.is_filler, is_first=self.windows.is_first)
        if self._step.is_first:
            self._start_first_window(batch)
        if self.buffers is not None:
            self.buffers.start_forward(self.engine.ends_window)  # before `inputs` copies them
        self.engine.start_forward()

        def attending_step() -> Any:
            with attention, self._backward_hooks.noting():
                return step(*args, **kwargs)

        output = self.call(partial(self.inputs.train, attending_step), "training_step")
        if not self.module.automatic_optimization or output is None:
            self.engine.end_step()
            self.inputs.end_padding()
            return output
        if self._has_hooks_before_backward:  # else nobody would find the shards, which take time to show
            self.engine.end_forward()
        self._step.output = output
        return output

    def _start_first_window(self, batch: Any) -> None:
        """Look closer at a batch of the first window: some of it reads the device."""
        windows = self.windows
        # Before backwards in the step that are not the strategy's.
        with plain_access():
            self.engine.track({p for p in windows.parameters if p.requires_grad})
        if windows.mesh.tensor_group is not None:
            check_same_batch(batch, windows.mesh.tensor_group, "tensor-parallel")
        if self.inputs.ahead is not None and not self._step.is_padding:
            windows.weighting.check_counted_ahead(batch, None, self.inputs.ahead.count, reads_device=True)

    def sliced(
        self, args: tuple[Any, ...], step: str
    ) -> tuple[tuple[Any, ...], AbstractContextManager[None]]:
        """A step's arguments, the batch first, and its context. Under context parallelism, the batch is a slice."""
        if self.context is None:
            return args, nullcontext()
        return (self.context.slice(args[0]), *args[1:]), self.context.step(step)

    def call(self, step: Callable[[], Any], name: str) -> Any:
        """Run a step of the module. RuntimeError for StopIteration, which Lightning takes for the end of the data.

        In a run of one rank, and of a step that draws its batches itself, a StopIteration may mean that.
        """
        try:
            return step()
        except StopIteration as error:
            is_alone = self.windows.mesh.mesh.size() == 1
            if is_alone or lightning_internals.draws_its_batches(getattr(self.module, name)):
                raise
            raise stop_iteration_error(name) from error

    def before_the_last(self) -> AbstractContextManager[None]:
        """Context for the forward and backward of a window's micro-batch that another one follows."""
        if self._draws_its_batches:
            raise ValueError(
                f"accumulate_grad_batches={self.module.trainer.accumulate_grad_batches} does not work with"
                " training_step(dataloader_iter): Lightning zeroes gradients one batch late there, and does"
                " not step the short last window of an epoch. Let the step take the batch, or pass"
                " accumulate_grad_batches=1."
            )
        return self.engine.micro_batch(ends_window=False)

    # --- The backward -------------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """See :meth:`AutomodelStrategy.backward`. When the last backward of a window returns, ``.grad`` is final."""
        engine = self.engine
        if engine.backward is not None:
            raise RuntimeError(NESTED_BACKWARD)
        if loss.numel() != 1:
            raise ValueError(
                f"The loss of a backward has the shape {list(loss.shape)}, but must be one number: pass"
                " (loss * weights).sum(), with num_label_tokens=<what it is divided by> if it is a mean."
            )
        windows = self.windows
        if optimizer is not None and not windows.open_windows:
            self._zero_if_skipped(optimizer)
        window, objective = self._weigh(loss, kwargs)
        try:
            with plain_access():
                backward = windows.set_aside(window, engine.ends_window, self._step.is_padding)
            engine.begin(backward, loss)
            if objective.requires_grad:
                torch_internals.when_backward_ends(objective, self._end_backward)
            with self._recomputing():
                self.plugin.backward(objective, self.module, optimizer, *args, **kwargs)
            if engine.backward is not None:
                self._end_backward()  # the module's own `backward` may have run one of another loss
            if engine.backward is not None:
                raise RuntimeError(NO_BACKWARD)
            if engine.reached:
                raise RuntimeError(SECOND_BACKWARD)
        except BaseException as error:
            windows.abandon(error)
            raise
        is_first_window_over = self._step.is_first and backward.ends
        report = windows.last_step
        if is_first_window_over and report is not None:
            advice = self._looks.advice_after(report, backward.window.num_micro_batches)
            self.advice.say_once(advice, warnings.warn)
        if backward.is_padding and self.module.automatic_optimization:
            self.inputs.end_padding()
        try:
            loss = self.plugin.post_backward(loss, self.module)  # the hooks, which find shards
        finally:
            if not self.module.automatic_optimization:
                engine.resume_step()
        if is_first_window_over:
            check_gradients_of_peers(self.module, windows.mesh, windows.device)
        return loss

    def _weigh(self, loss: Tensor, kwargs: dict[str, Any]) -> tuple[Window, Tensor]:
        """Add a loss to its window. Returns that, and [] what to backpropagate for the loss."""
        windows = self.windows
        # S, n: the loss becomes the sum of its token losses.
        count, divided_by, aux_loss = self._take_count(kwargs)
        token_losses = windows.weighting.objective(loss, count, divided_by, aux_loss)
        sums = sums_of(token_losses, count)
        plugin_loss = self.plugin.pre_backward(loss, self.module)
        # The plugin's loss is backpropagated; the user's is reported.
        if plugin_loss is not loss and windows.scaling.scaler is None:
            token_losses = windows.weighting.objective(plugin_loss, count, divided_by, aux_loss)
        if self._looks.left or self._step.is_first:
            self.advice.about_half_precision(loss)
            if self.context is not None:
                self.advice.say_once(self.context.about_padding(loss), warnings.warn)
            if aux_loss is None:
                # On whatever rank sees it: another one may count as much in each micro-batch.
                self.advice.say_once(self._looks.advice(loss, count, divided_by), warnings.warn)
        windows.check_foreign()  # a hook may have run a backward, too
        window = windows.open(
            count, divided_by, None if self.inputs.ahead is None else self.inputs.ahead.totals()
        )
        objective = windows.weigh(window, token_losses, aux_loss)
        if self._step.is_padding:
            return window, objective * 0
        window.sums += sums.to(window.sums.device)
        window.num_micro_batches += 1
        return window, objective

    def _end_backward(self) -> None:
        """End the backward: ``.grad`` is then final if the window ends with it, else what it was before the backward.

        Called by autograd. What has run may be ``torch.autograd.grad``, which accumulates nothing.
        """
        windows = self.windows
        engine = self.engine
        backward = engine.backward
        if backward is None or not engine.reached:
            return
        reached = engine.reduce(backward)
        if not backward.is_padding:
            backward.window.used |= reached
        engine.keep(backward)
        with plain_access():
            if backward.ends:
                # Now `.grad` of `backward.final` holds the sum of S over ranks, divided by D: times D / N.
                trainer = self.module.trainer
                batch = trainer.fit_loop.epoch_loop.batch_idx
                own = Position(trainer.current_epoch, batch, self.inputs.order, engine.unit_order)
                windows.finish(backward, own)
            if windows.on_backward is not None:
                windows.on_backward(backward)
            windows.put_back(backward)

    def _take_count(self, kwargs: dict[str, Any]) -> tuple[Count, int, Tensor | None]:
        """The label tokens of this backward, what Lightning has divided its loss by, and [] the auxiliary loss in it.

        Removes from ``kwargs`` what ``manual_backward`` was given for the strategy.
        """
        weighting = self.windows.weighting
        ahead = self.inputs.ahead
        is_padding = self._step.is_padding
        output = self._step.output
        self._step.output = None
        divided_by = 1
        aux_loss = None
        if output is not None:
            divided_by = self.module.trainer.accumulate_grad_batches
            aux_loss = weighting.aux_loss(output, ahead is not None)
            if self._looks.left:
                self.advice.about_count(self.module, weighting, output)
        else:
            kwargs.pop("optimizer", None)
            if "num_label_tokens" in kwargs:
                output = {"num_label_tokens": kwargs.pop("num_label_tokens")}
            elif weighting.per_token_loss and not is_padding:
                self._check_not_counted_before()
        if is_padding:
            return 0, divided_by, aux_loss
        is_first = self._step.is_first
        if ahead is not None:
            if has_count(output):
                weighting.check_counted_ahead(self._step.batch, output, ahead.count, reads_device=is_first)
            return ahead.count, divided_by, aux_loss
        if self.context is not None:
            self.context.check_count(output)
        count = weighting.count(self._step.batch, output)
        if isinstance(count, Tensor) and is_first:
            check_range(count.item())
        return count, divided_by, aux_loss

    def _check_not_counted_before(self) -> None:
        """Refuse chunks of a batch that would each weigh as all of it.

        Only warn where both may be of all of it: a GAN's samples, or SAM's with a step or ``zero_grad`` in
        between, which minibatches have too.
        """
        key = self.windows.toggled
        resets = self.windows.num_resets
        counted = self._step.counted
        before = counted.get(key)
        counted[key] = resets
        unit = self.windows.weighting.unit
        counts_samples = unit == "sample"
        # Each of several optimizers may train on all samples, as in a GAN.
        if before is None or (counts_samples and before != resets and len(self.windows.optimizers) > 1):
            return
        text = (
            "manual_backward is called again for the same batch, and each loss weighs by all"
            f" {unit}s of that batch. For the loss of a chunk, give the chunk's count:"
            " self.manual_backward(loss, num_label_tokens=n)."
        )
        if before == resets and not counts_samples:
            raise ValueError(
                f"{text} Losses of the whole batch: add them up for one manual_backward, or give counts."
            )
        self.advice.say_once(f"{text} Losses of the whole batch, as of a GAN or SAM, are right as they are.")

    def _zero_if_skipped(self, optimizer: Optimizer) -> None:
        """Zero gradients, which Lightning does in a window's first backward, unless that batch was skipped (None)."""
        trainer = self.module.trainer
        index = trainer.fit_loop.epoch_loop.batch_idx
        if index % trainer.accumulate_grad_batches:
            self.module.optimizer_zero_grad(trainer.current_epoch, index, optimizer)

    def reset(self) -> None:
        """Drop open windows and the data of the current step: an exception was raised, or the run ends."""
        self.windows.reset()
        self._step = _Step()
