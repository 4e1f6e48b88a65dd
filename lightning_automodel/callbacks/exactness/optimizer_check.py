"""Whether an optimizer on shards steps as the same one does on whole tensors."""

import collections
import copy
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.callbacks.exactness.recording import whole_on_host
from lightning_automodel.callbacks.exactness.replay import Gradients, Replay
from lightning_automodel.callbacks.exactness.results import StepResult

_NOT_OF_A_COPY = ("param_groups", "state", "step", "zero_grad")


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer below Lightning's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def whole_states(optimizer: Optimizer, names: Mapping[int, str], keeps: bool) -> dict[str, dict[str, Any]]:
    """States by the parameter's name, whole and on the host if this rank ``keeps`` them. A collective for shards."""
    states = {}
    for parameter, state in optimizer.state.items():
        found = {
            key: whole_on_host(value) if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in state.items()
        }
        if keeps and id(parameter) in names:
            states[names[id(parameter)]] = found
    return states


class OptimizerCheck:
    """Steps a copy of the optimizer, on whole tensors, from the run's own weights, gradients and state. On rank 0.

    The weights of ``replay`` are those after its step.
    """

    def __init__(
        self,
        replay: Replay,
        optimizer: Optimizer,
        names: Mapping[int, str],
        weights: dict[str, Tensor],
        gradients: Gradients,
        states: dict[str, dict[str, Any]],
    ) -> None:
        self._replay, self._before = replay, weights
        replay.load(weights)
        own = dict(replay.module.named_parameters())
        copied = _copy(optimizer, names, own)
        for name, state in states.items():
            copied.state[own[name]] = {key: _placed(value, own[name]) for key, value in state.items()}
        for name, gradient in gradients.items():
            own[name].grad = None if gradient is None else gradient.to(own[name].device, own[name].dtype)
        copied.step()
        replay.module.zero_grad()

    def compare(self, after: Mapping[str, Tensor], step: StepResult) -> None:
        """Fill in how far the run's weights ``after`` its step are from those of the copy."""
        rows = {}
        for name, parameter in self._replay.module.named_parameters():
            stepped = parameter.detach().double().cpu()
            eps = torch.finfo(parameter.dtype).eps if parameter.is_floating_point() else 0.0
            off = float((after[name].double() - stepped).norm())
            moved = float((stepped - self._before[name].double()).norm())
            rows[name] = (off, moved, eps * float(stepped.norm()))
        all_off, all_moved = (math.hypot(*(row[index] for row in rows.values())) for index in (0, 1))
        step.optimizer_error = all_off / all_moved if all_moved else (math.inf if all_off else 0.0)
        for name, (off, moved, rounding) in rows.items():
            if off > 1e-3 * moved + 4 * rounding + 1e-6 * all_moved:
                step.optimizer_parameters[name] = off / moved if moved else math.inf


class ClippingCheck:
    """Compares what clipping by the Trainer leaves with the same on whole gradients, at sampled entries.

    Args:
        gradients: Before clipping.
        sample: Positions of entries, by parameter.
    """

    def __init__(self, gradients: Gradients, sample: dict[str, Tensor]) -> None:
        self._sample = sample
        self._entries = self._sampled(gradients)
        squares = [float(g.double().square().sum()) for g in gradients.values() if g is not None]
        self._norm = math.sqrt(sum(squares))

    def compare(self, clipped: Gradients, trainer: pl.Trainer, step: StepResult) -> None:
        """Fill in the error, unless hooks may have changed gradients too."""
        limit, module = trainer.gradient_clip_val, trainer.lightning_module
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
        if not limit or any(is_overridden(hook, module) for hook in hooks) or changes_gradients(trainer):
            return
        if "value" in str(trainer.gradient_clip_algorithm or "norm").lower():
            expected = self._entries.clamp(-limit, limit)
        else:
            expected = self._entries * min(1.0, limit / (self._norm + 1e-6))
        size = float(expected.norm())
        step.clipping_error = float((self._sampled(clipped) - expected).norm()) / size if size else 0.0

    def _sampled(self, gradients: Gradients) -> Tensor:
        found = [torch.zeros(0, dtype=torch.float64)]
        for name, positions in self._sample.items():
            gradient = gradients.get(name)
            if gradient is not None:
                found.append(gradient.flatten()[positions].double())
        return torch.cat(found)


def changes_gradients(trainer: pl.Trainer) -> list[str]:
    """Callbacks of users that have a hook between the backward and the optimizer's step."""
    hooks = ("on_after_backward", "on_before_optimizer_step")
    return [
        type(each).__name__
        for each in trainer.callbacks  # type: ignore[attr-defined]
        if type(each).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "lightning_automodel")
        and any(is_overridden(hook, each, pl.Callback) for hook in hooks)
    ]


def _copy(optimizer: Optimizer, names: Mapping[int, str], own: Mapping[str, nn.Parameter]) -> Optimizer:
    """The same optimizer on the parameters ``own``, without state, hooks, or a call of its constructor."""
    inner = [type(value).__name__ for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inner:
        raise TypeError(f"{type(optimizer).__name__} wraps another optimizer ({inner[0]})")
    copied = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if "hooks" in name:
            vars(copied)[name] = collections.OrderedDict()
        elif name not in _NOT_OF_A_COPY:
            vars(copied)[name] = value
    copied.state = collections.defaultdict(dict)
    copied.param_groups = [
        {
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
            "params": [own[names[id(parameter)]] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return copied


def _placed(value: Any, parameter: Tensor) -> Any:
    """A state that has the parameter's shape on its device; others stay on the host, as step counts do."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and parameter.ndim:
        return value.to(parameter.device)
    return value
