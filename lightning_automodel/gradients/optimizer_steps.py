"""Between a window and the optimizer's step: watching what users do to gradients, clipping, and measuring norms."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.distributed import collectives
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.rank_agreement import fingerprint
from lightning_automodel.gradients.whole_tensors import WholeSteps, nested_optimizers
from lightning_automodel.gradients.window_records import OneOptimizer, optimizer_parameters, unwrap
from lightning_automodel.gradients.windows import GradientWindows
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.options import StrategyOptions


class OptimizerSteps:
    """Tells the windows of steps, ``zero_grad`` and toggling; refuses steps with gradients that are not final; clips.

    Torch has hooks for an optimizer's step, and none for ``zero_grad``, which is patched on the instances.

    Every rank must clip in the same order: a norm is a collective on the groups that parameters are sharded
    over. If a rank does not call, the others raise when the group's timeout ends.

    Args:
        windows: Told of steps and of zeroed gradients.
        options: The strategy's options.
        whole: Steps what owners step.
        say_once: Tells the user.
        check_parameters: Raises before a step that would train something else than the distributed module.
    """

    def __init__(
        self,
        windows: GradientWindows,
        options: StrategyOptions,
        whole: WholeSteps,
        say_once: Callable[[str], None],
        check_parameters: Callable[[Optimizer], None],
    ) -> None:
        self._windows = windows
        self.whole = whole
        self._gathers_before = 0  # collectives for whole tensors, before the step that runs
        self._say_once = say_once
        self._check_parameters = check_parameters
        # A gradient scaler looks for overflow itself.
        self._error_if_nonfinite = options.error_if_nonfinite and windows.scaling.scaler is None
        self._measures = options.track_grad_norm or self._error_if_nonfinite
        self._patches = PatchStack()  # of the optimizers, which a callback may replace in mid-run
        self._is_automatic = True

    # --- Watching -----------------------------------------------------------------------------------------------------

    def watch(self, optimizers: list[Optimizer], wrappers: list[LightningOptimizer]) -> None:
        """Watch these optimizers, and Lightning's wrappers of them, instead of any earlier ones."""
        self._patches.restore()
        self._windows.optimizers = optimizers
        for optimizer, wrapper in zip(optimizers, wrappers, strict=True):
            self._patches.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            # User code that comes after a step finds what it has trained.
            after_step = torch_internals.register_first_post_hook(optimizer, self._after_step)
            self._patches.callback(after_step.remove)
            for watched in (optimizer, wrapper):
                self._patches.call_after(watched, "zero_grad", partial(self._discard, optimizer))

    def _discard(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self._windows.discard(optimizer_parameters(optimizer))

    def watch_module(self, module: pl.LightningModule, patches: PatchStack) -> None:
        """Watch ``module.zero_grad`` and optimizer toggling."""
        self._is_automatic = module.automatic_optimization
        windows = self._windows

        def toggled(optimizer: OneOptimizer) -> None:
            windows.toggled = unwrap(optimizer)

        def untoggled(optimizer: OneOptimizer) -> None:
            windows.toggled = None

        patches.call_after(module, "zero_grad", lambda *_, **__: windows.discard(windows.parameters))
        patches.call_after(module, "toggle_optimizer", toggled)
        patches.call_after(module, "untoggle_optimizer", untoggled)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an optimizer's step gets for its arguments. ``args[0]`` is the optimizer."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin(optimizer, self._before_step)
            return None

        # A closure runs its backward inside the step.
        def run_closure() -> Any:
            # End what an earlier call has begun: SAM evaluates the model at the weights that it has written.
            self.whole.end(optimizer)
            result = closure()
            self._begin(optimizer, None)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": run_closure}
        return (args[0], run_closure, *args[2:]), kwargs

    def _begin(self, optimizer: Optimizer, hook: Callable[..., Any] | None) -> None:
        """Called when the gradients are there, by a ``hook`` before the step, or within it."""
        self.check(optimizer)
        self.whole.abandon()  # what a step has begun that raised
        self._check_parameters(optimizer)
        self._check_gradients_by_hand(optimizer)
        if self.whole.of(optimizer):
            hooks = torch_internals.step_hooks(optimizer)
            within = hooks[hooks.index(hook or self._after_step) + 1 : hooks.index(self._after_step)]
            for inner in nested_optimizers(optimizer)[1:]:
                within += torch_internals.step_hooks(inner)
            if within:
                raise RuntimeError(
                    f"{', '.join(getattr(each, '__qualname__', str(each)) for each in within)}: hooks of a step of"
                    f" {type(optimizer).__name__} that would see whole parameters, and those of this rank alone."
                    " Register them in configure_optimizers, on the optimizer that it returns, or pass"
                    " optimizer_step='shards'."
                )
        self.whole.begin(optimizer)
        self._gathers_before = collectives.gathers.count

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        num_gathers = collectives.gathers.count - self._gathers_before
        if num_gathers:
            self._say_once(
                f"{type(optimizer).__name__} looks at whole tensors: its step took {num_gathers} of them"
                " from shards, each by a collective, and every rank computes the same with them. That is"
                " right, but slow. If it steps each parameter by itself, pass optimizer_step='whole', so"
                " that one rank steps each."
            )
        self.whole.end(optimizer)
        self._windows.stepped(optimizer)

    def check(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if an open window holds gradients of ``optimizer``, or they are not synchronised."""
        windows = self._windows
        windows.check_foreign()
        parameters = optimizer_parameters(optimizer)
        name = type(optimizer).__name__
        for window in windows.open_windows.values():
            if window.ahead is not None and windows.engine.backward is not None:
                continue  # counted ahead, so final at once: a gradient hook may step during backward
            if not window.owned.isdisjoint(parameters):
                raise RuntimeError(
                    f"{name}.step() in the middle of an accumulation window: {window.num_micro_batches}"
                    " backward(s) have accumulated and none has synchronised. Step after a backward outside"
                    " of `optimizer.toggle_model(sync_grad=False)`, or call optimizer.zero_grad() to give"
                    " the window up. Where training_step has returned None for the window's last batch,"
                    " return a loss of zero instead, logits.sum() * 0.0, with a count of zero."
                )
        unsynchronised = windows.unsynchronised.intersection(parameters)
        if any(parameter.grad is not None for parameter in unsynchronised):
            raise RuntimeError(
                f"{len(unsynchronised)} parameters of {name} have gradients of a plain loss.backward(),"
                " which nobody averages over ranks, so that these would diverge. Call"
                " self.manual_backward(loss) instead; under automatic optimization, return the sum of the"
                " losses."
            )

    def _check_gradients_by_hand(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if ranks would step with different gradients, none of which are of a ``manual_backward``.

        A collective over the data-parallel group. It runs only where an optimizer steps under manual
        optimization, and no window of it has ended since its last step.
        """
        windows = self._windows
        if self._is_automatic or windows.divisor == 1:
            return
        if windows.engine.backward is not None or optimizer in windows.since_step:
            return
        parameters = optimizer_parameters(optimizer)
        replicated = [p for p in parameters if not isinstance(p, DTensor)]
        # Norms of shards differ by rank: what was written to shards is compared instead.
        number = fingerprint(rescale_clip.total_norm(replicated)) + windows.engine.written.take()
        if not windows.agreement.has_written_alike(number):
            raise RuntimeError(
                f"{type(optimizer).__name__} would step with gradients that differ between ranks. No"
                " manual_backward has run since its last step, and nobody averages what is written by hand (`p.grad ="
                " torch.autograd.grad(loss, p)[0]`). Call self.manual_backward(loss), once for each of"
                " several losses, and change what it leaves in .grad. Or write the same gradients on all"
                " ranks."
            )

    def check_learning_rates(self, group: dist.ProcessGroup) -> None:
        """Raise RuntimeError, on every rank, if learning rates or other fractions among options differ.

        A collective over ``group``, on the host, with a read of the device where a learning rate is a tensor. A
        scheduler may follow a metric of its own on each rank.
        """
        own = {
            f"{name} of {type(optimizer).__name__} (group {index} of optimizer {number})": f"{float(value):.6g}"
            for number, optimizer in enumerate(self._windows.optimizers)
            for index, options in enumerate(optimizer.param_groups)
            for name, value in options.items()
            if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        if differing := collectives.disagreement(own, group):
            raise RuntimeError(
                f"Ranks step with different options of their optimizers: {differing}."
                " If a scheduler follows a metric (ReduceLROnPlateau), log the metric with"
                " sync_dist=True, so that all ranks decide alike. An optimizer that fits numbers to"
                " all of its parameters must not have owners: pass optimizer_step='shards'. Else write"
                " the same values on all ranks."
            )

    def close(self) -> None:
        """Stop watching optimizers."""
        self._patches.restore()
        self.whole.abandon()

    # --- Clipping -----------------------------------------------------------------------------------------------------

    def patch_clipping(self, plugin: Precision, module: pl.LightningModule, patches: PatchStack) -> None:
        """Make Lightning's clipping work on sharded gradients, and measure norms after hooks and clipping.

        Lightning's own clipping calls torch's, which refuses a mixture of plain tensors and DTensors. A
        plugin's that is not Lightning's stays.
        """
        own: Callable[..., None] = plugin.clip_gradients
        methods = (own, plugin.clip_grad_by_norm, plugin.clip_grad_by_value)
        is_lightnings = all(torch_internals.defined_in(method, "lightning") for method in methods)

        # Lightning's own refuses fused optimizers, which unscale in the step: here gradients are unscaled.
        def clip_gradients(
            optimizer: OneOptimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
        ) -> None:
            if is_lightnings and not clip_val > 0:
                return
            if is_lightnings and gradient_clip_algorithm != "value":
                self.clip(optimizer, clip_val, "norm")
                return
            self.check(unwrap(optimizer))
            self._measure_if_asked(optimizer)
            if is_lightnings:
                rescale_clip.clip_gradient_values(optimizer_parameters(optimizer), clip_val)
            else:
                own(optimizer, clip_val, gradient_clip_algorithm)

        patches.set(plugin, "clip_gradients", clip_gradients)
        # The last hook before an optimizer steps.
        last = "configure_gradient_clipping" if module.automatic_optimization else "on_before_optimizer_step"
        patches.call_after(module, last, self._measure_if_asked)

    def clip(self, optimizer: OneOptimizer, clip_val: float, algorithm: Literal["norm", "value"]) -> Tensor:
        """Implement :meth:`AutomodelStrategy.clip_gradients`. Returns [] the norm before clipping."""
        rescale_clip.check_clip_value(clip_val)
        if algorithm not in ("norm", "value"):
            raise ValueError(f"algorithm must be 'norm' or 'value', got {algorithm!r}.")
        self.check(unwrap(optimizer))
        parameters = optimizer_parameters(optimizer)
        norm = self._norm(optimizer)
        if algorithm == "norm":
            rescale_clip.scale_to_norm_(parameters, norm, clip_val)
        else:
            rescale_clip.clip_gradient_values(parameters, clip_val)
        return norm

    def _measure_if_asked(self, optimizer: OneOptimizer, *_: Any, **__: Any) -> None:
        """Measure the norm if an option asks for it and it has not been measured since the last step.

        Runs last before the optimizer steps, so that it includes what hooks did to the gradients. Whether it
        communicates depends only on earlier calls, never on this rank's gradients, so ranks stay in step.
        """
        if self._measures and unwrap(optimizer) not in self._windows.measured:
            self._norm(optimizer)

    def _norm(self, optimizer: OneOptimizer) -> Tensor:
        """[] the global 2-norm of the gradients. The first one after each step of the optimizer is reported."""
        norm = rescale_clip.total_norm(optimizer_parameters(optimizer))
        if self._error_if_nonfinite:
            rescale_clip.check_finite(norm, self._windows.mesh.groups)
        self._windows.report_norm(unwrap(optimizer), norm)
        return norm
