"""Modules that are no ordinary FSDP2 units: used by some ranks alone, in TorchScript, or changing their input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rank_pool import RankPool
from tests.trainer.exactness import Outcome, weight_error
from tests.trainer.row_losses import WIDTH, RowModule, RowModuleByHand, fill, fit_rows, train_rows_plainly
from tests.trainer.runs import TOLERANCE, by_default


class Dropping(nn.Module):
    """Skips one of its layers, another one on each rank; `skips` has the layer by the number of rows."""

    def __init__(self, skips: dict[int, int], starts_at: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.skips = skips
        self.starts_at = starts_at
        self.calls = 0

    def losses(self, inputs: Tensor) -> Tensor:
        skipped = self.skips.get(len(inputs)) if self.calls >= self.starts_at else None
        self.calls += 1
        inputs = self.stem(inputs)
        for index, layer in enumerate(self.layers):
            if index != skipped:
                inputs = inputs + layer(inputs)
        return inputs.square().sum(1)


class Tails(nn.Module):
    """Words of rank 0 need other tails of an adaptive softmax than those of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 12, [3, 6], div_value=2.0)

    def losses(self, inputs: Tensor) -> Tensor:
        first = {2: 0, 3: 3}.get(len(inputs), 6)
        return -self.head(torch.tanh(self.stem(inputs)), first + torch.arange(len(inputs)) % 3).output


class Scripted(nn.Module):
    """Blocks and a head in TorchScript, beside a layer of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList(torch.jit.script(fill(block)) for block in blocks)
        self.head = torch.jit.script(fill(nn.Linear(WIDTH, WIDTH)))

    def losses(self, inputs: Tensor) -> Tensor:
        inputs = self.stem(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs).square().sum(1)


class PreActivation(nn.Module):
    """Each block begins by changing its input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        )

    def losses(self, inputs: Tensor) -> Tensor:
        return self.blocks(self.stem(inputs)).square().sum(1)


class Solve(torch.autograd.Function):
    """An explicit step of an ordinary differential equation, with the adjoint method's backward."""

    @staticmethod
    def forward(ctx: Any, function: nn.Module, state: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function = function
        ctx.parameters = parameters
        ctx.save_for_backward(state)
        with torch.no_grad():
            return state + 0.1 * function(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            state = ctx.saved_tensors[0].detach().requires_grad_()
            moved = state + 0.1 * ctx.function(state)
            return None, *torch.autograd.grad(moved, (state, *ctx.parameters), gradient, allow_unused=True)


class Adjoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.function = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def losses(self, inputs: Tensor) -> Tensor:
        return Solve.apply(self.function, self.stem(inputs), *self.function.parameters()).square().sum(1)


class FunctionalCalls(nn.Module):
    """Calls its blocks with other tensors in the place of their weights, and with the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.makes_weights = nn.Linear(1, WIDTH * WIDTH)

    def losses(self, inputs: Tensor) -> Tensor:
        weight = self.makes_weights(inputs.new_ones(1)).unflatten(0, (WIDTH, WIDTH))
        hidden = inputs
        for block in self.blocks:
            hidden = torch.tanh(torch.func.functional_call(block, {"weight": weight}, (hidden,)))
        for block in self.blocks:
            hidden = torch.tanh(torch.func.functional_call(block, {"weight": 2 * weight}, (hidden,)))
        for _ in range(2):
            hidden = torch.func.functional_call(
                self.blocks[0], dict(self.blocks[0].named_parameters()), hidden
            )
        return self.blocks[1](hidden).square().sum(1)


class LooksAhead(nn.Module):
    """Computes in inference mode first, as rollouts do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def losses(self, inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            ahead = self.net(inputs)
        return (self.net(inputs) - 0.5 * ahead.clone()).square().sum(1)


SAME_NUMBER = {2: 0, 3: 1, 5: 1, 6: 2}
ANOTHER_NUMBER = {2: 0, 3: 1, 6: 2}
MODELS: dict[str, Any] = {
    "same number": lambda: Dropping(SAME_NUMBER),
    "another number": lambda: Dropping(ANOTHER_NUMBER),
    "later": lambda: Dropping(SAME_NUMBER, starts_at=2),
    "Tails": Tails,
    "Scripted": Scripted,
    "PreActivation": PreActivation,
    "Adjoint": Adjoint,
    "FunctionalCalls": FunctionalCalls,
    "LooksAhead": LooksAhead,
}
DROPPED = "Ranks have used different FSDP units in the forwards of one accumulation window"
MESSAGES = {
    "same number": DROPPED,
    "later": DROPPED,
    "PreActivation": "An FSDP unit changes its input in place",
    "Adjoint": "got a gradient that it does not reduce",
    "FunctionalCalls": "torch.func.functional_call puts other tensors in the place of parameters",
}
"""What is said of those that are refused with the default units."""


REMEDY: dict[str, Any] = {"auto_wrap_policy": set()}
LAYOUTS: dict[str, tuple[type[RowModule], dict[str, Any]]] = {
    "kept": (RowModule, {"reshard_during_accumulation": False}),
    "resharded": (RowModule, {"reshard_during_accumulation": True}),
    "by hand": (RowModuleByHand, {}),
    "remedy": (RowModule, REMEDY),
    "remedy, resharded": (RowModule, {**REMEDY, "reshard_during_accumulation": True}),
    "ddp": (RowModule, {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}),
}


def _fit(name: str, layout: str) -> dict[str, Tensor] | str:
    make, options = LAYOUTS[layout]
    return fit_rows(make(MODELS[name]), options)


CASES = {f"{name}, {layout}": (name, layout) for name in MODELS for layout in LAYOUTS}
del CASES["later, by hand"]  # every call counts there
for _layout in ("kept", "resharded", "by hand"):
    del CASES[f"another number, {_layout}"]  # ranks wait for each other in a gather
DEFAULT = (
    "same number, kept",
    "another number, remedy",
    "later, kept",
    "same number, remedy",
    "Tails, kept",
    "Scripted, kept",
    "Scripted, by hand",
    "PreActivation, kept",
    "PreActivation, remedy",
    "Adjoint, kept",
    "Adjoint, remedy, resharded",
    "FunctionalCalls, kept",
    "FunctionalCalls, remedy",
    "LooksAhead, kept",
)


@pytest.mark.every_case
@pytest.mark.parametrize("case", by_default(CASES, *DEFAULT))
def test_units_out_of_the_ordinary(pool2: RankPool, case: tuple[str, str]) -> None:
    """Right, or refused on every rank with a remedy that is right."""
    name, layout = case
    expected = train_rows_plainly(MODELS[name]())
    is_refused = name in MESSAGES and layout in ("kept", "resharded", "by hand")
    for found in pool2.run(_fit, name, layout):
        if is_refused:
            assert isinstance(found, str)
            assert MESSAGES[name] in found
            assert "auto_wrap_policy=set()" in found
        else:
            assert not isinstance(found, str), found
            assert weight_error(Outcome(found), expected) <= TOLERANCE
