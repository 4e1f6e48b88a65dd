"""Keeping float16 gradients in range: a power of two for token sums, and a gradient scaler in step on all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_automodel import torch_internals
from lightning_automodel.gradients.token_loss import WindowSums
from lightning_automodel.patching import PatchStack

_TOKENS_BEFORE_ANY_STEP = 2.0**10


class RangeScale:
    """What token sums are multiplied by before backward: gradients of a mean fit into float16, those of a sum may not.

    A power of two, so that it rounds nothing while nothing becomes subnormal, and the same on all ranks throughout a
    window: one over the tokens that a rank had in the window before, or over a guess before the first. (bfloat16
    reaches as far as float32 and needs none of this.) It stays on the device.

    Args:
        is_needed: False multiplies by nothing.
        per_token: Whether losses are sums over tokens; otherwise there is one mean for each micro-batch.
        device: Where losses are.
    """

    def __init__(self, is_needed: bool, per_token: bool, device: torch.device) -> None:
        first = 1 / _TOKENS_BEFORE_ANY_STEP if per_token else 1.0
        self.factor = torch.full((), first, device=device) if is_needed else None

    def follow(self, denominator: Tensor, divisor: int) -> None:
        """Settle the factor of the windows to come.

        Args:
            denominator: [] what the loss of a window that ends is divided by, the same on all ranks.
            divisor: Number of ranks that it was summed over.
        """
        if self.factor is not None:
            factor = torch.exp2(-torch.log2(denominator / divisor).round().clamp(min=0))
            self.factor = torch.where(denominator > 0, factor.to(self.factor), self.factor)


class LossScaling:
    """All that multiplies a loss on its way into backward, and how gradients get rid of it again.

    A gradient scaler changes its scale whenever any optimizer steps. A window keeps the scale of its first backward
    and is divided by it when it ends, so that final gradients are unscaled. The scaler then only looks for overflow.

    Args:
        scaler: The precision plugin's; None where it has none or a disabled one. It stays the user's object.
        range_scale: The power of two.
        device: Where losses are, and where ranks agree.
        is_sharded: Whether a rank sees a part of the gradients only. Looking for overflow is then a collective over
            all ranks, one all-reduce of one number: all of them skip a step and lower the scale, or none.
        patches: Takes the methods that are replaced on the scaler.
    """

    def __init__(
        self,
        scaler: GradScaler | None,
        range_scale: RangeScale,
        device: torch.device,
        is_sharded: bool,
        patches: PatchStack,
    ) -> None:
        self.scaler = scaler
        self._range, self._device, self._is_sharded = range_scale, device, is_sharded
        self._is_checked: dict[Optimizer, bool] = {}
        if scaler is not None:
            scaler.scale(torch.zeros((), device=device))  # the scale itself is made with the first loss
            torch_internals.patch_unscaling(scaler, self._is_checked, self._agree if is_sharded else None, patches)

    @property
    def range_factor(self) -> Tensor | None:
        """[] the power of two of the windows to come; None where there is none."""
        return self._range.factor

    @range_factor.setter
    def range_factor(self, factor: Tensor | None) -> None:
        if self._range.factor is not None and factor is not None:
            self._range.factor = factor.to(self._range.factor)

    def apply(self, objective: Tensor, sums: WindowSums) -> Tensor:
        """[] the sum of token losses as it is to be backpropagated; the first of a window settles its scales."""
        if sums.num_micro_batches == 0:
            sums.range_scale = self._range.factor
            sums.loss_scale = None if self.scaler is None else self.scaler.scale(torch.ones((), device=self._device))
        for scale in (sums.range_scale, sums.loss_scale):
            if scale is not None:
                objective = objective * scale.to(objective.device)
        return objective

    def correction(self, sums: WindowSums) -> Tensor | None:
        """[] what turns the gradients of a window into what they were without scales; None without any."""
        correction = None
        for scale in (sums.range_scale, sums.loss_scale):
            if scale is not None:
                correction = 1 / scale if correction is None else correction / scale
        return correction

    def window_ended(self, optimizers: list[Optimizer], denominator: Tensor, divisor: int) -> None:
        """Gradients of these optimizers are unscaled now; see :meth:`RangeScale.follow` for the rest."""
        self._is_checked.update(dict.fromkeys(optimizers, False))
        self._range.follow(denominator, divisor)

    def look_for_overflow(self, optimizer: Optimizer) -> None:
        """Before a step: fused optimizers would otherwise divide by the scale. A collective where sharded."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        """Gradients that come without a window from now on (``scaler.scale(loss).backward()``) are scaled ones."""
        self._is_checked.pop(optimizer, None)

    def _agree(self, found_inf: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """1 everywhere if any rank has found an overflow on any of its devices."""
        everywhere = torch.zeros((), device=self._device)
        for found in found_inf.values():
            everywhere = torch.maximum(everywhere, found.to(self._device).reshape(()))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
        for found in found_inf.values():
            found.copy_(everywhere.expand_as(found))
        return found_inf or {self._device: everywhere}
