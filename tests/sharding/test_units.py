"""Which modules become FSDP units and roots, and which parameters stay whole; nothing is sharded here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_automodel.sharding.units import plan_sharding


class WithForward(nn.Module):
    """A module with a forward of its own, around what it is given."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self) -> None: ...


class Block(WithForward):
    """What repeats."""

    def __init__(self, **children: Any) -> None:
        super().__init__(linear=nn.Linear(2, 2), **children)


class Model(WithForward):
    """Stands for the LightningModule."""


class HuggingFace(WithForward):
    """A model with the list that Hugging Face gives its models."""

    _no_split_modules = ("Block",)


def _blocks(count: int = 2) -> list[Block]:
    return [Block() for _ in range(count)]


def _plan(
    model: nn.Module, policy: Any = None, root_is_model: bool = True
) -> tuple[list[str], list[str], set[str]]:
    """Names of units and roots, and what stays replicated."""
    plan = plan_sharding(model, policy, root_is_model)
    names = {id(module): name for name, module in model.named_modules()}
    return (
        [names[id(unit)] for unit in plan.units],
        [names[id(root)] for root in plan.roots],
        plan.replicated,
    )


def _tied_to_head() -> Model:
    model = Model(
        embedding=nn.Embedding(3, 2), blocks=nn.ModuleList(_blocks()), head=nn.Linear(2, 3, bias=False)
    )
    model.head.weight = model.embedding.weight
    return model


def _tied_block() -> Model:
    model = Model(blocks=nn.ModuleList(_blocks(3)), head=nn.Linear(2, 2))
    model.head.weight = model.blocks[1].linear.weight
    return model


def _tied_blocks() -> Model:
    model = Model(blocks=nn.ModuleList(_blocks(3)))
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    return model


def _tied_inside_a_block() -> Model:
    block = Block(other=nn.Linear(2, 2))
    block.other.weight = block.linear.weight
    return Model(blocks=nn.ModuleList([block, Block()]))


def _shared_below_blocks() -> Model:
    shared = nn.Linear(2, 2)
    return Model(blocks=nn.ModuleList([Block(adapter=shared), Block(adapter=shared), Block()]))


def _same_block_twice_in_a_list() -> Model:
    first, second = _blocks()
    return Model(blocks=nn.ModuleList([first, second, first]))


UNITS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "nothing_repeats": (lambda: Model(linear=nn.Linear(2, 2)), []),
    "list": (lambda: Model(blocks=nn.ModuleList(_blocks())), ["blocks.0", "blocks.1"]),
    "deep_list": (
        lambda: Model(a=WithForward(b=WithForward(c=nn.ModuleList(_blocks())))),
        ["a.b.c.0", "a.b.c.1"],
    ),
    "sequential_without_its_activations": (
        lambda: Model(net=nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))),
        ["net.0", "net.2"],
    ),
    "inner_sequentials_stay_whole": (
        lambda: Model(net=nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))),
        ["net.0", "net.1"],
    ),
    "lists_inside_blocks_stay_whole": (
        lambda: Model(blocks=nn.ModuleList([Block(experts=nn.ModuleList(_blocks()))])),
        ["blocks.0"],
    ),
    "list_of_lists": (
        lambda: Model(stages=nn.ModuleList([nn.ModuleList(_blocks()), nn.ModuleList(_blocks(1))])),
        ["stages.0.0", "stages.0.1", "stages.1.0"],
    ),
    "dictionary_of_sequentials": (
        lambda: Model(
            experts=nn.ModuleDict({"a": nn.Sequential(*_blocks()), "b": nn.ModuleList(_blocks(1))})
        ),
        ["experts.b.0"],
    ),
    "no_split_modules": (
        lambda: Model(
            hf=HuggingFace(layers=nn.ModuleList(_blocks()), more=nn.ModuleList([nn.Linear(2, 2)]))
        ),
        ["hf.layers.0", "hf.layers.1"],
    ),
    "no_split_modules_elsewhere": (
        lambda: Model(hf=HuggingFace(block=Block()), own=nn.ModuleList([nn.Linear(2, 2)])),
        ["hf.block", "own.0"],
    ),
    "tied_to_head": (_tied_to_head, ["blocks.0", "blocks.1"]),
    "tied_block": (_tied_block, ["blocks.0", "blocks.2"]),
    "tied_blocks": (_tied_blocks, ["blocks.1"]),
    "tied_inside_a_block": (_tied_inside_a_block, ["blocks.0", "blocks.1"]),
    "shared_below_blocks": (_shared_below_blocks, ["blocks.2"]),
    "same_block_twice_in_a_list": (_same_block_twice_in_a_list, ["blocks.0", "blocks.1"]),
    "frozen_blocks": (
        lambda: Model(blocks=nn.ModuleList(_blocks()).requires_grad_(False), head=nn.Linear(2, 2)),
        ["blocks.0", "blocks.1"],
    ),
}


@pytest.mark.parametrize(("build", "units"), UNITS.values(), ids=UNITS)
def test_default_units(build: Callable[[], nn.Module], units: list[str]) -> None:
    """The outermost repeated blocks, each once; what shares a parameter with anything outside is left to the root."""
    assert _plan(build()) == (units, [""], set())


@pytest.mark.parametrize(
    ("policy", "units"),
    [
        ({nn.Linear}, ["blocks.0.linear", "blocks.1.linear", "head"]),
        (frozenset({Block, nn.Linear}), ["blocks.0", "blocks.1", "head"]),
        ({nn.ReLU}, []),
        (set(), []),
        ({nn.Module}, ["blocks.0", "blocks.1", "head"]),
        (lambda module: isinstance(module, nn.Linear) and module.out_features == 3, ["head"]),
        (lambda module: True, ["blocks.0", "blocks.1", "head"]),
    ],
)
def test_policy_overrides(policy: Any, units: list[str]) -> None:
    """Classes (with their subclasses) or a predicate; outermost matches only, and only what has parameters."""
    model = Model(blocks=nn.ModuleList(_blocks()), activation=nn.ReLU(), head=nn.Linear(2, 3))
    assert _plan(model, policy)[0] == units
    assert _plan(_tied_to_head(), {nn.Embedding, Block})[0] == ["blocks.0", "blocks.1"], "tied to no unit"


def test_scalars_and_empty_parameters_stay_whole() -> None:
    """FSDP2 cannot shard a scalar, wherever it is, nor reduce a gradient without elements."""
    model = Model(blocks=nn.ModuleList(_blocks(1)), scale=nn.Parameter(torch.ones(())))
    model.blocks[0].gain = nn.Parameter(torch.ones(()))
    model.nothing = nn.Parameter(torch.empty(0, 3))
    assert _plan(model) == (["blocks.0"], [""], {"scale", "nothing", "blocks.0.gain"})


def test_manual_optimization_shards_below_the_module() -> None:
    """Roots are the outermost modules with a forward, through containers without one; units lie below them."""
    model = Model(
        generator=WithForward(blocks=nn.ModuleList(_blocks()), head=nn.Linear(2, 2)),
        critics=nn.ModuleList([Block(), nn.Linear(2, 2)]),
        heads=nn.ModuleDict({"a": nn.Linear(2, 2)}),
        activation=nn.ReLU(),
    )
    model.best = nn.ModuleList([model.critics[0]])  # once more
    units, roots, replicated = _plan(model, root_is_model=False)
    assert roots == ["generator", "critics.0", "critics.1", "heads.a"]
    assert units == ["generator.blocks.0", "generator.blocks.1"]
    assert not replicated


def test_manual_optimization_keeps_what_no_root_owns() -> None:
    """Parameters of the module itself, and those of two roots, stay whole."""
    shared = nn.Linear(2, 2)
    model = Model(
        left=Block(shared=shared),
        right=Block(shared=shared, gain=nn.Parameter(torch.ones(()))),
        own=nn.Parameter(torch.ones(3)),
    )
    replicated = {"own", "left.shared.weight", "left.shared.bias", "right.gain"}
    assert _plan(model, root_is_model=False)[2] == replicated
