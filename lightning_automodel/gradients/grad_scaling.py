"""Keeping float16 gradients in range: a power of two for token sums, and a gradient scaler that agrees on all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_automodel import torch_internals
from lightning_automodel.gradients.token_loss import Count, WindowSums
from lightning_automodel.patching import PatchStack


class RangeScale:
    """Factor of token sums before backward: gradients of a mean fit into float16, gradients of a sum may not.

    It is a power of two, so multiplying does not round unless a value becomes subnormal. It is the same on all ranks
    throughout a window: one over the mean tokens per rank of the previous window, or of the first micro-batch of all.
    bfloat16 has the range of float32 and does not need it. It stays on the device.
    """

    def __init__(self, is_needed: bool, per_token: bool, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.factor = torch.ones((), device=device) if is_needed else None
        self._group, self._is_unset = group, is_needed and per_token

    def restore(self, factor: Tensor | None) -> None:
        """Set the factor of a saved run."""
        if self.factor is not None and factor is not None:
            self.factor, self._is_unset = factor.to(self.factor), False

    def start(self, count: Count) -> None:
        """Set the first factor by the label tokens of this micro-batch. A collective over the group, once in a run."""
        if self._is_unset and self.factor is not None:
            self._is_unset = False
            total = torch.as_tensor(count).detach().to(self.factor, copy=True)
            if self._group is not None:
                dist.all_reduce(total, group=self._group)
            self.follow(total, 1 if self._group is None else self._group.size())

    def follow(self, denominator: Tensor, divisor: int) -> None:
        """Set the factor for the next windows, by the [] denominator of the one that ends, of ``divisor`` ranks."""
        if self.factor is not None:
            factor = torch.exp2(-torch.log2(denominator / divisor).round())
            self.factor = torch.where(denominator > 0, factor.to(self.factor), self.factor)


class LossScaling:
    """The scales that multiply a loss before backward, and how they are removed from the gradients.

    A gradient scaler changes its scale whenever any optimizer steps. A window keeps the scale of its first backward
    and is divided by it when it ends, so that final gradients are unscaled. The scaler then only looks for overflow: if
    gradients are sharded, by one all-reduce of one number over all ranks, so that all or none skip a step.
    """

    def __init__(
        self,
        scaler: GradScaler | None,
        range_scale: RangeScale,
        device: torch.device,
        is_sharded: bool,
        patches: PatchStack,
    ) -> None:
        self.scaler, self.range_scale = scaler, range_scale
        self._device, self._is_sharded = device, is_sharded
        self._is_checked: dict[Optimizer, bool] = {}
        if scaler is not None:
            scaler.scale(torch.zeros((), device=device))  # torch creates the scale with the first loss
            torch_internals.patch_unscaling(scaler, self._is_checked, self._agree if is_sharded else None, patches)

    def apply(self, objective: Tensor, count: Count, sums: WindowSums) -> Tensor:
        """[] the scaled sum of ``count`` token losses. The first of a window fixes the window's scale."""
        self.range_scale.start(count)
        if sums.num_micro_batches == 0:
            scale = self.range_scale.factor
            if self.scaler is not None:
                scale = self.scaler.scale(torch.ones((), device=self._device) if scale is None else scale)
            sums.scale = scale
        return objective if sums.scale is None else objective * sums.scale.to(objective.device)

    def window_ended(self, optimizers: list[Optimizer], denominator: Tensor, divisor: int) -> None:
        """Note that these optimizers' gradients are now unscaled; for the rest see :meth:`RangeScale.follow`."""
        self._is_checked.update(dict.fromkeys(optimizers, False))
        self.range_scale.follow(denominator, divisor)

    def look_for_overflow(self, optimizer: Optimizer) -> None:
        """Must run before a step, or fused optimizers would divide by the scale. A collective if sharded."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        """After a step, gradients from outside a window (``scaler.scale(loss).backward()``) count as scaled again."""
        self._is_checked.pop(optimizer, None)

    def _agree(self, found_inf: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Set all of ``found_inf`` to 1 if any rank has found an overflow. A collective over all ranks."""
        everywhere = torch.zeros((), device=self._device)
        for found in found_inf.values():
            everywhere = torch.maximum(everywhere, found.to(self._device).reshape(()))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
        for found in found_inf.values():
            found.copy_(everywhere.expand_as(found))
        return found_inf or {self._device: everywhere}
