"""Backward hooks see the gradient of a sum over tokens. They are named, with what makes nonlinear ones exact.

The reference is one process with all rows of a window in one batch, whose hook sees the gradient of the
mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_automodel import AutomodelStrategy
from tests.gradients.test_foreign_gradients import ACCUMULATE, Net, Trains, plainly
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, make_trainer, warnings_of

NAMED = {
    "module hook": "1 modules, parameters or tensors have backward hooks (module net.blocks.1).",
    "tensor hook": "1 modules, parameters or tensors have backward hooks (a tensor halved).",
}
Rule = Callable[[Tensor], Tensor]


def clipped(gradient: Tensor) -> Tensor:
    """[b, d] with each row's norm at most 0.02, which changes about half of them."""
    norms = gradient.norm(dim=1, keepdim=True)
    return gradient * (0.02 / norms).clamp(max=1.0)


def halved(gradient: Tensor) -> Tensor:
    return 0.5 * gradient


RULES: dict[str, Rule] = {rule.__name__: rule for rule in (clipped, halved)}


def attach(net: Net, rule: Rule, how: str) -> None:
    """Change the gradients that reach the second block."""
    block = net.blocks[1]
    if how == "module hook":
        block.register_full_backward_hook(lambda module, before, after: (rule(before[0]),))
    else:
        block.register_forward_pre_hook(lambda module, args: args[0].register_hook(rule) and None)


class Hooked(Trains):
    def __init__(self, rule: Rule, how: str) -> None:
        super().__init__()
        attach(self.net, rule, how)


def _fit(rule: str, how: str, options: dict[str, Any], follows: bool) -> tuple[dict[str, Tensor], list[str]]:
    """`follows`: do what the message says."""
    divisor = dist.get_world_size()
    function = RULES[rule]
    if follows:
        options = {**options, "count_window_ahead": True}
        module = Hooked(lambda gradient: divisor * function(gradient / divisor), how)
    else:
        module = Hooked(function, how)
    said = _say(module, options)
    return full_weights(module.net), said


def _say(module: Trains, options: dict[str, Any]) -> list[str]:
    """Train; what is said of backward hooks."""
    trainer = make_trainer(AutomodelStrategy(count="samples", **options), accumulate_grad_batches=ACCUMULATE)
    return warnings_of("have backward hooks", trainer.fit, module)


def expected(rule: str, how: str) -> dict[str, Tensor]:
    return plainly(ACCUMULATE, prepare=lambda net: attach(net, RULES[rule], how))


CASES = {
    f"{rule}, {how}, {layout}": (rule, how, options)
    for rule in RULES
    for how in NAMED
    for layout, options in STRATEGIES.items()
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "case", by_default(CASES, "clipped, module hook, kept", "clipped, tensor hook, ddp")
)
def test_what_the_message_says_is_exact(pool2: RankPool, case: tuple[str, str, dict[str, Any]]) -> None:
    rule, how, options = case
    for weights, said in pool2.run(_fit, rule, how, options, True):
        assert weight_error(weights, expected(rule, how)) <= TOLERANCE
        assert len(said) <= 1


@pytest.mark.every_case
@pytest.mark.parametrize("how", NAMED)
@pytest.mark.parametrize("options", by_default(STRATEGIES, "kept", "ddp"))
def test_hooks_are_named(pool2: RankPool, options: dict[str, Any], how: str) -> None:
    """Once, on rank 0, with the option that helps; a hook that is linear is right as it is."""
    (weights, said), (_, said_on_1) = pool2.run(_fit, "halved", how, options, False)
    assert weight_error(weights, expected("halved", how)) <= TOLERANCE
    assert said_on_1 == []
    assert len(said) == 1
    assert said[0].startswith(NAMED[how])
    assert "count_window_ahead=True" in said[0]
    assert "2 * f(g / 2)" in said[0]


class ParameterHook(Hooked):
    def __init__(self) -> None:
        super().__init__(halved, "tensor hook")
        self.net.head.weight.register_hook(halved)


def _fit_parameter_hook() -> list[str]:
    return _say(ParameterHook(), {"data_parallel": "ddp"})


def test_parameter_hooks_are_named_under_ddp(pool2: RankPool) -> None:
    """FSDP2 refuses them. Those of tensors are named in the next step."""
    said, _ = pool2.run(_fit_parameter_hook)
    named = [text.partition("(")[2].partition(" ")[0] for text in said]
    assert named == ["parameter", "a"]
