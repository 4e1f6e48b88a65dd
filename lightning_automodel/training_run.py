"""What trains, evaluates and saves in one run of the Trainer, from the strategy's ``setup`` to its ``teardown``."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.context_parallel.slices import SHIFTED_LABELS
from lightning_automodel.context_parallel.steps import ContextParallelSteps
from lightning_automodel.data.loader_processing import LoaderProcessing
from lightning_automodel.data.metrics import synchronise_over
from lightning_automodel.data.samplers import share_own_samplers
from lightning_automodel.data.uneven_inputs import UnevenInputs
from lightning_automodel.data.window_ahead import WindowAhead
from lightning_automodel.distributed.collectives import gather_objects, gathers
from lightning_automodel.distributed_module import DistributedModule, RunConfig
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.gradients.optimizer_steps import OptimizerSteps
from lightning_automodel.gradients.token_loss import StepReport, TokenWeighting
from lightning_automodel.gradients.whole_tensors import WholeSteps
from lightning_automodel.gradients.window_records import optimizer_parameters
from lightning_automodel.gradients.windows import GradientWindows
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import logged_values
from lightning_automodel.internals import metrics as metrics_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.micro_batch import MicroBatches
from lightning_automodel.sharding import checks, precision


def _state_on(state: Any, device: torch.device) -> Any:
    return apply_to_collection(state, Tensor, Tensor.to, device, wrong_dtype=DTensor, allow_frozen=True)


class TrainingRun:
    """The distributed model of one run, and what trains it. Its patches last as long as the run.

    Creating it is a collective over the world: weights are made equal and sharded or replicated. If one rank
    fails, the supervisor tells the others.

    Attributes:
        module: The user's.
        plugin: The Trainer's precision plugin.
        device: Of this rank.
        advice: What the user has been told.
        patches: Restored when the run ends.
        distributed: The module, sharded or replicated.
        engine: The engine of that module, which reduces gradients.
        windows: The accumulation windows of a fit.
        steps: Watches, clips and checks before optimizers step.
        loaders: Makes of each loader what this rank iterates.
        inputs: The steps of ranks with unequal amounts of data.
        micro_batches: Runs training steps and backwards.
    """

    def __init__(self, config: RunConfig, patches: PatchStack) -> None:
        module = config.module
        options = config.options
        self.patches = patches
        self.module = module
        self.plugin = config.plugin
        self.device = config.placement.device
        self.advice = config.advice
        self._options = options
        self._placement = config.placement
        self._metrics_are_patched = False  # for the loader that is being evaluated
        self._mesh = config.placement.mesh
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        if fitting and options.count_window_ahead:
            checks.check_ahead(module)
        for note in options.without_effect():
            self.advice.say_once(note)
        self._context: ContextParallelSteps | None = None
        if self._mesh.context_parallel is not None:
            self._context = ContextParallelSteps(
                module, self._mesh.context_parallel, options, self.plugin, patches
            )
        self.distributed = DistributedModule(config, fitting, patches)
        self.engine = self.distributed.engine
        self.windows = self._make_windows()
        self.steps = self._make_steps()
        self.loaders, self.inputs = self._make_inputs(fitting)
        self._watch_logging(fitting)
        self.micro_batches = MicroBatches(
            module,
            self.engine,
            self.distributed.buffers,
            self.windows,
            self._context,
            self.inputs,
            self.advice,
        )

    def patch_metrics_of_peers(self) -> None:
        """Before training batches, :meth:`patch_metrics` where tensor-parallel peers have the same samples.

        Elsewhere what a training step synchronises is of all ranks, which come to it together.
        """
        if self._mesh.tensor_group is not None:
            self.patch_metrics()

    def patch_metrics(self) -> None:
        """Let TorchMetrics of module, callbacks and data module synchronise over the ranks that hold different data.

        Hooks and steps make metrics too. So this is called at the end of a training epoch, and before and after the
        batches of a loader that is evaluated; each call sees what was made since. It looks at all that modules hold,
        which takes its time.
        """
        metrics = metrics_internals.metrics_in(self.module)
        synchronise_over(self._mesh.group, metrics.values(), self.patches)

    def _make_windows(self) -> GradientWindows:
        parameters = list(self.distributed.parameters.named.values())
        self._dtypes = precision.Dtypes.of(parameters)
        in_float16 = self._dtypes.pass_float16(self.plugin) and not self._options.count_window_ahead
        scaler = precision.enabled_scaler(self.plugin)
        scaling = LossScaling(scaler, in_float16, self._mesh, self.device, self.patches)
        return GradientWindows(self.engine, self._make_weighting(), scaling, self._placement, parameters)

    def _make_steps(self) -> OptimizerSteps:
        whole = WholeSteps(self.device, self._options.optimizer_step)
        check = self.distributed.parameters.check_optimizer
        steps = OptimizerSteps(self.windows, self._options, whole, self.advice.say_once, check)
        self.patches.callback(steps.close)
        return steps

    def _make_inputs(self, fitting: bool) -> tuple[LoaderProcessing, UnevenInputs]:
        """What the Trainer draws in place of its loaders, and what steps do where the data of ranks is uneven."""
        options = self._options
        trainer = self.module.trainer
        host_group = self._placement.host_group
        count = self.windows.weighting.count_on_host
        ahead = None
        if fitting and options.count_window_ahead:
            ahead = WindowAhead(trainer, host_group, self._mesh.sizes.tensor, count)
        # Lightning warns in `validate` and `test` that samples are repeated, which `LoaderProcessing` prevents.
        self.patches.ignore_warnings("Using `DistributedSampler` with the dataloaders")
        loaders = LoaderProcessing(trainer, host_group, options.uneven_inputs, ahead, self.advice.say_once)
        inputs = UnevenInputs(trainer, host_group, ahead)
        lightning_internals.patch_samplers(trainer, share_own_samplers, self.patches)
        self.patches.set(gathers, "check", inputs.check_communication)
        return loaders, inputs

    def _watch_logging(self, fitting: bool) -> None:
        """Let what steps log count once where ranks have unequal amounts of data, and be reduced by its names."""
        trainer = self.module.trainer
        for results in logged_values.results_of(trainer):
            self.patches.set(results, "log", partial(self.inputs.log, results.log))
        if self._placement.host_group.size() == 1:
            return
        logged_values.reduce_evaluated_by_name(trainer, self._take_evaluated, self.gather, self.patches)
        if fitting:
            self._reduce_logs_at_epoch_ends(trainer.fit_loop)

    def _reduce_logs_at_epoch_ends(self, fit_loop: Any) -> None:
        """Reduce what was logged over an epoch on all ranks, before any hook of its end, and again after the module's.

        Otherwise the progress bar, on rank 0 alone, would do it while another rank gathers parameters in
        a hook of the module: both would wait.
        """
        module = self.module
        end = fit_loop.on_advance_end

        def reduce_then_end() -> None:
            self.patch_metrics()
            results = logged_values.results_of(module.trainer)[0]
            logged_values.reduce_by_name(results, module.trainer, self.gather)
            end()

        self.patches.set(fit_loop, "on_advance_end", reduce_then_end)
        compute_again = partial(logged_values.compute_metrics_again, module.trainer)
        self.patches.call_after(module, "on_train_epoch_end", compute_again)

    def _take_evaluated(self) -> bool:
        """Whether a loader has been evaluated, whose metrics are computed next."""
        has_evaluated = self.inputs.take_evaluated()
        self._metrics_are_patched = False
        if has_evaluated:
            self.patch_metrics()  # also those that steps have made
        return has_evaluated

    def gather(self, value: Any) -> list[Any]:
        """The picklable ``value`` of each rank. A collective over the world."""
        return gather_objects(value, self._placement.host_group)

    def _make_weighting(self) -> TokenWeighting:
        weighting = self._options.weighting()
        if self._context is None or weighting.label_shift == 0:
            return weighting
        # Labels are shifted before they are sliced.
        return replace(weighting, label_key=SHIFTED_LABELS, label_shift=0)

    def patch_plugin(self) -> None:
        """Patch clipping and casting on the Trainer's precision plugin. Called once Lightning has set it up."""
        self.steps.patch_clipping(self.plugin, self.module, self.patches)
        precision.leave_casting_to_units(self.plugin, self._dtypes, self.patches)

    def take_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Refuse optimizers that would not train the distributed module, and watch what user code does from now on."""
        parameters = self.distributed.parameters
        for optimizer in optimizers:
            parameters.give_shards(optimizer)
            parameters.check_optimizer(optimizer)
        checks.check_optimizers(optimizers)
        checks.check_order(parameters.named, optimizers, self._placement.host_group)
        for optimizer in optimizers:
            self.steps.whole.of(optimizer)  # which raises for options that are not possible
        self.steps.watch_module(self.module, self.patches)
        with plain_access():
            checks.check_hooks(parameters.named)

    def move_optimizer_states(self, optimizers: list[Optimizer]) -> None:
        """Move optimizer states to their parameters: the end of an earlier fit may have moved them to the host.

        Shards stay where they are, and so do counters of steps, which optimizers expect where they made them.
        """
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                device = parameter.device if isinstance(parameter, Tensor) else self.device
                if not isinstance(state, MutableMapping):
                    optimizer.state[parameter] = _state_on(state, device)
                    continue
                for key in state.keys() - {"step"}:
                    state[key] = _state_on(state[key], device)

    def zero_before_validation(self, zero: Callable[[], None]) -> None:
        """Let the module zero gradients, and say so if that loses any."""
        held = not self.module.automatic_optimization and self.holds_gradients()
        zero()
        if held and not self.holds_gradients():
            self.advice.say_once(
                "Lightning zeroes gradients before it validates, under manual optimization also those that"
                " no optimizer has stepped with yet: they are lost. Validate after a step"
                " (val_check_interval), or override on_validation_model_zero_grad() to keep them."
            )

    # --- One optimizer step -------------------------------------------------------------------------------------------

    def run_closure(self, closure: Callable[[], Any], optimizer: Optimizer, calls: Iterator[int]) -> Any:
        """Run a step's closure: under automatic optimization, the window's last forward and backward.

        ``calls`` numbers the calls of one step. Raises RuntimeError in the second one if windows have several
        micro-batches.
        """
        if not self.module.automatic_optimization:
            result = closure()
        else:
            if next(calls) > 0 and self.module.trainer.accumulate_grad_batches > 1:
                raise RuntimeError(
                    f"{type(optimizer).__name__} computes gradients again within one step, for which Lightning"
                    " repeats only the last micro-batch of the accumulation window. Pass"
                    " accumulate_grad_batches=1, and larger batches."
                )
            with self.engine.micro_batch(ends_window=True):
                result = closure()
            if isinstance(result, Tensor) and self.windows.last_loss is not None:
                # That of the window over all ranks, not of this rank's micro-batch.
                result = self.windows.last_loss.to(result.dtype)
        scaler = self.windows.scaling.scaler
        if scaler is not None and (result is not None or not self.module.automatic_optimization):
            self.steps.check(optimizer)
            scaler.unscale_(optimizer)  # before the step, or fused optimizers would divide by the scale
        return result

    def holds_gradients(self) -> bool:
        """Whether backwards have accumulated, in open windows or in ``.grad``, that no optimizer has stepped with."""
        unused = (p for optimizer in self.windows.since_step for p in optimizer_parameters(optimizer))
        return bool(self.windows.open_windows) or any(parameter.grad is not None for parameter in unused)

    # --- Beside training ----------------------------------------------------------------------------------------------

    def start_validation(self) -> None:
        """Let all ranks validate one model: that of the shards, with rank 0's buffers. A collective."""
        self.engine.release()
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            self.check_replicas()
        self.synchronize_buffers()

    def synchronize_buffers(self) -> None:
        """Make buffers equal before an evaluation, and where a fit ends. A collective over the data-parallel group."""
        if self.distributed.buffers is not None:
            self.distributed.buffers.synchronize()

    def check_replicas(self) -> None:
        """Raise RuntimeError, on every rank, if learning rates or copies of a parameter differ. A collective."""
        self.windows.agreement.check_earlier(waits=True)
        self.steps.check_learning_rates(self._placement.host_group)
        self.windows.check_writes()
        if self._options.ddp_comm_hook is not None:
            return  # which may leave gradients as each rank has them, and average weights now and then
        self.distributed.check_replicas()

    def evaluation_step(
        self, step: Callable[..., Any], begin: Callable[[], bool], *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate one batch and leave no parameters gathered, since a callback may swap weights next."""

        @wraps(step)
        def evaluate(*batch_args: Any) -> Any:
            with self.engine.evaluation(self.inputs.find_leader):
                sliced, attention = self.micro_batches.sliced(batch_args, step.__name__)
                if not self._metrics_are_patched:  # the first batch, after all hooks that may make metrics
                    self._metrics_are_patched = True
                    self.patch_metrics()
                with attention:
                    return self.micro_batches.call(partial(step, *sliced, **kwargs), step.__name__)

        return self.inputs.evaluate(evaluate, args, begin, self.engine.join_evaluation)

    def compare_ranks(self) -> None:
        """Raise RuntimeError, on every rank, if ranks have not evaluated alike, or have used other units. A collective.

        Called where an evaluation ends, in which replicas may use other units, and where training ends.
        """
        self.inputs.compare_ranks(self.engine.first_peer, self.engine.unit_order)
        self.engine.unit_order = 0

    def evaluated(self, batch: Any, output: Any, step: str) -> Tensor:
        """See :meth:`AutomodelStrategy.evaluated`."""
        if self._context is not None:
            batch = self._context.slices.slice(batch)  # the output is that of the slice
            self._context.check_count(output)
        sums = self.windows.weighting.evaluated(batch, output, step)
        self.advice.about_count(self.module, self.windows.weighting, output)
        self.advice.about_class_weights(self.module, self.windows.weighting, output)
        return sums

    # --- What is saved, and how it ends -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs of earlier windows: range factor, last report."""
        report = self.windows.last_step
        return {
            "range_scale": self.windows.scaling.range_factor,
            "last_step": None if report is None else vars(report),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.windows.scaling.restore_range(state["range_scale"])
        if state["last_step"] is not None:
            self.windows.last_step = StepReport(**move_data_to_device(state["last_step"], self.device))

    def describe(self) -> dict[str, Any]:
        """What was decided for this run, and why."""
        return {
            "data_parallel": self._options.data_parallel,
            "mesh": self._mesh.sizes_by_name(),
            "gradient_divisor": self._mesh.sizes.divisor,
            "gradient_denominator": self.windows.weighting.unit,
            "precision": precision.describe_dtypes(self.plugin, self._dtypes),
            "optimizer_step": self.steps.whole.describe(self.windows.optimizers),
            **self.distributed.describe(),
        }

    def interrupt(self) -> None:
        """Clean up after an exception: drop open windows and the data of the current step."""
        self.micro_batches.reset()
        self.steps.whole.abandon()
        self.engine.recover()

    def close(self) -> None:
        """Drop open windows, restore all patches, and release the model. Calling it again does nothing."""
        self.inputs.end_padding()
        self.micro_batches.reset()
        self.patches.restore()
