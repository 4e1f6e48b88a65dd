"""Optimizers that keep their state in places where torch's own do not: a resumed run that lacks any of it differs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.checkpoint.checkpoints import AdamModule
from tests.trainer.runs import CASE


class Keeping(torch.optim.Optimizer):
    """Momentum, kept where a subclass says."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.before(group)
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.update(group, index, parameter)
        return loss

    def before(self, group: dict[str, Any]) -> None:
        """Once a step."""

    def update(self, group: dict[str, Any], index: int, parameter: Tensor) -> None:
        parameter.sub_(group["lr"] * self.direction(group, index, parameter))

    def direction(self, group: dict[str, Any], index: int, parameter: Tensor) -> Tensor:
        return parameter.grad


class HookedEntries(Keeping):
    """Adds an entry to its state dict by torch's hooks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.phase = 0
        self.register_state_dict_post_hook(lambda _, state: {**state, "phase": self.phase})
        self.register_load_state_dict_pre_hook(self._load)

    def _load(self, _: Any, state: dict[str, Any]) -> None:
        self.phase = state["phase"]

    def before(self, group: dict[str, Any]) -> None:
        self.phase += 1

    def direction(self, group: dict[str, Any], index: int, parameter: Tensor) -> Tensor:
        return parameter.grad * self.phase


class LocalMomentum(Keeping):
    """Keeps plain tensors of its rank's parts, as many optimizers that are not written for DTensors."""

    def update(self, group: dict[str, Any], index: int, parameter: Tensor) -> None:
        grad = parameter.grad
        own = parameter
        if isinstance(grad, DTensor):
            grad = grad.to_local()
            own = parameter.to_local()
        state = self.state[parameter]
        state["momentum"] = state.get("momentum", torch.zeros_like(grad)) * 0.9 + grad
        state["step"] = state.get("step", 0) + 1
        own.sub_(group["lr"] * state["momentum"] * state["step"])


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and has a state dict of a form of its own, as pytorch_optimizer's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["lr"] = 0.01 * self.count
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups
        self.count = state_dict["count"]


class InObjects(Keeping):
    """Keeps shards where nobody finds them."""

    def direction(self, group: dict[str, Any], index: int, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "hidden" not in state:
            state["hidden"] = {"set": {1}, "objects": HidesTensors(torch.zeros_like(parameter))}
        momentum = state["hidden"]["objects"].momentum.mul_(0.9).add_(parameter.grad)
        return momentum


class HidesTensors:
    """An object that is neither a dict, a list nor a dataclass."""

    def __init__(self, momentum: Tensor) -> None:
        self.momentum = momentum

    def __deepcopy__(self, memo: Any) -> HidesTensors:
        return HidesTensors(self.momentum.clone())


class CountsApart(Keeping):
    """Keeps a number in its groups that is another one on each rank."""

    def before(self, group: dict[str, Any]) -> None:
        group["seen"] = 7 + dist.get_rank()


class Module(AdamModule):
    def __init__(self, kind: Any, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters())
