"""Clipping and measuring final gradients in the optimizer step, by the Trainer and by hand."""

from functools import partial
from typing import Literal

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_automodel import lightning_internals
from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.optimizer_watch import OptimizerWatch
from lightning_automodel.gradients.windows import GradientWindows, OneOptimizer, optimizer_parameters, unwrap
from lightning_automodel.patching import PatchStack


class GradientClipper:
    """Clips final gradients, and measures their norm if an option asks for it.

    Every rank must call these methods in the same order: a norm is a collective on the groups that parameters are
    sharded over. If a rank does not call, the others raise when the group's timeout ends.
    """

    def __init__(
        self,
        windows: GradientWindows,
        watch: OptimizerWatch,
        mesh: RunMesh,
        track_norm: bool,
        error_if_nonfinite: bool,
    ) -> None:
        self._windows, self._watch, self._mesh = windows, watch, mesh
        self._track_norm, self._error_if_nonfinite = track_norm, error_if_nonfinite

    def patch(self, plugin: Precision, patches: PatchStack) -> None:
        """Make all of the plugin's clipping work on sharded gradients, and measure norms after hooks and clipping.

        Lightning's own clipping calls torch's, which refuses a mixture of plain tensors and DTensors.
        """
        # Lightning refuses to clip for fused optimizers, which unscale in the step: here gradients are unscaled before.
        patches.set(plugin, "clip_gradients", partial(Precision.clip_gradients, plugin))
        # No bound methods, which a copy of the plugin would follow to process groups.
        patches.set(plugin, "clip_grad_by_norm", lambda optimizer, clip_val: self._clip_by_norm(optimizer, clip_val))
        patches.set(plugin, "clip_grad_by_value", lambda optimizer, clip_val: self._clip_by_value(optimizer, clip_val))
        lightning_internals.patch_after_closure(plugin, self._measure_if_asked, patches)

    def clip(self, optimizer: OneOptimizer, clip_val: float, algorithm: Literal["norm", "value"]) -> Tensor:
        """Implement :meth:`AutomodelStrategy.clip_gradients`. Returns [] the norm before clipping."""
        rescale_clip.check_clip_value(clip_val)
        if algorithm not in ("norm", "value"):
            raise ValueError(f"algorithm must be 'norm' or 'value', got {algorithm!r}.")
        self._watch.check_step(unwrap(optimizer))
        if algorithm == "norm":
            return self._clip_by_norm(optimizer, clip_val)
        norm = self._norm(optimizer)
        rescale_clip.clip_gradient_values(optimizer_parameters(unwrap(optimizer)), clip_val)
        return norm

    def _clip_by_norm(self, optimizer: OneOptimizer, clip_val: float) -> Tensor:
        norm = self._norm(optimizer)
        rescale_clip.scale_to_norm_(optimizer_parameters(unwrap(optimizer)), norm, clip_val)
        return norm

    def _clip_by_value(self, optimizer: OneOptimizer, clip_val: float) -> None:
        self._measure_if_asked(optimizer)
        rescale_clip.clip_gradient_values(optimizer_parameters(unwrap(optimizer)), clip_val)

    def _measure_if_asked(self, optimizer: OneOptimizer) -> None:
        """Measure the norm if an option asks for it and it has not been measured since the last step.

        Runs last before the optimizer steps, so that it includes what hooks did to the gradients. Whether it
        communicates depends only on earlier calls, never on this rank's gradients, so ranks stay in step.
        """
        if (self._track_norm or self._error_if_nonfinite) and unwrap(optimizer) not in self._windows.measured:
            self._norm(optimizer)

    def _norm(self, optimizer: OneOptimizer) -> Tensor:
        """[] the global 2-norm of the gradients. The first one after each step of the optimizer is reported."""
        norm = rescale_clip.total_norm(optimizer_parameters(unwrap(optimizer)))
        if self._error_if_nonfinite:
            rescale_clip.check_finite(norm, self._mesh.groups)
        self._windows.report_norm(unwrap(optimizer), norm)
        return norm
