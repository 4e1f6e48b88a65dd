"""Training steps on padding batches: a rank without data joins the others' collectives, without effect."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import Metric

from lightning_automodel.internals import logged_values
from lightning_automodel.internals import metrics as metrics_internals
from lightning_automodel.internals.dtensor import tree_map_only


class ModuleState:
    """What steps without effect may change in a module: its buffers, and the states of TorchMetrics.

    Until :meth:`restore`, which may follow the backward, the module works with copies.
    """

    def __init__(self, module: "pl.LightningModule") -> None:
        # All of their attributes: `Running` and `MinMaxMetric` keep numbers beside their states.
        self._metrics = [
            (metric, tree_map_only(torch.Tensor, torch.Tensor.clone, dict(vars(metric))))
            for metric in metrics_internals.metrics_in(module).values()
        ]
        self._buffers = [
            (owner, name, buffer)
            for owner in module.modules()
            if not isinstance(owner, Metric)
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        for owner, name, buffer in self._buffers:
            setattr(owner, name, buffer.clone())

    def restore(self) -> None:
        """Put back what there was."""
        for owner, name, buffer in self._buffers:
            setattr(owner, name, buffer)
        for metric, attributes in self._metrics:
            vars(metric).update(attributes)


def log_neutral(log: Callable[..., None], fx: str, name: str, value: Any, **options: Any) -> None:
    """Log for a padding batch, so that the value does not count.

    A value with ``sync_dist`` is replaced by a neutral one rather than left out, since the other ranks
    reduce theirs.
    """
    # Torch.sum and the like have names.
    reduction = str(getattr(options["reduce_fx"], "__name__", options["reduce_fx"])).lower()
    if isinstance(value, Metric):
        log(fx, name, value, **options)
    elif options["sync_dist"] and not options.get("rank_zero_only"):
        if reduction not in logged_values.NEUTRAL:
            raise ValueError(
                f"self.log({name!r}, reduce_fx={reduction!r}, sync_dist=True) on a rank whose data has ended"
                " (uneven_inputs='pad') has no neutral value; valid are"
                f" {', '.join(map(repr, logged_values.NEUTRAL))}."
            )
        # Integers become the default dtype of floats.
        dtype = torch.result_type(value, 1.0)
        neutral_value = torch.full_like(value, logged_values.NEUTRAL[reduction], dtype=dtype)
        log(fx, name, neutral_value, **{**options, "batch_size": 0})
