"""TorchMetrics over the ranks that hold different data, of which some may have more than others."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_automodel.distributed.collectives import gather_objects, gathers
from lightning_automodel.internals.metrics import sync_lists_by
from lightning_automodel.internals.patching import PatchStack


def synchronise_over(
    with_other_data: dist.ProcessGroup, metrics: Iterable[Metric], patches: PatchStack
) -> None:
    """Let metrics synchronise over the ranks ``with_other_data``. Not a collective.

    By default they synchronise over the world, and wait for ranks that have ended, or have fewer entries in a list. A
    metric with a ``dist_sync_fn`` of its own is left as it is.
    """
    gather = _Gather(with_other_data)
    for metric in metrics:
        if metric.dist_sync_fn is None:
            patches.set(metric, "dist_sync_fn", gather)
        if isinstance(metric.dist_sync_fn, _Gather):
            sync_lists_by(gather, metric, patches)


class _Gather:
    """A ``dist_sync_fn``. Copies of a metric, which users make in mid-run, have the same one; pickled, it has none."""

    def __init__(self, with_other_data: dist.ProcessGroup) -> None:
        self._with_other_data = with_other_data

    def __call__(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """What each rank has: tensors, or objects with the lists of one metric."""
        gathers.check()
        group = group or self._with_other_data
        if isinstance(value, Tensor):
            return gather_all_tensors(value, group)
        return gather_objects(value, group)

    def __deepcopy__(self, memo: Any) -> "_Gather":
        return self

    def __reduce__(self) -> Any:
        return type(None), ()
