"""Private names of what Lightning's loops collect of logged values, and their reduction by name over the ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn

from lightning_automodel.internals.patching import PatchStack

Gather = Callable[[Any], list[Any]]

NEUTRAL = {"mean": 0.0, "avg": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""Lightning's `reduce_fx`, each with the value that does not change its result."""


_OPTIONS = ("name", "prog_bar", "logger", "add_dataloader_idx", "reduce_fx", "enable_graph")
"""Options of ``self.log`` that must be the same on all ranks which reduce a value together."""


def results_of(trainer: Trainer) -> list[Any]:
    """What is logged: in training, in validations within it, and in the other stages."""
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    return [loop._results for loop in loops]


def epoch_metrics(trainer: Trainer) -> dict[str, Any]:
    """This epoch's training metrics for callbacks, from the batches so far. A collective if any is synchronised."""
    return trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["callback"]


def peek_at_epoch_metrics(trainer: Trainer, gather: Gather) -> dict[str, Any]:
    """The same of an epoch that goes on, by :func:`reduce_by_name`.

    Metrics keep nothing of it. They would compute anew after an update alone: at the epoch's end, ranks whose last
    batch was padding would not, and the others would wait for them.
    """
    results = trainer.fit_loop.epoch_loop._results
    metrics: list[nn.Module] = list(results.values())
    for result in results.values():
        if not result.is_tensor:
            metrics += result.value.modules()
    before = [dict(vars(metric)) for metric in metrics]
    reduce_by_name(results, trainer, gather)
    computed = epoch_metrics(trainer)
    for metric, attributes in zip(metrics, before, strict=True):
        vars(metric).update(attributes)
    return computed


def _log_what_others_reduce(results: Any, trainer: Trainer, gather: Gather) -> None:
    """Log what other ranks have logged over an epoch, and this one has not, so that it does not count.

    A collective if this rank has evaluated, or has something to reduce. Raises RuntimeError, on every rank, for what
    all ranks must log.
    """
    own = {}
    for key, result in results.valid_items():
        meta = result.meta
        # Ranks of a group of the user's reduce what they have logged for themselves.
        is_of_all = (
            meta.sync.should and not meta.sync.rank_zero_only and meta.sync.group in (None, dist.group.WORLD)
        )
        is_reduced = is_of_all or not result.is_tensor
        if is_reduced and meta.on_epoch and result._computed is None:
            dtype = None if meta.on_step or not result.is_tensor else result.value.dtype
            own[key] = (
                dtype,
                {
                    "fx": meta.fx.removesuffix(f".{results.dataloader_idx}"),
                    **{option: getattr(meta, option) for option in _OPTIONS},
                },
            )
    by_rank = []
    if own or not results.training:  # in training, ranks may have come to different ends of epochs
        by_rank = gather(own)
    for key, (dtype, options) in sorted({key: told[key] for told in by_rank for key in told}.items()):
        if dtype is None and not all(key in told for told in by_rank):
            raise RuntimeError(
                f"{options['name']!r} was logged on some ranks alone. TorchMetrics, and values with on_step=True and"
                " sync_dist=True, are reduced by all ranks together: log them in each batch, or in hooks of an epoch's"
                " end."
            )
        if key not in own:
            neutral = NEUTRAL[options["reduce_fx"].__name__]
            value = torch.tensor(neutral, dtype=dtype, device=trainer.strategy.root_device)
            reduce = trainer.strategy.reduce
            results.log(value=value, batch_size=0, sync_dist=True, sync_dist_fn=reduce, **options)
            # Python's own min and max return one of two infinities, in whatever dtype.
            results[key].value = results[key].value.to(dtype)


def reduce_by_name(results: Any, trainer: Trainer, gather: Gather) -> None:
    """Reduce what steps have logged over an epoch by its names: ranks may have logged in another order, or not all.

    A collective, for which all ranks must come before hooks of the epoch's end log; theirs is reduced in the order of
    logging, since a progress bar may read some of it on rank 0 earlier. ``gather`` returns an object of each rank.
    """
    _log_what_others_reduce(results, trainer, gather)
    logged = dict(results)
    results.clear()
    results.update(sorted(logged.items()))
    type(results).metrics(results, False)
    # Each result keeps what it was reduced to, so that the order is this rank's again.
    results.clear()
    results.update(logged)


def reduce_evaluated_by_name(
    trainer: Trainer, take_evaluated: Callable[[], bool], gather: Gather, patches: PatchStack
) -> None:
    """Let :func:`reduce_by_name` come first where a loader has been evaluated, as ``take_evaluated`` says once."""

    def metrics_of(results: Any, metrics: Callable[[bool], Any], on_step: bool) -> Any:
        if not on_step and take_evaluated():
            reduce_by_name(results, trainer, gather)
        return metrics(on_step)

    for results in results_of(trainer)[1:]:
        patches.set(results, "metrics", partial(metrics_of, results, results.metrics))


def compute_metrics_again(trainer: Trainer) -> None:
    """Compute anew what TorchMetrics objects are logged, which hooks may have updated since. A collective if so."""
    for result in trainer.fit_loop.epoch_loop._results.values():
        if not result.is_tensor:
            result.update(result.value, batch_size=1)  # forgets what it has computed
    epoch_metrics(trainer)


def logged_metrics(loop: Any) -> set[int]:
    """Ids of the TorchMetrics objects that were logged in ``loop``, which resets them at its end."""
    return {id(result.value) for result in loop._results.values() if not result.is_tensor}
