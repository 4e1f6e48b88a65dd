"""One accumulation window for each optimizer: opened by zeroed gradients, ended by rescaling them, once."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.gradients.token_loss import LossWindow, StepReport, TokenWeighting

OneOptimizer = Optimizer | LightningOptimizer


def unwrap(optimizer: OneOptimizer) -> Optimizer:
    """The user's optimizer behind Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class OptimizerWindows:
    """The windows of a fit, by optimizer.

    Gradients and counts must vanish together, and only the optimizer's own ``zero_grad`` says when: Lightning calls it
    between the first forward and the first backward of a window, users where they like. Torch has no hook for it, so
    the method is replaced on the instances, for the time of the fit.

    Args:
        on_zero_grad: Called with the optimizer after its gradients were zeroed.
        is_misplaced: Called before they are; True leaves them as they are.
    """

    def __init__(self, on_zero_grad: Callable[[Optimizer], None], is_misplaced: Callable[[], bool]) -> None:
        self._on_zero_grad = on_zero_grad
        self._is_misplaced = is_misplaced
        self._windows: dict[Optimizer, LossWindow] = {}
        self._watched: list[Any] = []
        self._toggled: Optimizer | None = None
        self._module: pl.LightningModule | None = None
        self._ignores_zero_grad = False

    def __getitem__(self, optimizer: OneOptimizer) -> LossWindow:
        return self._windows[unwrap(optimizer)]

    def watch(self, optimizers: list[Optimizer], wrappers: list[LightningOptimizer]) -> None:
        """Follow these optimizers, and Lightning's wrappers of them, from now on instead of those before."""
        self._unwatch()
        self._windows = {optimizer: self._windows.get(optimizer, LossWindow()) for optimizer in optimizers}
        for optimizer, wrapper in zip(optimizers, wrappers, strict=True):
            for watched in (optimizer, wrapper):
                watched.zero_grad = self._followed_by_reset(watched.zero_grad, optimizer)  # type: ignore[method-assign,union-attr]
                self._watched.append(watched)

    def _unwatch(self) -> None:
        for watched in self._watched:
            del watched.__dict__["zero_grad"]
        self._watched = []

    def _followed_by_reset(self, zero_grad: Callable[..., None], optimizer: Optimizer) -> Callable[..., None]:
        def zero_grad_and_reset(*args: Any, **kwargs: Any) -> None:
            if self._is_misplaced():
                return
            zero_grad(*args, **kwargs)
            if not self._ignores_zero_grad:
                self._windows[optimizer].reset()
                self._on_zero_grad(optimizer)

        return zero_grad_and_reset

    def watch_toggling(self, module: pl.LightningModule, on_toggle: Callable[[], None]) -> None:
        """Follow which optimizer is toggled; ``on_toggle`` is called after each change of ``requires_grad``."""
        toggle, untoggle = module.toggle_optimizer, module.untoggle_optimizer

        def toggle_optimizer(optimizer: OneOptimizer) -> None:
            toggle(optimizer)
            self._toggled = unwrap(optimizer)
            on_toggle()

        def untoggle_optimizer(optimizer: OneOptimizer) -> None:
            untoggle(optimizer)
            self._toggled = None
            on_toggle()

        module.toggle_optimizer = toggle_optimizer  # type: ignore[method-assign]
        module.untoggle_optimizer = untoggle_optimizer  # type: ignore[method-assign]
        self._module = module

    def owner(self, named: OneOptimizer | None) -> Optimizer:
        """The optimizer that a manual backward's count belongs to: the toggled, else the named, else the only one.

        Raises:
            ValueError: If there are several and none is toggled or named, or the named one is not among them.
        """
        if self._toggled is not None:
            return self._toggled
        if named is not None:
            if unwrap(named) not in self._windows:
                raise ValueError(
                    f"manual_backward(optimizer=...) got {type(unwrap(named)).__name__}, which is none of the"
                    f" {len(self._windows)} optimizers that configure_optimizers returned; pass one of"
                    " self.optimizers()."
                )
            return unwrap(named)
        if len(self._windows) != 1:
            raise ValueError(
                f"manual_backward cannot tell which of the {len(self._windows)} optimizers its label tokens belong to:"
                " run it inside `with optimizer.toggle_model():` or pass"
                " self.manual_backward(loss, num_label_tokens=n, optimizer=optimizer)."
            )
        return next(iter(self._windows))

    def open(self, optimizer: Optimizer, automatic: bool) -> LossWindow:
        """The window that a backward is about to add to, without gradients of an earlier step, already rescaled.

        Lightning leaves those where it skips the first batch of a window (``None``); under automatic optimization they
        are zeroed here.

        Raises:
            RuntimeError: If they are there under manual optimization, where zeroing is the user's.
        """
        window = self._windows[optimizer]
        if not window.is_rescaled:
            return window
        if not automatic and any(parameter.grad is not None for parameter in optimizer_parameters(optimizer)):
            raise RuntimeError(
                f"The gradients of {type(optimizer).__name__} have been rescaled for a step and were not zeroed since;"
                " another backward would add token sums to token means. Call optimizer.zero_grad() after each"
                " optimizer.step()."
            )
        optimizer.zero_grad()
        return window

    def hold_gradients(self) -> bool:
        """Whether any window has begun and not ended by a step."""
        return any(window.num_micro_batches > 0 and not window.is_rescaled for window in self._windows.values())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which ``zero_grad`` is not the user's: torch calls it when it initialises optimizer state."""
        self._ignores_zero_grad = True
        try:
            yield
        finally:
            self._ignores_zero_grad = False

    def reset(self) -> None:
        """Forget what every window holds."""
        for window in self._windows.values():
            window.reset()

    def close(self) -> None:
        """Put the replaced methods back and forget the optimizers."""
        self._unwatch()
        if self._module is not None:
            del self._module.__dict__["toggle_optimizer"], self._module.__dict__["untoggle_optimizer"]
        self._windows, self._module, self._toggled = {}, None, None


class GradientFinisher:
    """Ends windows: makes their gradients final, once, and reports on them.

    Everything here is called by every rank in the same order; collectives run on the data-parallel group of the mesh,
    and on the groups that parameters are sharded over where a norm is measured. If a rank does not come, the others
    raise when the group's timeout ends.

    Args:
        windows: The windows to end.
        weighting: What their totals mean.
        scaling: What their losses were multiplied by.
        mesh: Mesh of the run.
        device: Where totals are summed.
        complete: Averages, for these parameters, the gradients that the engine itself does not.
        followed: Which of these parameters get a zero gradient where they were not used, and whether they were.
        track_norm: Measure the norm of each window, also where no clipping does.
        error_if_nonfinite: Likewise, and raise where it is not finite.
    """

    def __init__(
        self,
        windows: OptimizerWindows,
        weighting: TokenWeighting,
        scaling: LossScaling,
        mesh: RunMesh,
        device: torch.device,
        complete: Callable[[list[nn.Parameter]], None],
        followed: Callable[[list[nn.Parameter]], list[tuple[nn.Parameter, bool]]],
        track_norm: bool,
        error_if_nonfinite: bool,
    ) -> None:
        self.last_step: StepReport | None = None
        self._windows, self._weighting, self._scaling = windows, weighting, scaling
        self._mesh, self._device, self._followed = mesh, device, followed
        self._complete, self._track_norm, self._error_if_nonfinite = complete, track_norm, error_if_nonfinite
        scaling.take_over(self.finish)

    def finish(self, optimizer: OneOptimizer) -> list[nn.Parameter]:
        """Rescale the gradients of ``optimizer`` and report on its window, unless that is done.

        One all-reduce of three numbers and one for each sharded parameter, one more of one number where a gradient
        scaler looks for overflow in shards, and one of a few where a norm is asked for. A rank that did not use some
        parameter reads on the host whether another rank did.

        Returns:
            The parameters of the optimizer.
        """
        parameters = optimizer_parameters(unwrap(optimizer))
        if not self._windows[optimizer].is_rescaled:
            self._rescale(self._windows[optimizer], parameters)
        self._scaling.unscale(unwrap(optimizer))
        return parameters

    def _rescale(self, window: LossWindow, parameters: list[nn.Parameter]) -> None:
        window.is_rescaled = True
        self._complete(parameters)
        divisor, followed = self._mesh.sizes.data_parallel, self._followed(parameters)
        totals = self._summed(window.totals(self._device), followed)
        denominator = self._weighting.denominator(totals)
        factor = rescale_clip.gradient_factor(denominator, divisor) * self._scaling.correction(window)
        rescale_clip.scale_gradients_(parameters, factor)
        self._scaling.follow(denominator, divisor)
        self.last_step = self._weighting.report(totals)

    def _summed(self, totals: Tensor, followed: list[tuple[nn.Parameter, bool]]) -> Tensor:
        """[3] ``totals`` over all ranks; drops the gradients of parameters that no rank has used in the window."""
        used = [was_used for _, was_used in followed]
        users = totals.new_ones(len(used)) if all(used) else totals.new_tensor(used)
        summed = torch.cat([totals, users])
        if self._mesh.sizes.data_parallel > 1:
            dist.all_reduce(summed, group=self._mesh.group)
        if not all(used):
            for (parameter, _), num_users in zip(followed, summed[len(totals) :].tolist(), strict=True):
                if num_users == 0:
                    parameter.grad = None
        return summed[: len(totals)]

    def measure_if_asked(self, optimizer: OneOptimizer) -> None:
        """Measure the norm of the finished gradients where an option asks for it and clipping has not done so.

        The last thing before the optimizer steps, so that it judges what hooks have made of the gradients. Whether it
        communicates follows from what was called before, never from what the gradients look like on a rank.
        """
        if (self._track_norm or self._error_if_nonfinite) and not self._windows[optimizer].is_measured:
            self.norm(optimizer)

    def clip_norm(self, optimizer: OneOptimizer, clip_val: float) -> Tensor:
        """Finish, then clip to a global norm. Returns [] the norm before."""
        norm = self.norm(optimizer)
        rescale_clip.scale_to_norm_(optimizer_parameters(unwrap(optimizer)), norm, clip_val)
        return norm

    def clip_value(self, optimizer: OneOptimizer, clip_val: float) -> None:
        """Finish, then clamp every element."""
        parameters = self.finish(optimizer)
        self.measure_if_asked(optimizer)
        rescale_clip.clip_gradient_values(parameters, clip_val)

    def norm(self, optimizer: OneOptimizer) -> Tensor:
        """Finish, then measure. Returns [] the global norm; the first of a window is the one that is reported.

        Raises:
            RuntimeError: On every rank, if it is not finite and that was asked to be an error.
        """
        parameters = self.finish(optimizer)
        norm = rescale_clip.total_norm(parameters)
        if self._error_if_nonfinite:
            only_shards = self._mesh.sizes.replicate == self._mesh.sizes.tensor == 1
            measured_together = only_shards and rescale_clip.any_sharded(parameters)
            rescale_clip.check_finite(norm, () if measured_together else self._mesh.groups)
        window = self._windows[optimizer]
        if not window.is_measured:
            window.is_measured = True
            assert self.last_step is not None
            self.last_step = dataclasses.replace(self.last_step, grad_norm=norm)
        return norm
