"""A run puts back what it has replaced on objects of others, and docs list all of it."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, WeightAveraging
from torch import nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.internals.patching import PatchStack
from tests.processes import ROOT
from tests.rank_pool import RankPool
from tests.trainer.exactness import Block
from tests.trainer.runs import LabelledModule, loader, make_trainer

NO_INSTANCES = {
    # In the process of `python -m lightning_automodel.plan`.
    "nn.functional",
    "attention",
    "masking_utils",
    # Of this package.
    "self.run.windows",
}
"""Not patched instances of others: modules (`test_nothing_replaced.py` looks at those of a fit), and our own."""
NOT_OURS = {"__slotnames__", "log", "log_dict", "step"}
"""What copying sets, Lightning for its callbacks, and torch for the class of each optimizer."""
STEPS = {
    "forward",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
}
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": {Block}}
RUNS: dict[str, tuple[dict[str, Any], set[tuple[str, str]]]] = {
    "fsdp2": (
        {**CHECKPOINTED},
        {("_Module", name) for name in STEPS} | {("TinyDecoder", "forward")},
    ),
    # Lightning runs steps as `forward`, and gives that back as an attribute of the module, under its own DDP
    # too.
    "ddp": (
        {**CHECKPOINTED, "data_parallel": "ddp", "uneven_inputs": "pad"},
        {("_Module", "forward")},
    ),
}


class _Module(LabelledModule):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.optim.Optimizer] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.made.append(super().configure_optimizers())
        return self.made[-1]


class _Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, *args: Any) -> None:
        pass


def _functions(target: Any) -> dict[str, Any]:
    """What an object itself has of functions; `test_nothing_replaced.py` looks at classes and modules."""
    own = vars(target).items()
    return {
        name: value for name, value in own if callable(value) and not isinstance(value, nn.Module | type)
    }


def _differing(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    absent = object()
    names = {*before, *after} - NOT_OURS
    return {name for name in names if before.get(name, absent) is not after.get(name, absent)}


def _replaced(options: dict[str, Any]) -> dict[str, Any]:
    """What differs after a fit and a validation: names by class, of what was patched, and of all that was there."""
    module = _Module()
    trainer = make_trainer(
        AutomodelStrategy(**options),
        callbacks=[_Finetuning(), WeightAveraging(), ModelCheckpoint(save_last=True)],
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        enable_checkpointing=True,
    )
    loops = [
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
    ]
    targets = [*module.modules(), *trainer.callbacks, *loops, trainer, trainer.profiler]
    targets += [trainer.precision_plugin, trainer._signal_connector, trainer.strategy]
    before = [(target, _functions(target)) for target in targets]
    patched: list[tuple[Any, str, Any]] = []
    absent = object()
    set_, ignored = PatchStack.set, list(warnings.filters)

    def noted(stack: PatchStack, target: Any, name: str, value: Any, is_new: bool = False) -> None:
        patched.append((target, name, vars(target).get(name, absent)))
        set_(stack, target, name, value, is_new)

    with mock.patch.object(PatchStack, "set", noted):
        trainer.fit(module, loader(), loader())
        trainer.validate(module, loader(), verbose=False)
    first: dict[tuple[int, str], tuple[Any, Any]] = {}
    for target, name, value in patched:
        first.setdefault((id(target), name), (target, value))
    optimizer = module.made[0]
    now = {(id(target), name): vars(target).get(name, absent) for target, name, _ in patched}
    return {
        "patched": {
            (_name(target), key[1])
            for key, (target, value) in first.items()
            if now[key]
            != value  # Lightning gives callbacks the module's `log` in each run: another method object
        },
        "num_patched": len(first),
        "others": {
            (_name(target), name) for target, own in before for name in _differing(own, _functions(target))
        },
        "filters": [entry for entry in warnings.filters if entry not in ignored],
        "hooks": [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
    }


def _name(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__).removeprefix("FSDP")


@pytest.mark.every_case
@pytest.mark.parametrize("name", RUNS)
def test_what_stays_is_listed(pool2: RankPool, name: str) -> None:
    """Every attribute of the objects that a run touches is the same object afterwards."""
    options, expected = RUNS[name]
    for found in pool2.run(_replaced, options):
        assert found["num_patched"] > 20
        assert found["patched"] == set()
        assert found["others"] == expected, sorted(found["others"] ^ expected)
        assert found["filters"] == []
        assert found["hooks"] == [0, 0]


def _called(function: str) -> Iterator[tuple[str, str]]:
    """What the package passes to functions of this name: the object, as it is written there, and a constant name."""
    for path in sorted((ROOT / "lightning_automodel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_called = isinstance(node, ast.Call) and re.search(rf"\b{function}$", ast.unparse(node.func))
            if is_called and len(node.args) > 2 and isinstance(node.args[1], ast.Constant):
                yield ast.unparse(node.args[0]), str(node.args[1].value)


def test_docs_list_what_is_set_for_good() -> None:
    """Private values of Lightning and torch, by name."""
    page = (ROOT / "docs/adopting.md").read_text()
    names = {name for _, name in _called("overwrite")}
    assert len(names) > 5
    assert {name for name in names if not re.search(rf"`(?:[\w.]+\.)?{name}`", page)} == set()


def test_docs_list_what_is_patched() -> None:
    """At most 15 kinds, in one table."""
    table = (ROOT / "docs/adopting.md").read_text().partition("| object | attributes |")[2]
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) <= 15
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    patched = {name for target, name in _called("set") if target not in NO_INSTANCES}
    assert len(patched) > 30
    assert patched - listed == set()
