"""What one run of the Trainer owns, from the strategy's ``setup`` to its ``teardown``."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.advice import Advice
from lightning_automodel.context_parallel.slices import SHIFTED_LABELS
from lightning_automodel.context_parallel.steps import ContextParallelSteps
from lightning_automodel.data.batches import TrackedLoader
from lightning_automodel.data.padding import ModuleState
from lightning_automodel.data.uneven_inputs import UnevenInputs
from lightning_automodel.data.window_ahead import WindowAhead
from lightning_automodel.distributed.collectives import log_full
from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.gradients.clipping import GradientClipper
from lightning_automodel.gradients.grad_scaling import LossScaling, RangeScale
from lightning_automodel.gradients.optimizer_watch import OptimizerWatch
from lightning_automodel.gradients.token_loss import Count, StepReport, TokenWeighting, WindowTotals, count_samples
from lightning_automodel.gradients.windows import GradientWindows, optimizer_parameters
from lightning_automodel.options import StrategyOptions
from lightning_automodel.patching import PatchStack
from lightning_automodel.sharding import checks, meta_init, precision, tensor_parallel, units, weight_averaging
from lightning_automodel.sharding.activation_checkpointing import CheckpointedBlocks
from lightning_automodel.sharding.ddp_engine import DDPEngine
from lightning_automodel.sharding.engine import Engine
from lightning_automodel.sharding.fsdp2_engine import FSDP2Engine


class TrainingRun:
    """The distributed model of one run, its accumulation windows, and all patches that last as long as the run.

    Creating it is a collective over the world: weights are made equal and sharded or replicated. If one rank fails,
    the supervisor tells the others.

    Args:
        module: The user's LightningModule, not distributed yet.
        fitting: Whether gradients will be needed.
        options: The strategy's options.
        mesh: The run's mesh.
        device: This rank's device.
        plugin: The Trainer's precision plugin.
        local_ranks: Number of ranks on this node, which share its memory.
        host_group: Host process group of all ranks.
        advice: Gives each warning once.

    Attributes:
        inputs: Synchronises ranks with unequal numbers of batches.
        seconds_drawing: Seconds spent on drawing batches ahead of their steps.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        fitting: bool,
        options: StrategyOptions,
        mesh: RunMesh,
        device: torch.device,
        plugin: Precision,
        local_ranks: int,
        host_group: dist.ProcessGroup,
        advice: Advice,
    ) -> None:
        self.patches = PatchStack()
        self.module, self.plugin, self.device, self.advice = module, plugin, device, advice
        self._options, self._mesh, self._local_ranks = options, mesh, local_ranks
        self._is_sharded = options.data_parallel == "fsdp2"
        self._draws_its_batches = lightning_internals.draws_its_batches(module.training_step)
        self._check(fitting)
        self._context: ContextParallelSteps | None = None
        if mesh.context_parallel is not None:
            self._context = ContextParallelSteps(
                module, mesh.context_parallel, options, plugin, device, advice.say_once
            )
        self._without_values = meta_init.names_without_values(module)
        plugin.convert_module(module)
        self.move_to_device()
        checks.check_hooks(module, options.count_window_ahead)
        self._checkpointed = self._checkpoint_activations(fitting)
        # After activation checkpointing, which compile traces, and before sharding, whose hooks it must not trace.
        self._compiled = self._compile_blocks()
        checks.check_equal_models(module, host_group)
        self.engine = self._make_engine()
        self.model = self.engine.setup(module, fitting, self._give_values)
        tensor_parallel.synchronize_metrics(module, mesh, self.patches)
        self.patches.set(module, "log", update_wrapper(partial(log_full, module.log), module.log))
        if self._is_sharded:
            weight_averaging.finetune_by_identity(module, self.patches)
        advice.about_wrap_policy(options.auto_wrap_policy, self.engine.describe())
        self.weighting = self._make_weighting()
        self._scaling = self._make_scaling()
        parameters = list(module.parameters())
        self.windows = GradientWindows(
            self.engine.sync,
            self.weighting,
            self._scaling,
            mesh,
            device,
            parameters,
            reuses_buffers=bool((options.ddp_kwargs or {}).get("gradient_as_bucket_view")),
        )
        self.watch = OptimizerWatch(self.windows, parameters)
        raises_if_nonfinite = options.error_if_nonfinite and self._scaling.scaler is None
        self.clipper = GradientClipper(self.windows, self.watch, mesh, options.track_grad_norm, raises_if_nonfinite)
        self.inputs, self._ahead = UnevenInputs(module.trainer, host_group, options.uneven_inputs == "pad"), None
        self.seconds_drawing = 0.0
        if fitting and options.count_window_ahead:
            copies, count = mesh.sizes.tensor, self.weighting.count_on_host
            self._ahead = WindowAhead(module.trainer, host_group, copies, count)
        # Batch, count and auxiliary loss of the current training step, until its backward.
        self._batch: Any = None
        self._count: Count | None = None
        self._aux_loss: Tensor | None = None
        self._counted: dict[Optimizer | None, int] = {}
        self._ends_window = True
        self._state_before_padding: ModuleState | None = None

    def _check(self, fitting: bool) -> None:
        """Refuse what cannot be trained, before anything is changed, and tell of options without effect."""
        module, plugin, options = self.module, self.plugin, self._options
        precision.check_precision(plugin, options.data_parallel)
        if self._is_sharded:
            precision.check_conversion(plugin, module)
        if fitting:
            checks.check_training(module, module.trainer.accumulate_grad_batches, options.count_window_ahead)
        for note in options.without_effect():
            self.advice.say_once(note)

    def _checkpoint_activations(self, fitting: bool) -> CheckpointedBlocks:
        module, options = self.module, self._options
        chosen = options.activation_checkpointing if fitting else False
        if chosen == "offload" and self.device.type == "cpu":
            self.advice.say_once(
                "activation_checkpointing='offload' is the same as True on a CPU, whose memory is the host's."
            )
        return CheckpointedBlocks(module, chosen, options.auto_wrap_policy, module.automatic_optimization)

    def _make_weighting(self) -> TokenWeighting:
        options = self._options
        # Labels are shifted before they are sliced.
        is_shifted = self._context is not None and options.label_shift > 0
        return TokenWeighting(
            per_token_loss=options.per_token_loss,
            loss_reduction=options.loss_reduction,
            label_key=SHIFTED_LABELS if is_shifted else options.label_key,
            ignore_index=options.ignore_index,
            label_shift=0 if is_shifted else options.label_shift,
            count_label_tokens=count_samples if options.count == "samples" else options.count_label_tokens,
        )

    def _make_scaling(self) -> LossScaling:
        options, plugin = self._options, self.plugin
        range_scale = RangeScale(
            precision.passes_float16(plugin, self.module) and not options.count_window_ahead,
            options.per_token_loss,
            self.device,
            self._mesh.group if self._mesh.sizes.divisor > 1 else None,
        )
        scaler = precision.enabled_scaler(plugin)
        return LossScaling(scaler, range_scale, self.device, self._is_sharded, self.patches)

    def _compile_blocks(self) -> list[str]:
        """Compile the blocks that ``compile`` asks for, and return their names."""
        options = self._options
        if options.compile is False:
            return []
        kwargs = options.compile if isinstance(options.compile, dict) else {}
        blocks = units.units_of(self.module, options.auto_wrap_policy, self.module.automatic_optimization)
        if not blocks:
            raise ValueError(
                f"compile={options.compile!r} finds no repeated blocks in {units.class_name(self.module)}: pass"
                " auto_wrap_policy with the classes to compile, or compile parts of the model yourself."
            )
        names = {id(submodule): name for name, submodule in self.module.named_modules()}
        chosen = [block for block in blocks if not torch_internals.is_compiled(block)]
        for block in chosen:
            torch_internals.compile_in_place(block, self.patches, **kwargs)
        return [f"{names[id(block)]} ({units.class_name(block)})" for block in chosen]

    def _make_engine(self) -> Engine:
        module, options = self.module, self._options
        self.policy: MixedPrecisionPolicy | None = None
        self.advice.about_master_weights(str(self.plugin.precision), module)
        if not self._is_sharded:
            return DDPEngine(self._mesh, self.device, options)
        policy = precision.resolve_policy(self.plugin, options.mp_policy, module.parameters())
        has_foreign_policy = units.is_sharded(module) and not precision.is_applied(policy, module)
        if has_foreign_policy and options.mp_policy is not None:
            self.advice.say_once("mp_policy has no effect on a model that was sharded before, with another policy.")
        elif has_foreign_policy:
            self.advice.about_units_of_before(str(self.plugin.precision), module, policy)
        self.policy = None if has_foreign_policy else policy
        return FSDP2Engine(self._mesh, self.device, options, self._local_ranks, policy)

    def _give_values(self) -> None:
        """Initialise tensors from the meta device, once they are sharded (FSDP2) or before they are copied (DDP)."""
        if self._without_values:
            offloads = self._is_sharded and self._options.cpu_offload
            meta_init.materialize(self.module, self.device, offloads)
            self.move_to_device()

    def move_to_device(self) -> None:
        """Move the module to this rank's device, except tensors without values and offloaded shards."""
        if meta_init.names_without_values(self.module):
            meta_init.move_what_has_values(self.module, self.device)
        elif not (self._options.cpu_offload and units.is_sharded(self.module)):
            self.module.to(self.device)

    def check_initialized(self) -> None:
        """Raise on every rank, once checkpoints are loaded, if parameters still have no values. A collective."""
        meta_init.check_initialized(self.module, self.device)

    def patch_plugin(self) -> None:
        """Patch clipping and casting on the Trainer's precision plugin. Called once Lightning has set it up."""
        self.clipper.patch(self.plugin, self.patches)
        precision.leave_casting_to_units(self.plugin, self.module, self.patches)

    def watch_optimizers(self, optimizers: list[Optimizer], wrappers: list[LightningOptimizer]) -> None:
        """Watch these optimizers instead of any earlier ones."""
        self.watch.watch(optimizers, wrappers, self._is_misplaced_zero_grad)

    def watch_module(self) -> None:
        """Watch ``module.zero_grad``, toggling, and plain backwards in manual optimization.

        Raises:
            ValueError: If a hook would get gradients that are not final yet.
        """
        self.watch.watch_module(self.module, self.patches, self.engine.release)
        if not self.module.automatic_optimization:
            zero = self.module.on_validation_model_zero_grad
            self.patches.set(self.module, "on_validation_model_zero_grad", partial(self._zero_before_validation, zero))
        checks.check_hooks(self.module, self._options.count_window_ahead)
        # Under automatic optimization every backward is the strategy's.
        if not (self._is_sharded or self.module.automatic_optimization) and self._mesh.sizes.divisor > 1:
            self.watch.watch_stray_backwards()

    def _zero_before_validation(self, zero: Callable[[], None]) -> None:
        held = self.holds_gradients()
        zero()
        if held and not self.holds_gradients():
            self.advice.say_once(
                "Lightning zeroes gradients before it validates, under manual optimization also those that no optimizer"
                " has stepped with yet: they are lost. Validate after a step (val_check_interval), or override"
                " on_validation_model_zero_grad() to keep them."
            )

    # --- One micro-batch ----------------------------------------------------------------------------------------------

    def process_dataloader(self, loader: Any) -> Any:
        """The loader, or what tracks it, to iterate instead. A collective over the world; see :class:`UnevenInputs`."""
        loader = self.inputs.process(loader)
        return self._ahead.process(loader) if self._ahead is not None and self.inputs.is_training else loader

    def begin_batch(self) -> None:
        """Called when a training batch is about to be used, after its hooks."""
        start = time.perf_counter()
        trainer = self.module.trainer
        prefetched = getattr(lightning_internals.training_data_fetcher(trainer), "batches", ())
        loader = trainer.train_dataloader
        handle = loader.begin(len(prefetched)) if isinstance(loader, TrackedLoader) else None
        self.inputs.begin_training_batch(handle)
        if self._ahead is not None:
            self._ahead.begin_batch(handle)
            self.seconds_drawing += time.perf_counter() - start

    def sliced(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A step's arguments, the batch first. Under context parallelism, the batch is this rank's slice."""
        return args if self._context is None else (self._context.slice(args[0]), *args[1:])

    def attention(self, step: str) -> AbstractContextManager[None]:
        """Context of a step whose arguments are :meth:`sliced`."""
        return nullcontext() if self._context is None else self._context.step(step)

    def start_step(self, batch: Any) -> None:
        """Called when a training step is about to run on ``batch``."""
        self._batch, self._counted = batch, {}
        # Only in the first window, since it reads the device.
        is_checked = self.windows.last_step is None and not self.inputs.is_filler
        if self._ahead is not None and is_checked:
            self.weighting.check_unchanged(batch, self._ahead.count)
        self.engine.start_forward(batch)
        # Only now, since start_forward may have broadcast buffers.
        self._state_before_padding = ModuleState(self.module) if self.inputs.is_filler else None

    def end_step(self, output: Any) -> None:
        """Count the label tokens of a training step of automatic optimization, which returned ``output``."""
        if self.inputs.is_filler:
            self._count = 0
        elif self._ahead is None:
            self._count = self._checked_count(output)
        else:
            self.weighting.check_returned_count(output, self._ahead.count, reads_device=self.windows.last_step is None)
            self._count = self._ahead.count
        self._aux_loss = self.weighting.aux_loss(output, self._ahead is not None)
        self.advice.about_count(self.module, self.weighting, output)

    def evaluated(self, batch: Any, output: Any, step: str) -> Tensor:
        """See :meth:`AutomodelStrategy.evaluated`."""
        if self._context is not None:
            batch = self._context.slices.slice(batch)  # the output is that of the slice
            self._context.check_count(self.weighting, batch, output, step)
        sums = self.weighting.evaluated(batch, output, step)
        self.advice.about_count(self.module, self.weighting, output)
        return sums

    @contextmanager
    def micro_batch(self, is_last: bool) -> Generator[None, None, None]:
        """Context for the forward and backward of one micro-batch; ``is_last``: its backward ends the window."""
        before, self._ends_window = self._ends_window, is_last
        try:
            with checks.explained_errors(self.module), self.engine.sync.micro_batch(is_last):
                yield
        finally:
            self._ends_window = before

    def backward(
        self, loss: Tensor, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """See :meth:`AutomodelStrategy.backward`."""
        module, plugin, ends = self.module, self.plugin, self._ends_window
        checks.check_loss(loss, module)
        if optimizer is not None and not self.windows.open_windows:
            self._zero_if_skipped(optimizer)
        count, accumulate = self._take_count(kwargs)
        window = self.windows.open()
        window.ahead = None if self._ahead is None else self._ahead.totals()
        plugin_loss = plugin.pre_backward(loss, module)
        self.advice.about_half_precision(loss)
        self.advice.about_rounded_count(count)
        reported, objective = self._objective(loss, count, accumulate, window.ahead)
        if self._scaling.scaler is None and plugin_loss is not loss:
            # A plugin may have changed the loss: its own is backpropagated, the user's is reported.
            objective = self._objective(plugin_loss, count, accumulate, window.ahead)[1]
        self._aux_loss = None
        if self.inputs.is_filler:
            objective = objective * 0
        counts = not self.inputs.is_filler
        with checks.explained_errors(module), self.windows.backward(window, loss, ends, counts), self._recomputation():
            scaled = self._scaling.apply(objective, count, window.sums)
            plugin.backward(scaled, module, optimizer, *args, **kwargs)
            if not self.inputs.is_filler:
                window.sums.add(reported, count)
        if self.module.automatic_optimization:
            self.restore_state_before_padding()
        return plugin.post_backward(loss, module)

    def _recomputation(self) -> AbstractContextManager[None]:
        """Context of a backward, in which checkpointed blocks recompute their attention."""
        return nullcontext() if self._context is None else self._context.backward()

    def _objective(
        self, loss: Tensor, count: Count, accumulate: int, ahead: WindowTotals | None
    ) -> tuple[Tensor, Tensor]:
        """[] the sum of token losses behind a loss that was divided by ``accumulate``, and [] what to backpropagate."""
        token_loss = loss if self._aux_loss is None else loss - self._aux_loss / accumulate
        token_losses = self.weighting.objective(token_loss, count) * accumulate
        if ahead is None:
            return token_losses, token_losses
        divisor = self._mesh.sizes.divisor
        denominator = ahead.num_label_tokens if self._options.per_token_loss else ahead.num_micro_batches
        objective = token_losses * (divisor / denominator if denominator else 0.0)
        if self._aux_loss is not None:
            objective = objective + self._aux_loss * (divisor / ahead.num_micro_batches)
        return token_losses, objective

    def restore_state_before_padding(self) -> None:
        """Restore what a step on a padding batch has changed in the module."""
        state, self._state_before_padding = self._state_before_padding, None
        if state is not None:
            state.restore()

    def _take_count(self, kwargs: dict[str, Any]) -> tuple[Count, int]:
        """The label tokens of this backward, and what Lightning has divided its loss by."""
        if self.module.automatic_optimization and self._count is not None:
            count, self._count = self._count, None
            return count, self.module.trainer.accumulate_grad_batches
        self.watch.check_known(kwargs.pop("optimizer", None))
        if self.inputs.is_filler:
            kwargs.pop("num_label_tokens", None)
            return 0, 1
        given = {"num_label_tokens": kwargs.pop("num_label_tokens")} if "num_label_tokens" in kwargs else None
        if given is None and self._options.per_token_loss:
            self._check_not_counted_before()
        return self._checked_count(given), 1

    def _checked_count(self, output: Any) -> Count:
        if self._context is not None:
            self._context.check_count(self.weighting, self._batch, output, "training_step")
        return self.weighting.count(self._batch, output)

    def _check_not_counted_before(self) -> None:
        """Refuse chunks of a batch that would each weigh as all of it.

        Only warn where two backwards may be of the whole batch: samples are those of a GAN, and with a step or
        ``zero_grad`` in between they may be of SAM.
        """
        key, resets = self.windows.toggled, self.windows.num_resets
        before, self._counted[key] = self._counted.get(key), resets
        counts_samples = self._options.count == "samples"
        if before is None or (counts_samples and before != resets):
            return
        text = (
            f"manual_backward is called again for the same batch, and each loss weighs by all {self._denominator()}s of"
            " that batch. For the loss of a chunk, give the chunk's count: self.manual_backward(loss,"
            " num_label_tokens=n)."
        )
        if before == resets and not counts_samples:
            raise ValueError(f"{text} Losses of the whole batch: add them up for one manual_backward, or give counts.")
        self.advice.say_once(f"{text} Losses of the whole batch, as of a GAN, are right as they are.")

    def _zero_if_skipped(self, optimizer: Optimizer) -> None:
        """Zero the gradients of the previous step if Lightning has not: it does so only in a window's first batch.

        It skips that batch if the loader yields None, and reads the batch index too early for a step that draws its
        batches from a ``dataloader_iter``. The module's own ``optimizer_zero_grad`` is called, as Lightning does.
        """
        trainer = self.module.trainer
        index = trainer.fit_loop.epoch_loop.batch_idx
        if index % trainer.accumulate_grad_batches or self._draws_its_batches:
            self.module.optimizer_zero_grad(trainer.current_epoch, index, optimizer)

    def _is_misplaced_zero_grad(self) -> bool:
        """Whether Lightning zeroes in mid-window, one batch late, as it does for a ``dataloader_iter`` step."""
        if not self._draws_its_batches or not self.module.automatic_optimization or self._count is None:
            return False
        trainer = self.module.trainer
        return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches != 0

    # --- One optimizer step -------------------------------------------------------------------------------------------

    def run_closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """Run a step's closure: under automatic optimization, the window's last forward and backward."""
        if not self.module.automatic_optimization:
            result = closure()
        else:
            with self.micro_batch(is_last=True):
                result = closure()
        self.watch.check_step(optimizer)
        if result is not None or not self.module.automatic_optimization:
            self._scaling.look_for_overflow(optimizer)
        return result

    @property
    def last_step(self) -> StepReport | None:
        """Report on the windows since the newest step."""
        return self.windows.last_step

    def holds_gradients(self) -> bool:
        """Whether backwards have accumulated, in open windows or in ``.grad``, that no optimizer has stepped with."""
        unused = (p for optimizer in self.windows.since_step for p in optimizer_parameters(optimizer))
        return bool(self.windows.open_windows) or any(parameter.grad is not None for parameter in unused)

    # --- What is saved, and how it ends -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs of earlier windows: state of the engine, range factor, last report."""
        report = self.windows.last_step
        return {
            "engine": self.engine.state(),
            "range_scale": self._scaling.range_scale.factor,
            "last_step": None if report is None else vars(report),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.engine.load_state(state["engine"])
        self._scaling.range_scale.restore(state["range_scale"])
        if state["last_step"] is not None:
            saved = state["last_step"].items()
            self.windows.last_step = StepReport(
                **{name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in saved}
            )

    def describe(self) -> dict[str, Any]:
        """What was decided for this run, and why."""
        return {
            "data_parallel": self._options.data_parallel,
            "mesh": self._mesh.sizes_by_name(),
            "gradient_divisor": self._mesh.sizes.divisor,
            "gradient_denominator": self._denominator(),
            "precision": precision.describe_dtypes(self.plugin, self.module, self.policy),
            "tensors_created_without_values": len(self._without_values),
            "activation_checkpointing": self._checkpointed.names,
            "compiled": self._compiled,
            **self.engine.describe(),
        }

    def _denominator(self) -> str:
        """What is counted for the denominator of a window's gradients."""
        if not self._options.per_token_loss:
            return "micro-batch"
        return "sample" if self._options.count == "samples" else "label token"

    def interrupt(self) -> None:
        """Clean up after an exception: drop open windows and the data of the current step."""
        self.windows.reset()
        self._batch = self._count = self._aux_loss = None
        self.engine.sync.recover()

    def close(self) -> None:
        """Drop open windows, restore all patches, and release the model. Calling it again does nothing."""
        self.restore_state_before_padding()
        self.windows.reset()
        self.watch.close()
        self.patches.restore()
        self.engine.close()
        self._checkpointed.undo()
        if self._context is not None:
            self._context.close()
            self._context = None
        self._batch = self._count = self._aux_loss = None
