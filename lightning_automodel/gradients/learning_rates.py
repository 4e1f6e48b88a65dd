"""The same learning rates on all ranks, even where a scheduler follows a metric that each rank has logged by itself."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.internals.patching import PatchStack


def share_metrics(
    schedulers: Callable[[], Iterable[Any]],
    group: dist.ProcessGroup,
    say_once: Callable[[str], None],
    patches: PatchStack,
) -> None:
    """Let each ``ReduceLROnPlateau`` among ``schedulers`` follow the mean of its metric over the ranks.

    That is what ``sync_dist=True`` logs. Without it, each rank would decide by its own metric, and train its
    shards, or its copy of the model, with a learning rate of its own. The step of such a scheduler becomes a
    collective over ``group``, on the host.
    """
    # On the class: `state_dict` of a scheduler saves whatever is set on the scheduler.
    step = ReduceLROnPlateau.step

    @functools.wraps(step)
    def step_alike(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        if any(scheduler is known for known in schedulers()):
            by_rank = gather_objects(float(metrics), group)
            if any(value != by_rank[0] for value in by_rank):
                metrics = sum(by_rank) / len(by_rank)
                say_once(
                    f"The metric that {type(scheduler).__name__} monitors differs between ranks"
                    f" ({min(by_rank):.4g} to {max(by_rank):.4g}), so that it follows the mean,"
                    f" {metrics:.4g}. Log the metric with sync_dist=True."
                )
        step(scheduler, metrics, *args, **kwargs)

    patches.set(ReduceLROnPlateau, "step", step_alike)
