"""The running metrics of a fit: what ``self.log`` has gathered in the epoch, and the states of TorchMetrics objects."""

import builtins
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_automodel import lightning_internals

_RESULT_FIELDS = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
_META_FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_NOT_OTHERS = ("training", "_update_count", "_computed", "_forward_cache")
_SEEN_BY_CALLBACKS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class RunningMetrics:
    """Notes and restores running metrics.

    Lightning replaces what it accumulates with every batch, so that a reference is a note; TorchMetrics objects change
    theirs in place, so that their states are copied, those that changed since the last note.
    """

    def __init__(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        self._trainer, self._module = trainer, module
        self._objects: dict[str, Metric] = {}
        self._at_first: dict[str, dict[str, Any]] = {}
        self._noted: dict[str, dict[str, Any]] = {}
        self.look_again()

    def look_again(self) -> None:
        """Look for TorchMetrics objects that the module has by now."""
        self._objects = {name: metric for name, metric in self._module.named_modules() if isinstance(metric, Metric)}
        self._at_first = {name: _others(metric) for name, metric in self._objects.items()} | self._at_first

    def note(self) -> dict[str, Any]:
        """What there is now. Synchronises nothing."""
        connector = self._trainer._logger_connector
        results = self._trainer.fit_loop.epoch_loop._results
        self._noted = {name: self._note_object(name, metric) for name, metric in self._objects.items()}
        return {
            "first_batch": connector._first_loop_iter,
            "hook": connector._current_fx,
            "seen": {name: dict(getattr(connector, name)) for name in _SEEN_BY_CALLBACKS},
            "results": {key: _note_result(metric) for key, metric in results.items()},
            "objects": self._noted,
        }

    def _note_object(self, name: str, metric: Metric) -> dict[str, Any]:
        states = {key: getattr(metric, key) for key in metric._defaults}
        noted = self._noted.get(name)
        others = {key: value for key, value in _others(metric).items() if self._is_changed(name, key, value)}
        if noted is not None and noted["count"] == metric._update_count and _are_same(noted["originals"], states):
            return {**noted, "others": others}
        return {
            "others": others,
            "count": metric._update_count,
            "computed": metric._computed,
            "cache": metric._forward_cache,
            "originals": states,
            "states": {key: list(state) if isinstance(state, list) else state.clone() for key, state in states.items()},
        }

    def _is_changed(self, name: str, key: str, value: Any) -> bool:
        at_first = self._at_first[name]
        return isinstance(value, Tensor) or key not in at_first or at_first[key] != value

    def restore(self, saved: dict[str, Any], device: torch.device) -> None:
        """Put back what was noted, as a checkpoint holds it, with its tensors on ``device``."""
        connector = self._trainer._logger_connector
        connector._first_loop_iter, connector._current_fx = saved["first_batch"], saved["hook"]
        for name, metrics in saved["seen"].items():
            setattr(connector, name, _moved(metrics, device))
        for name, state in saved["objects"].items():
            if name in self._objects:
                _restore_object(self._objects[name], state)
        results = self._trainer.fit_loop.epoch_loop._results
        results.clear()
        told = {key: state for key, state in saved["results"].items() if not state["meta"]["sync"]["in_group"]}
        for key, state in told.items():
            results[key] = self._restored_result(state, device)
        self._restore_when_logged({key: saved["results"][key] for key in saved["results"].keys() - told}, device)

    def _restore_when_logged(self, waiting: dict[str, Any], device: torch.device) -> None:
        """Put back what a group of the user's reduces, once it is logged again in this epoch, which tells the group."""
        results = self._trainer.fit_loop.epoch_loop._results
        progress: Any = self._trainer.fit_loop.epoch_progress.current
        update, epoch = results.update_metrics, progress.processed

        def restore_and_update(key: str, value: Any, batch_size: int) -> None:
            if progress.processed == epoch and key in waiting:
                _fill(results[key], waiting.pop(key), device)
            if progress.processed != epoch or not waiting:
                del results.update_metrics
            update(key, value, batch_size)

        if waiting:
            results.update_metrics = restore_and_update

    def _restored_result(self, saved: dict[str, Any], device: torch.device) -> Any:
        meta = lightning_internals.ResultMetadata(
            **saved["meta"]["fields"], reduce_fx=_reduction(saved["meta"]["reduce_fx"])
        )
        sync = saved["meta"]["sync"]
        meta.sync = lightning_internals.ResultSync(
            fn=self._trainer.strategy.reduce, _should=sync["should"], rank_zero_only=sync["rank_zero_only"]
        )
        metric = lightning_internals.ResultMetric(meta, saved["is_tensor"])
        if not saved["is_tensor"]:
            metric.value = self._module.get_submodule(saved["meta"]["fields"]["metric_attribute"])
        _fill(metric, saved, device)
        return metric


def savable(noted: dict[str, Any]) -> dict[str, Any]:
    """A note as a checkpoint holds it."""
    objects = {name: _savable_object(state) for name, state in noted["objects"].items()}
    results = {key: _savable_result(state) for key, state in noted["results"].items()}
    return {**noted, "objects": objects, "results": results}


def _savable_object(noted: dict[str, Any]) -> dict[str, Any]:
    kept = {name: noted[name] if _is_plain(noted[name]) else None for name in ("computed", "cache")}
    return {"count": noted["count"], "states": noted["states"], "others": noted["others"], **kept}


def _others(metric: Metric) -> dict[str, Any]:
    """What a metric keeps beside its states, such as the extremes of one that wraps another, or what it casts to."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in vars(metric).items()
        if type(value) in (Tensor, bool, int, float, str, torch.dtype, type(None))
        and key not in metric._defaults
        and key not in _NOT_OTHERS
    }


def _are_same(noted: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(noted[key] is state and not isinstance(state, list) for key, state in now.items())


def _note_result(metric: Any) -> dict[str, Any]:
    fields = {name: getattr(metric, name) for name in _RESULT_FIELDS if hasattr(metric, name)}
    if not metric.is_tensor:
        fields.pop("value")
    dtypes = {name: default.dtype for name, default in metric._defaults.items()}
    return {"meta": metric.meta, "is_tensor": metric.is_tensor, "fields": fields, "dtypes": dtypes}


def _savable_result(noted: dict[str, Any]) -> dict[str, Any]:
    meta = noted["meta"]
    reduce_fx, in_group = meta.reduce_fx, meta.sync.group is not None
    told = {
        "fields": {name: getattr(meta, name) for name in _META_FIELDS},
        "reduce_fx": (reduce_fx.__name__, reduce_fx is getattr(builtins, reduce_fx.__name__, None)),
        "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "in_group": in_group},
    }
    fields = {name: value for name, value in noted["fields"].items() if _is_plain(value)}
    dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in noted["dtypes"].items()}
    return {"meta": told, "is_tensor": noted["is_tensor"], "fields": fields, "dtypes": dtypes}


def _is_plain(value: Any) -> bool:
    """Whether ``weights_only`` loads it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def _reduction(saved: tuple[str, bool]) -> Callable[..., Any]:
    name, is_builtin = saved
    return getattr(builtins if is_builtin else torch, name)


def _fill(metric: Any, saved: dict[str, Any], device: torch.device) -> None:
    """Give a result of Lightning's what it had gathered."""
    for name, value in saved["fields"].items():
        setattr(metric, name, value)
    for name, dtype in saved["dtypes"].items():
        metric._defaults[name] = metric._defaults[name].to(getattr(torch, dtype))
    if saved["is_tensor"]:
        metric.to(device)


def _restore_object(metric: Metric, saved: dict[str, Any]) -> None:
    for key, state in saved["states"].items():
        if key in metric._defaults:
            setattr(metric, key, _moved(state, metric.device))
    for key, value in saved["others"].items():
        setattr(metric, key, _moved(value, metric.device))
    metric._update_count = saved["count"]
    metric._computed = _moved(saved["computed"], metric.device)
    metric._forward_cache = _moved(saved["cache"], metric.device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value
