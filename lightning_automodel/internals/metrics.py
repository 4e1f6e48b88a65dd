"""Private names of TorchMetrics: a metric's state and how its lists are gathered; and where modules hold metrics."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_automodel.internals.patching import PatchStack, is_patched, overwrite

_CONTAINERS = (dict, list, tuple, deque)
_MOST_METRICS = 1000


def metric_state(metric: Metric) -> dict[str, Any]:
    """A copy of a TorchMetrics object's state, for :func:`set_metric_state`."""
    # Metrics append to list states, and do not change their tensors in place.
    states = {k: list(v) if isinstance(v, list) else v.clone() for k, v in metric.metric_state.items()}
    return {"states": states, "count": metric.update_count}


def set_metric_state(metric: Metric, saved: dict[str, Any]) -> None:
    """Restore what :func:`metric_state` returned."""
    metric.reset()
    for name, state in saved["states"].items():
        if name in metric.metric_state:
            setattr(metric, name, move_data_to_device(state, metric.device))
    overwrite(metric, "_update_count", saved["count"])


def sync_lists_by(gather: Callable[..., list[Any]], metric: Metric, patches: PatchStack) -> None:
    """Let ``gather(lists, group)`` bring the states of a metric that are lists, with an entry for each batch or image.

    TorchMetrics gathers entries one by one, or concatenates several, but not one alone: ranks with unequal numbers of
    them would call different collectives.
    """

    def sync(sync_others: Callable[..., None], dist_sync_fn: Any, process_group: Any = None) -> None:
        if metric._cache is None:
            raise RuntimeError(
                f"A shallow copy of a {type(metric).__name__} is computed, whose lists are those of the metric that was"
                " copied: call metric.clone() in place of copy.copy(metric)."
            )
        own = {name: getattr(metric, name) for name in metric._reductions}
        own = {name: state for name, state in own.items() if isinstance(state, list)}
        by_rank = []
        if own:
            # Copies: a view, such as a row of a batch, would be sent with all that it is a view of.
            sent = apply_to_collection(own, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
            by_rank = gather(sent, process_group or metric.process_group)
        for name in own:
            setattr(metric, name, [])
        sync_others(dist_sync_fn, process_group)
        for name in own:
            # Rank by rank: entries of lists with one for each batch, and with one for each sample, belong together.
            state: Any = [entry for states in by_rank for entry in states[name]]
            state = move_data_to_device(state, metric.device)
            reduce: Any = metric._reductions[name]
            if state and reduce is not None:
                state = reduce(state)
            setattr(metric, name, state)

    if not is_patched(metric, "_sync_dist"):
        patches.set(metric, "_sync_dist", partial(sync, metric._sync_dist))


def metrics_in(module: LightningModule) -> dict[str, Metric]:
    """All TorchMetrics of ``module``, of the callbacks and of the data module by name.

    Also those that are not submodules: in attributes, and in nested dicts and lists there.
    """
    trainer: Any = module.trainer
    holders: dict[str, Any] = dict(module.named_modules())
    named = dict(holders)
    # With its number too, for two of a class: another order brings nothing back, rather than the other's.
    holders |= {f"{callback.state_key} {n}": callback for n, callback in enumerate(trainer.callbacks)}
    if trainer.datamodule is not None:
        holders["data module"] = trainer.datamodule
    known = set(map(id, named.values()))
    for path, holder in holders.items():
        for number, part in enumerate(_modules_within(vars(holder))):
            if id(part) not in known:
                named |= part.named_modules(prefix=f"{path}[{number}]")
    by_id: dict[int, tuple[str, Metric]] = {}
    for name, part in named.items():
        if isinstance(part, Metric):
            by_id.setdefault(id(part), (name, part))
    return dict(by_id.values())


def _modules_within(attributes: dict[str, Any]) -> Iterator[nn.Module]:
    """The modules in nested containers. Not in more, or larger, ones than anybody has metrics, such as of samples."""
    containers: list[Any] = [attributes]
    seen = {id(attributes)}
    for container in containers:  # grows
        for value in container.values() if isinstance(container, dict) else container:
            if isinstance(value, nn.Module):
                yield value
            elif not isinstance(value, _CONTAINERS) or id(value) in seen:
                continue
            elif len(value) <= _MOST_METRICS and len(containers) < _MOST_METRICS:
                seen.add(id(value))
                containers.append(value)
