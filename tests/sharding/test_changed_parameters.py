"""Parameters that the module gets after set-up, and embeddings with ``max_norm``: refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.rank_pool import RankPool
from tests.sharding import writers
from tests.sharding.writers import WIDTH, Block, Writer, fit_or_refusal, fit_plainly
from tests.trainer.exactness import Outcome, weight_error
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default

ENGINES = {"fsdp2": STRATEGIES["kept"], "ddp": STRATEGIES["ddp"]}


def _outcome(*args: Any) -> dict[str, Tensor] | str:
    """Defined here, so that ranks import the modules of this file."""
    return fit_or_refusal(*args)


class Grows(Writer):
    """Gets another block, or another weight, in some hook."""

    def __init__(self, hook: str, what: str) -> None:
        super().__init__()
        self.hook = hook
        self.what = what
        if what == "made before":
            self.student.blocks.append(_identity()).requires_grad_(False)

    def grow(self, hook: str) -> None:
        """Do it here, if this is the hook."""
        if hook != self.hook:
            return
        head = self.student.head
        if self.what == "layer":
            self.student.blocks.append(_identity())
            if hook != "configure_optimizers":
                self.trainer.optimizers[0].add_param_group({"params": self.student.blocks[-1].parameters()})
        elif self.what == "weight":
            head.weight = nn.Parameter(torch.ones(3, WIDTH, dtype=torch.float64))
        elif self.what == "values":
            head.weight.data = torch.ones(3, WIDTH, dtype=torch.float64)
        elif self.what == "average":
            self.average = copy.deepcopy(self.student)
        elif self.what == "made before":
            self.student.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        self.grow("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.grow("on_train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.grow("on_train_batch_start")


def _identity() -> Block:
    block = Block().double()
    nn.init.constant_(block.linear.weight, 0.1)
    nn.init.zeros_(block.linear.bias)
    return block


writers.MODULES["Grows"] = Grows
HOOKS = ("configure_optimizers", "on_train_start", "on_train_batch_start")


@pytest.mark.every_case
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_layers_that_join_are_refused(pool2: RankPool, engine: str, hook: str) -> None:
    for message in pool2.run(_outcome, ENGINES[engine], "Grows", hook, "layer"):
        assert "student.blocks.2.linear.weight, student.blocks.2.linear.bias: 2 parameters that" in message


@pytest.mark.every_case
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_replaced_parameters_are_refused(pool2: RankPool, engine: str, hook: str) -> None:
    for message in pool2.run(_outcome, ENGINES[engine], "Grows", hook, "weight"):
        assert "student.head.weight: 1 parameters that were replaced after the module was" in message


def _plainly(hook: str, what: str) -> Outcome:
    return Outcome(fit_plainly("Grows", (hook, what)), None)


@pytest.mark.every_case
@pytest.mark.parametrize("what", ["values", "made before"])
@pytest.mark.parametrize("engine", ENGINES)
def test_recipes_are_exact(pool2: RankPool, engine: str, what: str) -> None:
    """Values are written into the old parameter; a stage is made at once, frozen, and joins by being unfrozen."""
    expected = _plainly("on_train_batch_start", what)
    for weights in pool2.run(_outcome, ENGINES[engine], "Grows", "on_train_batch_start", what):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


def test_averages_may_join(pool2: RankPool) -> None:
    """A copy that no optimizer trains is alike on all ranks."""
    expected = _plainly("on_train_start", "nothing").weights
    for weights in pool2.run(_outcome, ENGINES["ddp"], "Grows", "on_train_start", "average"):
        kept = {name: weight for name, weight in weights.items() if not name.startswith("average.")}
        assert len(weights) > len(kept)
        assert weight_error(Outcome(kept, None), Outcome(expected, None)) <= TOLERANCE


# --- Written differently on each rank ---------------------------------------------------------------------------------


class Embeds(Writer):
    """Limits the norms of its embedding's rows, in the forward or by the recipe."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH, max_norm=0.5 if how == "forward" else None).double()
        self.how = how
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.randn(7, WIDTH, generator=generator))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            w = self.embedding.weight
            w.mul_((0.5 / w.norm(dim=1, keepdim=True)).clamp(max=1))

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        chosen = batch[:, 0].mul(10).long().remainder(7)
        return F.mse_loss(self.student(batch + self.embedding(chosen)), batch[:, :3], reduction="sum") / len(
            batch
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.student.parameters(), *self.embedding.parameters()], lr=0.5)


writers.MODULES["Embeds"] = Embeds


@pytest.mark.parametrize("options", by_default(ENGINES, "ddp", "fsdp2"))
def test_max_norm_is_refused(pool2: RankPool, options: dict[str, Any]) -> None:
    for message in pool2.run(_outcome, options, "Embeds", "forward"):
        assert message.startswith("embedding: 1 embeddings with max_norm")


@pytest.mark.parametrize("options", by_default(ENGINES, "ddp", "fsdp2"))
def test_recipe_for_max_norm(pool2: RankPool, options: dict[str, Any]) -> None:
    """Equal to one process that does the same, and to one whose embedding limits the norms that it uses."""
    expected = Outcome(fit_plainly("Embeds", ("recipe",)), None)
    for weights in pool2.run(_outcome, options, "Embeds", "recipe"):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
