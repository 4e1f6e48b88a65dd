"""Modules that are no ordinary FSDP2 units: used by some ranks alone, in TorchScript, changing their input, opened."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.sharding.fits import check_exact, fit
from tests.trainer.exactness import VOCABULARY, WIDTH, Block, Outcome, weight_error
from tests.trainer.plain import ModelModule, fill
from tests.trainer.row_losses import WIDTH as ROW
from tests.trainer.row_losses import RowModule, RowModuleByHand, fit_rows, train_rows_plainly
from tests.trainer.row_losses import fill as filled_rows
from tests.trainer.runs import TOLERANCE, by_default, loader, make_trainer


class Dropping(nn.Module):
    """Skips one of its layers, another one on each rank; `skips` has the layer by the number of rows."""

    def __init__(self, skips: dict[int, int], starts_at: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(ROW, ROW)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh()) for _ in range(3))
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


class Heads(nn.Module):
    """Runs all of its heads, and has a loss of one, another one on each rank."""

    def __init__(self, reaches_all: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(ROW, ROW)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh()) for _ in range(3))
        self.reaches_all = reaches_all

    def losses(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        losses = [head(hidden).square().sum(1) for head in self.heads]
        loss = losses[SAME_NUMBER[len(inputs)]]
        if self.reaches_all:
            loss = loss + 0 * sum(losses)
        return loss


class Scripted(nn.Module):
    """Blocks and a head in TorchScript, beside a layer of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(ROW, ROW)
        blocks = [nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList(torch.jit.script(filled_rows(block)) for block in blocks)
        self.head = torch.jit.script(filled_rows(nn.Linear(ROW, ROW)))

    def losses(self, inputs: Tensor) -> Tensor:
        inputs = self.stem(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs).square().sum(1)


class PreActivation(nn.Module):
    """Each block begins by changing its input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(ROW, ROW)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(ROW, ROW)) for _ in range(3))
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
        self.stem = nn.Linear(ROW, ROW)
        self.function = nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh(), nn.Linear(ROW, ROW))

    def losses(self, inputs: Tensor) -> Tensor:
        return Solve.apply(self.function, self.stem(inputs), *self.function.parameters()).square().sum(1)


class FunctionalCalls(nn.Module):
    """Calls its blocks with other tensors in the place of their weights, and with the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(ROW, ROW) for _ in range(2))
        self.makes_weights = nn.Linear(1, ROW * ROW)

    def losses(self, inputs: Tensor) -> Tensor:
        weight = self.makes_weights(inputs.new_ones(1)).unflatten(0, (ROW, ROW))
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


SAME_NUMBER = {2: 0, 3: 1, 5: 1, 6: 2}
ANOTHER_NUMBER = {2: 0, 3: 1, 6: 2}
MODELS: dict[str, Any] = {
    "same number": lambda: Dropping(SAME_NUMBER),
    "another number": lambda: Dropping(ANOTHER_NUMBER),
    "later": lambda: Dropping(SAME_NUMBER, starts_at=2),
    "in the last micro-batch": lambda: Dropping(SAME_NUMBER, starts_at=3),
    "Heads": Heads,
    "Heads, all in the loss": lambda: Heads(reaches_all=True),
    "Scripted": Scripted,
    "PreActivation": PreActivation,
    "Adjoint": Adjoint,
    "FunctionalCalls": FunctionalCalls,
}
DROPPED = (
    "Ranks have used different FSDP units, or trained different parameters of one, since they last compared"
)
MESSAGES = {
    "same number": DROPPED,
    "later": DROPPED,
    "in the last micro-batch": DROPPED,
    "Heads": DROPPED,
    "PreActivation": "An FSDP unit changes its input in place",
    "Adjoint": "got a gradient that it does not reduce",
    "FunctionalCalls": "torch.func.functional_call puts other tensors in the place of parameters",
}
"""What is said of those that are refused with the default units."""


REMEDY: dict[str, Any] = {"auto_wrap_policy": set()}
LAYOUTS: dict[str, tuple[type[RowModule], dict[str, Any]]] = {
    "kept": (RowModule, {"reshard_during_accumulation": False}),
    "by hand": (RowModuleByHand, {}),
    "remedy": (RowModule, REMEDY),
    "remedy, resharded": (RowModule, {**REMEDY, "reshard_during_accumulation": True}),
}
DEFAULT = (
    "same number, kept",
    "another number, remedy",
    "later, kept",
    "in the last micro-batch, kept",
    "Heads, kept",
    "Heads, all in the loss, kept",
    "Scripted, by hand",
    "PreActivation, kept",
    "Adjoint, kept",
    "Adjoint, remedy, resharded",
    "FunctionalCalls, kept",
    "FunctionalCalls, remedy",
)
CASES = {f"{name}, {layout}": (name, layout) for name in MODELS for layout in LAYOUTS}
del CASES["later, by hand"], CASES["in the last micro-batch, by hand"]  # every call counts there
del CASES["another number, kept"], CASES["another number, by hand"]  # ranks wait for each other in a gather


def _fit(name: str, layout: str) -> dict[str, Tensor] | str:
    make, options = LAYOUTS[layout]
    return fit_rows(make(MODELS[name]), options)


@pytest.mark.every_case
@pytest.mark.parametrize("case", by_default(CASES, *DEFAULT))
def test_units_out_of_the_ordinary(pool2: RankPool, case: tuple[str, str]) -> None:
    """Right, or refused on every rank with a remedy that is right."""
    name, layout = case
    expected = train_rows_plainly(MODELS[name]())
    is_refused = name in MESSAGES and layout in ("kept", "by hand")
    for found in pool2.run(_fit, name, layout):
        if is_refused:
            assert isinstance(found, str)
            assert MESSAGES[name] in found
            assert "auto_wrap_policy=set()" in found
        else:
            assert not isinstance(found, str), found
            assert weight_error(Outcome(found), expected) <= TOLERANCE


def _layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)), nn.Tanh()
    )


class Stack(nn.Module):
    """A class around a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)


class Opened(nn.Module):
    """The modules of its blocks are called, and the blocks are not."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.stack = self.make_stack()
        fill(self)

    def make_stack(self) -> nn.Module:
        return nn.ModuleList(Stack() for _ in range(2))

    def use(self, layers: Any, hidden: Tensor) -> Tensor:
        return layers.layers(hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layers in self.stack:
            hidden = torch.tanh(hidden + self.use(layers, hidden))
        return self.head(hidden)


class Iterated(Opened):
    """As scvi-tools: a Sequential of Sequentials, none of which is called."""

    def make_stack(self) -> nn.Module:
        return nn.Sequential(OrderedDict((f"layer {i}", _layers()) for i in range(3)))

    def use(self, layers: Any, hidden: Tensor) -> Tensor:
        for layer in layers:
            hidden = layer(hidden)
        return hidden


def _message(make_model: type[Opened]) -> str:
    with pytest.raises(RuntimeError) as raised:
        fit(make_model, {})
    return str(raised.value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make_model", "policy"), [(Opened, {nn.Sequential}), (Iterated, {nn.Linear, Block})]
)
def test_a_unit_that_is_not_called(pool2: RankPool, make_model: type[Opened], policy: Any) -> None:
    """Calling it, or giving the classes that are called, is what the message says. The latter trains."""
    for message in pool2.run(_message, make_model):
        assert "got a gradient that it does not reduce" in message
        assert "call the unit itself" in message
        assert "pass an auto_wrap_policy with the classes of what is called" in message
    check_exact(pool2, make_model, {"auto_wrap_policy": policy})


def _evaluate(options: dict[str, Any]) -> float:
    module = ModelModule(Opened())
    module.test_step = lambda batch, batch_idx: module.log("loss", module(batch).nan_to_num(), batch_size=1)
    (results,) = make_trainer(AutomodelStrategy(**options)).test(module, loader(), verbose=False)
    return results["loss"]


def test_a_unit_that_is_not_called_in_evaluation(pool2: RankPool) -> None:
    """Shards compute as whole tensors."""
    replicated = pool2.run(_evaluate, {"data_parallel": "ddp"})
    assert min(replicated) > 0
    assert pool2.run(_evaluate, {}) == pytest.approx(replicated, rel=TOLERANCE)


def _switch_validation_off() -> tuple[bool, str]:
    module = ModelModule(Opened())
    module.validation_step = None
    module.test_step = lambda batch, batch_idx: module.log("loss", module(batch), batch_size=1)
    trainer = make_trainer(
        AutomodelStrategy(auto_wrap_policy={nn.Sequential}), limit_train_batches=1, limit_test_batches=1
    )
    trainer.fit(module, loader(), loader())
    results = trainer.test(module, loader())
    return module.validation_step is None and "loss" in results[0], type(module).__name__


def test_a_step_that_is_switched_off_and_a_class_that_keeps_its_name(pool2: RankPool) -> None:
    assert pool2.run(_switch_validation_off) == [(True, "ModelModule")] * 2
