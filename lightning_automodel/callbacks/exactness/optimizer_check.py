"""Whether an optimizer on shards steps as the same one does on whole tensors."""

import collections
import copy
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.callbacks.exactness.recording import whole_on_host
from lightning_automodel.callbacks.exactness.replay import Gradients, Replay, distances, wide
from lightning_automodel.callbacks.exactness.results import StepResult
from lightning_automodel.distributed import collectives

_NOT_OF_A_COPY = ("param_groups", "state", "step", "zero_grad")


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer below Lightning's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def whole_states(optimizer: Optimizer, names: Mapping[int, str], keeps: bool) -> dict[str, dict[str, Any]]:
    """States by the parameter's name, whole and on the host if this rank ``keeps`` them: rank 0. A collective."""
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        found = _on_host(state)
        if keeps and id(parameter) in names:
            states[names[id(parameter)]] = found
    # Of a parameter that an owner steps whole, the owner alone has a state.
    on_first = set(collectives.broadcast_object(list(states), 0))
    elsewhere = {
        names[id(parameter)]: _on_host(state)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names and names[id(parameter)] not in on_first
    }
    for of_rank in collectives.gather_objects(elsewhere):
        states.update(of_rank if keeps else {})
    return states


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return apply_to_collection(dict(state), Tensor, whole_on_host)


class OptimizerCheck:
    """Steps a copy of the optimizer, on whole tensors, from the run's own weights, gradients and state. On rank 0.

    The weights of ``replay`` are those after :meth:`step`.
    """

    def __init__(
        self,
        replay: Replay,
        optimizer: Optimizer,
        names: Mapping[int, str],
        weights: dict[str, Tensor],
        states: dict[str, dict[str, Any]],
    ) -> None:
        self._replay, self._before = replay, weights
        replay.load(weights)
        own = dict(replay.module.named_parameters())
        self._optimizer = _copy(optimizer, names, own)
        for name, state in states.items():
            self._optimizer.state[own[name]] = {key: _placed(value, own[name]) for key, value in state.items()}

    def step(self, gradients: Gradients) -> None:
        """Step with the run's own gradients, after hooks and clipping."""
        self._replay.set_gradients(gradients)
        self._optimizer.step()
        self._replay.module.zero_grad()

    def compare_clipping(self, before: Gradients, after: Gradients, trainer: pl.Trainer, step: StepResult) -> None:
        """Compare what the module's ``on_before_optimizer_step`` and the Trainer's clipping have made of gradients.

        Nothing is said if others may have changed them too.
        """
        module, limit = self._replay.module, trainer.gradient_clip_val
        has_hook = is_overridden("on_before_optimizer_step", module)
        is_own = is_overridden("configure_gradient_clipping", module) or changes_gradients(trainer)
        if is_own or not (limit or has_hook):
            return
        expected = self._replay.before_optimizer_step(before, self._optimizer) if has_hook else before
        clipped = {name: wide(each) for name, each in expected.items()}
        norm = math.hypot(*distances(clipped, clipped, {}).values())
        if limit and "value" in str(trainer.gradient_clip_algorithm or "norm").lower():
            clipped = {name: each.clamp(-limit, limit) for name, each in clipped.items()}
        elif limit:
            clipped = {name: each * min(1.0, limit / (norm + 1e-6)) for name, each in clipped.items()}
        off = math.hypot(*distances(clipped.keys() | after.keys(), after, clipped).values())
        size = math.hypot(*distances(clipped, clipped, {}).values())
        step.clipping_error = off / size if size else 0.0
        rounding = max((torch.finfo(each.dtype).eps for each in after.values() if each is not None), default=0.0)
        step.clips_wrongly = step.clipping_error > max(1e-4, 4 * rounding)

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
