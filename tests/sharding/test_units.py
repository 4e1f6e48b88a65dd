"""Which modules become FSDP units and roots, and which parameters stay whole; nothing is sharded here."""

from __future__ import annotations

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


def _linears() -> list[nn.Module]:
    return [nn.Linear(2, 2), nn.Linear(2, 2)]


def test_default_units() -> None:
    """The outermost repeated blocks, each once; what shares a parameter with anything outside is left to the root."""
    first, second = _blocks()
    shared = nn.Linear(2, 2)
    model = Model(
        alone=nn.Linear(2, 2),
        list=nn.ModuleList(_blocks()),
        deep=WithForward(b=WithForward(c=nn.ModuleList(_blocks()))),
        with_activation=nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        sequentials=nn.Sequential(nn.Sequential(*_linears()), nn.Linear(2, 2)),
        holds_list=nn.ModuleList([Block(experts=nn.ModuleList(_blocks()))]),
        lists=nn.ModuleList([nn.ModuleList(_blocks()), nn.ModuleList(_blocks(1))]),
        dictionary=nn.ModuleDict({"a": nn.Sequential(*_blocks()), "b": nn.ModuleList(_blocks(1))}),
        hf=HuggingFace(layers=nn.ModuleList(_blocks()), more=nn.ModuleList(_linears())),
        hf_of_one=HuggingFace(block=Block()),
        tied_to_root=nn.ModuleList(_blocks(3)),
        tied_within=nn.ModuleList(_blocks(3)),
        tied_inside=nn.ModuleList([Block(other=nn.Linear(2, 2))]),
        shared_below=nn.ModuleList([Block(adapter=shared), Block(adapter=shared), Block()]),
        twice=nn.ModuleList([first, second, first]),
        frozen=nn.ModuleList(_blocks()).requires_grad_(False),
        embedding=nn.Embedding(3, 2),
        head=nn.Linear(2, 3, bias=False),
    )
    model.alone.weight = model.tied_to_root[1].linear.weight
    model.tied_within[2].linear.weight = model.tied_within[0].linear.weight
    model.tied_inside[0].other.weight = model.tied_inside[0].linear.weight
    model.head.weight = model.embedding.weight
    units, roots, replicated = _plan(model)
    assert (roots, replicated) == ([""], set())
    assert units == [
        *("list.0", "list.1", "deep.b.c.0", "deep.b.c.1", "with_activation.0", "with_activation.2"),
        *("sequentials.0", "sequentials.1", "holds_list.0", "lists.0.0", "lists.0.1", "lists.1.0"),
        *("dictionary.b.0", "hf.layers.0", "hf.layers.1", "hf_of_one.block", "tied_to_root.0"),
        *("tied_to_root.2", "tied_within.1", "tied_inside.0", "shared_below.2", "twice.0", "twice.1"),
        *("frozen.0", "frozen.1"),
    ]


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
    model.embedding = nn.Embedding(3, 2)
    model.embedding.weight = model.head.weight
    assert _plan(model, {nn.Embedding, Block})[0] == ["blocks.0", "blocks.1"], "tied to no unit"


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
