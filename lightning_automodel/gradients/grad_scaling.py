"""Keeping float16 gradients in range: a power of two for token sums, and a gradient scaler in step on all ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_automodel import torch_internals
from lightning_automodel.gradients.token_loss import LossWindow

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

    A gradient scaler changes its scale, and forgets which gradients it has unscaled, whenever any optimizer steps. Here
    a window keeps the scale of its first backward, and gradients that clipping by hand has unscaled are not unscaled
    again by the step. The scaler stays the user's object; methods are replaced on it until :meth:`close`.

    Args:
        scaler: The precision plugin's; None where it has none or a disabled one.
        range_scale: The power of two.
        window_of: The window of an optimizer.
        device: Where losses are, and where ranks agree.
        is_sharded: Whether a rank sees a part of the gradients only. Unscaling is then a collective over all ranks, one
            all-reduce of one number: all of them skip a step and lower the scale, or none.
    """

    def __init__(
        self,
        scaler: GradScaler | None,
        range_scale: RangeScale,
        window_of: Callable[[Optimizer], LossWindow],
        device: torch.device,
        is_sharded: bool,
    ) -> None:
        self.scaler = scaler
        self._range, self._window_of, self._device = range_scale, window_of, device
        self._is_sharded = is_sharded
        if scaler is not None:
            scaler.scale(torch.zeros((), device=device))  # the scale itself is made with the first loss

    def take_over(self, finish: Callable[[Optimizer], object]) -> None:
        """Let whoever calls the scaler's ``unscale_`` call ``finish``, which makes gradients final by :meth:`unscale`.

        A user who clips by hand may be the first, and another optimizer's step may change the scale after that.
        """
        if self.scaler is not None:
            torch_internals.replace_unscaling(self.scaler, finish, self._agree if self._is_sharded else None)

    @property
    def range_factor(self) -> Tensor | None:
        """[] the power of two of the windows to come; None where there is none."""
        return self._range.factor

    @range_factor.setter
    def range_factor(self, factor: Tensor | None) -> None:
        if self._range.factor is not None and factor is not None:
            self._range.factor = factor.to(self._range.factor)

    def apply(self, objective: Tensor, window: LossWindow) -> Tensor:
        """[] the sum of token losses as it is to be backpropagated; the first of a window settles its scales."""
        if window.num_micro_batches == 0:
            window.range_scale = self._range.factor
            window.loss_scale = None if self.scaler is None else torch_internals.current_scale(self.scaler).clone()
        for scale in (window.range_scale, window.loss_scale):
            if scale is not None:
                objective = objective * scale.to(objective.device)
        return objective

    def correction(self, window: LossWindow) -> Tensor | float:
        """What the gradients of a window are to be multiplied by; :meth:`unscale` does the rest."""
        correction: Tensor | float = 1.0
        if self._range.factor is not None:
            applied = self._range.factor if window.range_scale is None else window.range_scale
            correction = 1 / applied
        if self.scaler is not None and window.loss_scale is not None:
            correction = correction * (torch_internals.current_scale(self.scaler) / window.loss_scale)
        return correction

    def follow(self, denominator: Tensor, divisor: int) -> None:
        """See :meth:`RangeScale.follow`."""
        self._range.follow(denominator, divisor)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale and look for overflow, once a window; where sharded, a collective.

        Later calls only remind the scaler that it is done: it forgets, and fused optimizers would divide once more.
        """
        if self.scaler is None:
            return
        window = self._window_of(optimizer)
        if window.found_inf is None:
            window.found_inf = torch_internals.unscale_anew(self.scaler, optimizer)
        else:
            torch_internals.restore_unscaled(self.scaler, optimizer, window.found_inf)

    def _agree(self, found_inf: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """1 everywhere if any rank has found an overflow on any of its devices."""
        everywhere = torch.zeros((), device=self._device)
        for found in found_inf.values():
            everywhere = torch.maximum(everywhere, found.to(self._device).reshape(()))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
        for found in found_inf.values():
            found.copy_(everywhere.expand_as(found))
        return found_inf or {self._device: everywhere}

    def close(self) -> None:
        """Give the scaler back as it came."""
        if self.scaler is not None:
            torch_internals.give_back_unscaling(self.scaler)
