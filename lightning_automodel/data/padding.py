"""Training steps on padding batches: a rank without data joins the others' collectives, without effect."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_automodel.internals import lightning as lightning_internals

# Lightning's `reduce_fx`, each with the value that does not change its result.
_NEUTRAL = {"mean": 0.0, "avg": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


class ModuleState:
    """What steps without effect may change in a module: its buffers, and the states of TorchMetrics.

    Until :meth:`restore`, which may follow the backward, the module works with copies.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [
            (metric, lightning_internals.metric_state(metric)) for metric in metrics_in(module).values()
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
        for metric, state in self._metrics:
            lightning_internals.set_metric_state(metric, state)


def metrics_in(module: nn.Module) -> dict[str, Metric]:
    """All TorchMetrics of ``module`` by name, also those that are no submodules: in dicts and lists of its own."""
    found: dict[str, Metric] = {}
    seen: set[int] = set()

    def add(path: str, held: nn.Module) -> None:
        for name, part in held.named_modules(prefix=path):
            if isinstance(part, Metric) and id(part) not in seen:
                seen.add(id(part))
                found[name] = part

    add("", module)
    for path, owner in module.named_modules():
        for held_path, held in _held_modules(path, vars(owner)):
            add(held_path, held)
    return found


_MOST_HELD = 1000
"""Longer lists hold data, which is not searched for metrics."""


def _held_modules(path: str, held: Any, depth: int = 4) -> Iterator[tuple[str, nn.Module]]:
    """Modules in a dict, list or tuple, and in those that it holds, ``depth`` of them one in the other."""
    entries: Iterable[tuple[Any, Any]]
    if isinstance(held, dict):
        entries = held.items()
    elif isinstance(held, list | tuple):
        entries = enumerate(held)
    else:
        return
    if len(held) > _MOST_HELD or depth == 0:
        return
    for key, value in entries:
        if isinstance(value, nn.Module):
            yield f"{path}.{key}", value
        else:
            yield from _held_modules(f"{path}.{key}", value, depth - 1)


def log_neutral(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Log for a padding batch, so that the value does not count.

    A value with ``sync_dist`` is replaced by a neutral one rather than left out, since the other ranks
    reduce theirs.
    """
    given = inspect.signature(log).bind(*args, **kwargs)
    given.apply_defaults()
    value = given.arguments["value"]
    reduction = given.arguments["reduce_fx"]
    # Torch.sum and the like have names.
    reduction = str(getattr(reduction, "__name__", reduction)).lower()
    if isinstance(value, Metric):
        log(*args, **kwargs)
    elif given.arguments["sync_dist"]:
        if reduction not in _NEUTRAL:
            raise ValueError(
                f"self.log({given.arguments['name']!r}, reduce_fx={reduction!r}, sync_dist=True) on a"
                " rank whose data has ended (uneven_inputs='pad') has no neutral value; valid are"
                f" {', '.join(map(repr, _NEUTRAL))}."
            )
        tensor = torch.as_tensor(value)
        # Of integers, the default dtype of floats.
        dtype = torch.result_type(tensor, 1.0)
        neutral_value = torch.full_like(tensor, _NEUTRAL[reduction], dtype=dtype)
        log(**{**given.arguments, "value": neutral_value, "batch_size": 0})
