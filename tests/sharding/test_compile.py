"""Compiled blocks and models train like eager ones, whoever compiles them and when, and stay units of their own.

The backend is the one that traces forward and backward and runs what it traced eagerly: what it may change
is what matters here (graphs, hooks, parameters that FSDP2 exchanges), not the code that another backend
would generate. Checkpoints of wrapped blocks: `tests/checkpoint/test_shapes.py`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch._dynamo.utils import counters

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, fit_module
from tests.trainer.exactness import Outcome, weight_error
from tests.trainer.plain import ModelModule, filled_decoder, plain_weights, prefixed
from tests.trainer.runs import STRATEGIES, TOLERANCE, first_by_default

BACKEND = "aot_eager"


class Compiled(ModelModule):
    """Compiles what `how` says: "in place" or "wrapped" each block, the whole "model", or blocks "after sharding"."""

    def __init__(self, how: str) -> None:
        super().__init__(filled_decoder())
        self.how = how
        if how == "in place":
            self._compile_blocks()
        elif how == "wrapped":
            self.model.blocks = nn.ModuleList(
                torch.compile(block, backend=BACKEND) for block in self.model.blocks
            )
        elif how == "model":
            self.model = torch.compile(self.model, backend=BACKEND)

    def on_fit_start(self) -> None:
        if self.how == "after sharding":
            self._compile_blocks()

    def _compile_blocks(self) -> None:
        for block in self.model.blocks:
            block.compile(backend=BACKEND)


def fit(options: dict[str, Any], how: str) -> tuple[Outcome, list[str], int]:
    """Weights by the names of the eager model, units, and the number of graphs that were compiled."""
    torch._dynamo.reset()
    counters.clear()
    found = fit_module(Compiled(how), options)
    weights = {name.replace("_orig_mod.", ""): weight for name, weight in found.weights.items()}
    return Outcome(weights), found.described.get("units", []), counters["stats"]["unique_graphs"]


RECOMPUTED = {**STRATEGIES["kept"], "activation_checkpointing": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "in-place": ("in place", STRATEGIES["kept"]),
    "wrapped": ("wrapped", STRATEGIES["resharded"]),
    "wrapped-recomputed": ("wrapped", RECOMPUTED),
    "model-recomputed": ("model", RECOMPUTED),
    "after-sharding": ("after sharding", STRATEGIES["undeferred"]),
    "ddp": ("wrapped", STRATEGIES["ddp"]),
}


@pytest.mark.timeout(600)
@pytest.mark.sweep
@pytest.mark.parametrize(("how", "options"), CASES.values(), ids=CASES)
def test_like_eager(pool2: RankPool, how: str, options: dict[str, Any]) -> None:
    """Exact in float64; something was compiled; units are the blocks, and are called what they were."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    for outcome, units, num_graphs in pool2.run(fit, options, how, timeout_s=300):
        assert weight_error(outcome, expected) <= TOLERANCE
        assert num_graphs >= 1
        assert [re.sub("_orig_mod[.]", "", unit) for unit in units] == (
            [] if options == STRATEGIES["ddp"] else [f"model.blocks.{i} (Block)" for i in range(3)]
        )


def _fit_compiled(options: dict[str, Any]) -> tuple[Outcome, list[str], int, bool]:
    torch._dynamo.reset()
    counters.clear()
    module = ModelModule(filled_decoder())
    weights, described = fit_module(module, {"compile": {"backend": BACKEND}, **options}, max_steps=1)
    is_left = any(block._compiled_call_impl is not None for block in module.model.blocks)
    return weights, described["compiled"], counters["stats"]["unique_graphs"], is_left


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    first_by_default(
        [
            {},
            {"data_parallel": "ddp"},
            {"activation_checkpointing": True},
            {"activation_checkpointing": True, "data_parallel": "ddp"},
            {"reshard_during_accumulation": True},
        ]
    ),
    ids=str,
)
def test_the_strategy_compiles(pool2: RankPool, options: dict[str, Any]) -> None:
    """Each block, for the run; sizes of one have graphs of their own, all other shapes share one after the first."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE, max_steps=1))
    for outcome, described, num_graphs, is_left in pool2.run(_fit_compiled, options, timeout_s=300):
        assert weight_error(outcome, expected) <= TOLERANCE
        assert described == [f"model.blocks.{index} (Block)" for index in range(3)]
        assert 1 <= num_graphs <= 4
        assert not is_left


def test_a_compiled_lightning_module_is_refused() -> None:
    """By Lightning, which knows no strategy that shards such a module."""
    trainer = Trainer(strategy=AutomodelStrategy(), accelerator="cpu", devices=1, logger=False)
    for run in (trainer.fit, trainer.validate, trainer.predict):
        with pytest.raises(
            RuntimeError, match="incompatible with the current strategy: `AutomodelStrategy`"
        ):
            run(torch.compile(ModelModule(filled_decoder()), backend=BACKEND))


def test_compiled_blocks_are_not_offloaded() -> None:
    """Tracing gives up where tensors move to the host, so that nothing would be compiled."""
    with pytest.raises(ValueError, match="activation_checkpointing='offload' does not work with compile"):
        AutomodelStrategy(activation_checkpointing="offload", compile=True)
