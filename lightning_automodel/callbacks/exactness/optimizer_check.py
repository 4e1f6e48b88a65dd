"""Checks whether an optimizer on shards steps like the same optimizer on whole tensors."""

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
from lightning_automodel.callbacks.exactness.replay import Gradients, Replay, distances, norm_of, wide
from lightning_automodel.callbacks.exactness.results import StepResult, relative
from lightning_automodel.distributed import collectives

_NOT_OF_A_COPY = ("param_groups", "state", "step", "zero_grad")


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer below Lightning's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def whole_states(optimizer: Optimizer, names: Mapping[int, str], keeps: bool) -> dict[str, dict[str, Any]]:
    """States by parameter name, whole and on the host, if this rank ``keeps`` them (rank 0). A collective."""
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        on_host = _on_host(state)
        if keeps and id(parameter) in names:
            states[names[id(parameter)]] = on_host
    # Only its owner has the state of a parameter that is stepped whole.
    on_first = set(collectives.broadcast_object(list(states), 0))
    elsewhere = {
        names[id(parameter)]: _on_host(state)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names and names[id(parameter)] not in on_first
    }
    for of_rank in collectives.gather_objects(elsewhere):
        if keeps:
            states.update(of_rank)
    return states


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return apply_to_collection(dict(state), Tensor, whole_on_host)


class OptimizerCheck:
    """Steps a copy of the optimizer on whole tensors, from the run's weights, gradients and state, on rank 0.

    :meth:`step` changes the weights of ``replay``.
    """

    def __init__(
        self,
        replay: Replay,
        optimizer: Optimizer,
        names: Mapping[int, str],
        weights: dict[str, Tensor],
        states: dict[str, dict[str, Any]],
    ) -> None:
        self._replay = replay
        self._before = weights
        replay.load(weights)
        own = dict(replay.module.named_parameters())
        self._optimizer = _copy(optimizer, names, own)
        for name, state in states.items():
            self._optimizer.state[own[name]] = {
                key: _placed(value, own[name]) for key, value in state.items()
            }

    def step(self, gradients: Gradients) -> None:
        """Step with the run's gradients, after hooks and clipping."""
        self._replay.set_gradients(gradients)
        self._optimizer.step()
        self._replay.module.zero_grad()

    def compare_clipping(
        self,
        before: Gradients,
        after: Gradients,
        trainer: pl.Trainer,
        step: StepResult,
    ) -> None:
        """Compare the effects of ``on_before_optimizer_step`` and clipping with those on whole gradients.

        Compares nothing if other code may have changed the gradients too.
        """
        module = self._replay.module
        limit = trainer.gradient_clip_val
        has_hook = is_overridden("on_before_optimizer_step", module)
        is_own = is_overridden("configure_gradient_clipping", module) or changes_gradients(trainer)
        if is_own or not (limit or has_hook):
            return
        if has_hook:
            before = self._replay.before_optimizer_step(before, self._optimizer)
        clipped = {name: wide(gradient) for name, gradient in before.items()}
        norm = norm_of(distances(clipped, clipped, {}))
        if limit and "value" in str(trainer.gradient_clip_algorithm or "norm").lower():
            clipped = {name: gradient.clamp(-limit, limit) for name, gradient in clipped.items()}
        elif limit:
            factor = min(1.0, limit / (norm + 1e-6))
            clipped = {name: gradient * factor for name, gradient in clipped.items()}
        off = norm_of(distances(clipped.keys() | after.keys(), after, clipped))
        size = norm_of(distances(clipped, clipped, {}))
        if size:
            step.clipping_error = off / size
        else:
            step.clipping_error = 0.0
        dtypes = [gradient.dtype for gradient in after.values() if gradient is not None]
        rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        step.clips_wrongly = step.clipping_error > max(1e-4, 4 * rounding)

    def compare(self, after: Mapping[str, Tensor], step: StepResult) -> None:
        """Fill in the distance of the run's weights ``after`` its step from those of the copy."""
        rows = {}
        for name, parameter in self._replay.module.named_parameters():
            stepped = parameter.detach().double().cpu()
            if parameter.is_floating_point():
                eps = torch.finfo(parameter.dtype).eps
            else:
                eps = 0.0
            off = float((after[name].double() - stepped).norm())
            moved = float((stepped - self._before[name].double()).norm())
            rows[name] = (off, moved, eps * float(stepped.norm()))
        all_off, all_moved = (math.hypot(*(row[index] for row in rows.values())) for index in (0, 1))
        step.optimizer_error = relative(all_off, all_moved)
        for name, (off, moved, rounding) in rows.items():
            if off > 1e-3 * moved + 4 * rounding + 1e-6 * all_moved:
                step.optimizer_parameters[name] = relative(off, moved)


def changes_gradients(trainer: pl.Trainer) -> list[str]:
    """Callbacks of users that have a hook between the backward and the optimizer's step."""
    hooks = ("on_after_backward", "on_before_optimizer_step")
    packages = ("lightning", "pytorch_lightning", "lightning_automodel")
    return [
        type(callback).__name__
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if type(callback).__module__.partition(".")[0] not in packages
        and any(is_overridden(hook, callback, pl.Callback) for hook in hooks)
    ]


def _copy(optimizer: Optimizer, names: Mapping[int, str], own: Mapping[str, nn.Parameter]) -> Optimizer:
    """The same optimizer on the parameters ``own``, without state, hooks, or a call of its constructor.

    It shares what is neither a tensor nor a collection: modules and functions are the run's own. Raises
    TypeError for an optimizer that wraps another.
    """
    inner = [type(value).__name__ for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inner:
        raise TypeError(f"{type(optimizer).__name__} wraps another optimizer ({inner[0]})")
    copied = type(optimizer).__new__(type(optimizer))
    parameter_of: dict[int, Any] = {key: own[name] for key, name in names.items() if name in own}
    for name, value in vars(optimizer).items():
        if "hooks" in name:
            vars(copied)[name] = collections.OrderedDict()
        elif name in _NOT_OF_A_COPY:
            continue
        elif isinstance(value, Tensor | list | tuple | dict | set):
            # A step of the copy must not count in the run's own list, or write to its parameters.
            vars(copied)[name] = copy.deepcopy(value, parameter_of)
        else:
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
    """A state of the parameter's shape on its device; others, such as step counts, stay on the host."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and parameter.ndim:
        return value.to(parameter.device)
    return value
