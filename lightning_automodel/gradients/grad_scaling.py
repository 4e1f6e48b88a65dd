"""Keeping float16 gradients in range: a power of two for token sums, and a gradient scaler that agrees on all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.token_loss import Count
from lightning_automodel.gradients.window_records import optimizer_parameters
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack

FIRST_WINDOW_HEADROOM = 16
"""How many times as many tokens as expected a first window may have before its float16 sums leave the range of means.

It costs four of the 24 powers of two between the largest gradient and the smallest that is not rounded to
zero.
"""


class LossScaling:
    """The scales that multiply a loss before backward, and how they are removed from the gradients.

    A gradient scaler changes its scale whenever any optimizer steps. A window keeps the scale that it began
    with and is divided by it when it ends, so that final gradients are unscaled. The scaler then only looks
    for overflow, in the norm of all gradients, so that all ranks or none skip a step.

    Gradients of a mean fit into float16, those of a sum over tokens may not. There sums are multiplied by
    the [] range factor, which stays on the device and is the same on all ranks: one over the tokens per rank
    of the largest window so far, rounded down to a power of two. Then what fits into float16 as a mean fits
    as this sum, and multiplying does not round unless a value becomes subnormal. Before the first window,
    the tokens of its first micro-batch are all that is known: how many follow is unknown under manual
    optimization, and so is how ragged they are. Their number is multiplied by ``FIRST_WINDOW_HEADROOM``.
    """

    def __init__(
        self,
        scaler: GradScaler | None,
        in_float16: bool,
        mesh: RunMesh,
        device: torch.device,
        patches: PatchStack,
    ) -> None:
        self.scaler = scaler
        self.range_factor: Tensor | None = None  # until a window begins
        self._in_float16 = in_float16
        self._mesh = mesh
        self._device = device
        self._is_checked: dict[Optimizer, bool] = {}
        if scaler is not None:
            scaler.scale(torch.zeros((), device=device))  # torch creates the scale with the first loss
            torch_internals.patch_unscaling(scaler, self._is_checked, self._unscale, patches)

    def restore_range(self, factor: Tensor | None) -> None:
        """Set the range factor of a saved run."""
        if self._in_float16 and factor is not None:
            self.range_factor = factor.to(self._device)

    def start_window(self, expected: Count) -> Tensor | None:
        """[] the scale of a window of about ``expected`` tokens, if any. In float16 a collective once in a run."""
        if self._in_float16 and self.range_factor is None:
            total = torch.as_tensor(expected).detach().to(self._device, torch.float32, copy=True)
            if self._mesh.sizes.divisor > 1:
                dist.all_reduce(total, group=self._mesh.group)
            self.range_factor = torch.where(total > 0, self._range_of(total * FIRST_WINDOW_HEADROOM), 1.0)
        scale = self.range_factor
        if self.scaler is None:
            return scale
        return self.scaler.scale(torch.ones((), device=self._device) if scale is None else scale)

    def window_ended(self, optimizers: list[Optimizer], denominator: Tensor) -> None:
        """Note that these optimizers' gradients are now unscaled; widen the range by the [] window's denominator."""
        self._is_checked.update(dict.fromkeys(optimizers, False))
        if self.range_factor is not None:
            self.range_factor = torch.minimum(self._range_of(denominator), self.range_factor)

    def _range_of(self, denominator: Tensor) -> Tensor:
        """[] one over a rank's share, rounded down to a power of two; infinite if there are no tokens."""
        tokens_per_rank = denominator / self._mesh.sizes.divisor
        return torch.exp2(-torch.log2(tokens_per_rank).ceil()).float()

    def stepped(self, optimizer: Optimizer) -> None:
        """After a step, gradients from outside a window (``scaler.scale(loss).backward()``) count as scaled again."""
        self._is_checked.pop(optimizer, None)

    def _unscale(self, optimizer: Optimizer) -> Tensor:
        """Unscale gradients unless they are. Returns [] 1 where they overflow. A collective if some are sharded."""
        parameters = optimizer_parameters(optimizer)
        if any(
            parameter.grad is not None and parameter.grad.dtype == torch.float16 for parameter in parameters
        ):
            raise ValueError(
                "Attempting to unscale FP16 gradients: pass a model with float32 parameters, which"
                " precision='16-mixed' computes with in float16."
            )
        if self.scaler is not None and optimizer not in self._is_checked:
            scale = self.scaler.scale(torch.ones((), device=self._device))
            rescale_clip.scale_gradients_(parameters, 1 / scale)
        return (~rescale_clip.total_norm(parameters).isfinite()).float()
