"""Modules that are no ordinary FSDP2 units: used by some ranks alone, in TorchScript, changing their input, opened."""

from __future__ import annotations

from collections.abc import Callable
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


class Parts(nn.Module):
    """A stem, and parts of which `use` makes rows [b, d]."""

    def __init__(self, parts: Any, use: Callable[[Parts, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(ROW, ROW)
        self.parts = parts
        self.use = use
        self.calls = 0

    def losses(self, inputs: Tensor) -> Tensor:
        used = self.use(self, self.stem(inputs))
        self.calls += 1
        return used.square().sum(1)


def layers(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh()) for _ in range(count))


def dropping(skips: dict[int, int], starts_at: int = 0) -> Parts:
    """Skips one of its layers, another one on each rank; `skips` has the layer by the number of rows."""

    def use(self: Parts, hidden: Tensor) -> Tensor:
        skipped = skips.get(len(hidden)) if self.calls >= starts_at else None
        for index, layer in enumerate(self.parts):
            if index != skipped:
                hidden = hidden + layer(hidden)
        return hidden

    return Parts(layers(), use)


def heads(reaches_all: bool = False) -> Parts:
    """Runs all of its heads, and has a loss of one, another one on each rank."""

    def use(self: Parts, hidden: Tensor) -> Tensor:
        outputs = [head(hidden) for head in self.parts]
        return outputs[SAME_NUMBER[len(hidden)]] + (0 * sum(outputs) if reaches_all else 0)

    return Parts(layers(), use)


def in_turn(self: Parts, hidden: Tensor) -> Tensor:
    for part in self.parts:
        hidden = part(hidden)
    return hidden


def repeated(self: Parts, hidden: Tensor) -> Tensor:
    """As with adaptive depth: ranks whose batches are larger repeat the layers more often."""
    for _ in range(len(hidden)):
        hidden = in_turn(self, hidden)
    return hidden


def repeated_at_first(self: Parts, hidden: Tensor) -> Tensor:
    """In the first forward the layers are repeated."""
    return in_turn(self, in_turn(self, hidden)) if self.calls == 0 else in_turn(self, hidden)


def looked_at(self: Parts, hidden: Tensor) -> Tensor:
    """Some ranks call the layers once more, for something that they do not train."""
    if len(hidden) % 2:
        in_turn(self, hidden).detach()
    return in_turn(self, hidden)


def attacked(self: Parts, hidden: Tensor) -> Tensor:
    """The layers are frozen while their input is attacked."""
    self.parts.requires_grad_(False)
    shifted = hidden.detach().requires_grad_()
    (slope,) = torch.autograd.grad(in_turn(self, shifted).sum(), shifted)
    self.parts.requires_grad_(True)
    return in_turn(self, hidden + slope.sign())


class Collecting(nn.Linear):
    """Appends to a list, as with auxiliary losses."""

    def forward(self, hidden: Tensor, found: list[Tensor]) -> Tensor:
        found.append(super().forward(hidden))
        return torch.tanh(found[-1])


def collected(self: Parts, hidden: Tensor) -> Tensor:
    found = [hidden]
    for part in self.parts:
        hidden = part(hidden, found)
    return hidden + sum(found)


def scripted() -> Parts:
    """Blocks and a head in TorchScript, beside a layer of Python."""
    parts = [*layers(2), nn.Linear(ROW, ROW)]
    return Parts(nn.ModuleList(torch.jit.script(filled_rows(part)) for part in parts), in_turn)


def pre_activation() -> Parts:
    """Each block begins by changing its input."""
    blocks = (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(ROW, ROW)) for _ in range(3))
    return Parts(nn.Sequential(*blocks), lambda self, hidden: self.parts(hidden))


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


def adjoint() -> Parts:
    function = nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh(), nn.Linear(ROW, ROW))
    return Parts(function, lambda self, hidden: Solve.apply(self.parts, hidden, *self.parts.parameters()))


SAME_NUMBER = {2: 0, 3: 1, 5: 1, 6: 2}
ANOTHER_NUMBER = {2: 0, 3: 1, 6: 2}
MODELS: dict[str, Any] = {
    "same number": lambda: dropping(SAME_NUMBER),
    "another number": lambda: dropping(ANOTHER_NUMBER),
    "in the last micro-batch": lambda: dropping(SAME_NUMBER, starts_at=3),
    "Heads": heads,
    "Heads, all in the loss": lambda: heads(reaches_all=True),
    "Repeated": lambda: Parts(layers(), repeated),
    "Looked at": lambda: Parts(layers(), looked_at),
    "Attacked": lambda: Parts(layers(), attacked),
    "Collected": lambda: Parts(nn.ModuleList(Collecting(ROW, ROW) for _ in range(3)), collected),
    "Scripted": scripted,
    "PreActivation": pre_activation,
    "Adjoint": adjoint,
}
DROPPED = (
    "Ranks have used different FSDP units, or trained different parameters of one, since they last compared"
)
MESSAGES = {
    "same number": DROPPED,
    "in the last micro-batch": DROPPED,
    "Heads": DROPPED,
    "PreActivation": "An FSDP unit changes its input in place",
    "Adjoint": "got a gradient that it does not reduce",
    "Collected": "Collecting: A module has changed a list, dict, set or dataclass that it was given",
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
    "in the last micro-batch, kept",
    "Heads, kept",
    "Heads, all in the loss, kept",
    "Looked at, kept",
    "Attacked, kept",
    "Attacked, by hand",
    "Collected, kept",
    "Collected, remedy",
    "Repeated, kept",
    "Repeated, remedy, resharded",
    "Scripted, by hand",
    "PreActivation, kept",
    "Adjoint, kept",
    "Adjoint, remedy, resharded",
)
CASES = {f"{name}, {layout}": (name, layout) for name in MODELS for layout in LAYOUTS}
del CASES["in the last micro-batch, by hand"]  # every call counts there
# Ranks wait for each other in a gather, also where parameters are resharded.
for name in ("another number, kept", "another number, by hand", "Repeated, by hand", "Looked at, by hand"):
    del CASES[name]


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


class GoesOn(RowModule):
    """Catches what its first backward raises, if it `fails`; later ones are plain, as of a loop of the user's own."""

    def __init__(self, fails: bool) -> None:
        super().__init__(lambda: Parts(layers(), repeated_at_first))
        self.automatic_optimization = False
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if batch_idx > 0:
            loss.backward()
            self.optimizers().step()
            self.optimizers().zero_grad()
        elif self.fails:
            loss.register_hook(lambda gradient: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                self.manual_backward(loss)


def test_a_backward_that_is_caught(pool2: RankPool) -> None:
    """Its units were called repeatedly: later backwards, of one call each, reduce all the same."""
    for caught, expected in zip(*(pool2.run(_go_on, fails) for fails in (True, False)), strict=True):
        assert weight_error(Outcome(caught), expected) == 0


def _go_on(fails: bool) -> dict[str, Tensor]:
    weights = fit_rows(GoesOn(fails), {})
    assert not isinstance(weights, str), weights
    return weights


class Stack(nn.Module):
    """A class around a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)), nn.Tanh()
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)


class Opened(nn.Module):
    """The modules of its blocks are called, and the blocks are not. `tests/search` iterates them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.stack = nn.ModuleList(Stack() for _ in range(2))
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.stack:
            hidden = torch.tanh(hidden + block.layers(hidden))
        return self.head(hidden)


def _message() -> str:
    with pytest.raises(RuntimeError) as raised:
        fit(Opened, {})
    return str(raised.value)


def test_a_unit_that_is_not_called(pool2: RankPool) -> None:
    """Calling it, or giving the classes that are called, is what the message says. The latter trains."""
    for message in pool2.run(_message):
        assert "got a gradient that it does not reduce" in message
        assert "call the unit itself" in message
        assert "pass an auto_wrap_policy with the classes of what is called" in message
    check_exact(pool2, Opened, {"auto_wrap_policy": {nn.Sequential}})


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
