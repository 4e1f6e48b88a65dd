"""The same learning rates on all ranks: a scheduler may follow a metric of its own on each."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.distributed.collectives import disagreement


def check_learning_rates(optimizers: Iterable[Optimizer], group: dist.ProcessGroup) -> None:
    """Raise RuntimeError, on every rank, if learning rates or other fractions among options differ.

    A collective over ``group``, on the host, with a read of the device where a learning rate is a tensor.
    """
    own = {
        f"{name} of {type(optimizer).__name__} (group {index} of optimizer {number})": f"{float(value):.6g}"
        for number, optimizer in enumerate(optimizers)
        for index, options in enumerate(optimizer.param_groups)
        for name, value in options.items()
        if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
    }
    if differing := disagreement(own, group):
        raise RuntimeError(
            f"Ranks step with different options of their optimizers: {differing}."
            " If a scheduler follows a metric (ReduceLROnPlateau), log the metric with"
            " sync_dist=True, so that all ranks decide alike. An optimizer that fits numbers to"
            " all of its parameters must not have owners: pass optimizer_step='shards'. Else write"
            " the same values on all ranks."
        )
