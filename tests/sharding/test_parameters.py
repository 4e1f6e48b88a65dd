"""What users do to single parameters before sharding replaces them: tags, hooks, strides, none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    VOCABULARY,
    WIDTH,
    Outcome,
    TinyDecoder,
    assert_exact,
    full_weights,
)
from tests.trainer.plain import ModelModule, fill, filled_decoder, plain_weights, prefixed
from tests.trainer.runs import STRATEGIES, by_default, first_by_default, loader, make_trainer

ACCUMULATE = 3
ENGINES = {"fsdp2": STRATEGIES["kept"], "ddp": STRATEGIES["ddp"]}


class Unusual(nn.Module):
    """A decoder beside a transposed matrix, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = TinyDecoder(seed=1)
        self.across = nn.Parameter(torch.empty(VOCABULARY, WIDTH).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(input_ids) + self.decoder.embedding(input_ids) @ self.across + self.nothing.sum()


def _fit(options: dict[str, Any], module: ModelModule) -> Outcome:
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return Outcome(full_weights(module))


def _sgd_over_lists(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, foreach=True)


class StepsOverLists(ModelModule):
    """Steps with all parameters at once, as optimizers do by default on accelerators."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _sgd_over_lists(self)


def _fit_and_resume(folder: str) -> Outcome:
    trainer = make_trainer(AutomodelStrategy(), accumulate_grad_batches=ACCUMULATE, max_steps=1)
    trainer.fit(StepsOverLists(Unusual()), loader())
    trainer.save_checkpoint(f"{folder}/one.ckpt")
    module = StepsOverLists(Unusual())
    make_trainer(AutomodelStrategy(), accumulate_grad_batches=ACCUMULATE).fit(
        module, loader(), ckpt_path=f"{folder}/one.ckpt"
    )
    outcome = Outcome(full_weights(module))
    outcome.weights.pop("model.nothing")
    return outcome


def test_steps_over_lists_take_shards_and_whole_parameters(pool2: RankPool, tmp_path: Path) -> None:
    """Torch refuses lists of both: in a step of the fit, and in the one that makes an optimizer's state for loading."""
    weights = plain_weights(Unusual(), ACCUMULATE, make_optimizer=_sgd_over_lists)
    weights.pop("nothing")
    expected = prefixed(weights)
    assert_exact(pool2.run(_fit_and_resume, str(tmp_path)), expected)


class HasItsOptimizer(ModelModule):
    """Its optimizer and schedule are made before it is sharded, as LightningCLI makes those of its configuration."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=2 * LEARNING_RATE, momentum=MOMENTUM)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5, total_iters=100)

    def configure_optimizers(self) -> Any:
        return [self.optimizer], [self.schedule]


def _fit_with_its_optimizer(options: dict[str, Any]) -> Outcome:
    return _fit(options, HasItsOptimizer(filled_decoder()))


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_optimizers_made_before_the_fit(pool2: RankPool, options: dict[str, Any]) -> None:
    """They hold the parameters that sharding replaces."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    assert_exact(pool2.run(_fit_with_its_optimizer, options), expected)


class LooksAtTags(ModelModule):
    """Finds out which parameters are tagged once they are sharded."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.in_hook = self.tagged()
        return super().configure_optimizers()

    def tagged(self) -> list[str]:
        return [name for name, parameter in self.named_parameters() if getattr(parameter, "no_decay", False)]


def _tags(options: dict[str, Any]) -> list[list[str]]:
    module = LooksAtTags(filled_decoder())
    module.model.head.bias.no_decay = module.model.blocks[0].norm.weight.no_decay = True
    _fit(options, module)
    return [module.in_hook, module.tagged()]


@pytest.mark.parametrize("options", by_default(ENGINES, "fsdp2"))
def test_attributes_stay_with_parameters(pool2: RankPool, options: dict[str, Any]) -> None:
    """Optimizers are often built by such tags: without them everything would decay."""
    for tagged in pool2.run(_tags, options):
        assert tagged == [["model.blocks.0.norm.weight", "model.head.bias"]] * 2


def _masked() -> nn.Module:
    model = filled_decoder()
    model.blocks[0].linear.weight.register_hook(torch.zeros_like)
    return model


class MasksLate(ModelModule):
    """Registers its hook where optimizers are made."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.model.blocks[0].linear.weight.register_hook(torch.zeros_like)
        return super().configure_optimizers()


def _fit_masked(options: dict[str, Any], when: str) -> Any:
    module = MasksLate(filled_decoder()) if when == "late" else ModelModule(filled_decoder())
    if when == "after a fit":
        _fit(options, module)
    if when != "late":
        module.model.blocks[0].linear.weight.register_hook(torch.zeros_like)
    try:
        return _fit(options, module)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("when", first_by_default(["before", "late", "after a fit"], 2))
def test_gradient_hooks_that_would_not_be_called_are_refused(pool2: RankPool, when: str) -> None:
    """A mask that is dropped without a word trains what it was to keep."""
    for message in pool2.run(_fit_masked, ENGINES["fsdp2"], when):
        assert message.startswith(
            "1 parameters that FSDP2 shards have gradient hooks (model.blocks.0.linear.weight), which it"
            " never calls"
        )


def test_gradient_hooks_under_ddp(pool2: RankPool) -> None:
    """There they are called, and a masked gradient is exact."""
    expected = prefixed(plain_weights(_masked(), ACCUMULATE))
    assert_exact(pool2.run(_fit_masked, ENGINES["ddp"], "before"), expected)
