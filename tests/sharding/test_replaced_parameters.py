"""Parameters that sharding has replaced, reached past the module, and parameters that no module knows: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_automodel.sharding.replaced import Replaced
from lightning_automodel.sharding.shards import make_shard
from tests.rank_pool import RankError, RankPool
from tests.sharding.writers import Writer, fit, fit_or_refusal, fit_plainly
from tests.trainer.exactness import assert_exact
from tests.trainer.runs import STRATEGIES, by_default

ENGINES = {"fsdp2": STRATEGIES["kept"], "ddp": STRATEGIES["ddp"]}


class HoldsParameter(Writer):
    """Reads or writes a parameter of its own past the module tree."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.viscosity = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.how = how
        self.unknowns = {"viscosity": self.viscosity}
        self.teachers = list(self.teacher.parameters())

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.distance(batch)
        if self.how == "dict":
            return loss * self.unknowns["viscosity"]
        if self.how == "module":
            return loss * self.viscosity
        with torch.no_grad():
            for s, t in zip(self.student.parameters(), self.teachers, strict=True):
                if self.how == "written":
                    t.mul_(0.9)
                else:
                    t.data = t.data * 0.9 + s.data * 0.1
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.student.parameters(), self.viscosity], lr=0.1)


HELD = {
    "dict": "viscosity",
    "written": "teacher.blocks.0.linear.weight",
    "data": "teacher.blocks.0.linear.weight",
}


def _held() -> dict[str, Any]:
    return {how: fit_or_refusal(ENGINES["fsdp2"], HoldsParameter, how) for how in HELD}


def test_parameters_that_sharding_has_replaced(pool2: RankPool) -> None:
    """The parameter is named."""
    for messages in pool2.run(_held):
        for how, name in HELD.items():
            assert str(messages[how]).startswith(f"{name} was used past the module"), how


@pytest.mark.parametrize(("engine", "how"), [("ddp", "dict"), ("ddp", "data"), ("fsdp2", "module")])
@pytest.mark.every_case
def test_what_the_message_advises(pool2: RankPool, engine: str, how: str) -> None:
    """It is exact; that somebody holds the parameter besides is nobody's business."""
    options = {**ENGINES[engine]}
    if engine == "ddp":
        options["ddp_kwargs"] = {"find_unused_parameters": True}
    assert_exact(pool2.run(fit, options, HoldsParameter, (how,)), fit_plainly(HoldsParameter, (how,)))


class Unregistered(Writer):
    """Trains a parameter that the module does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.unknowns = {"viscosity": nn.Parameter(torch.ones(1, dtype=torch.float64))}

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.distance(batch) * self.unknowns["viscosity"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.student.parameters(), *self.unknowns.values()], lr=0.1)


@pytest.mark.parametrize("options", by_default(ENGINES, "ddp", "fsdp2"))
def test_parameters_that_are_not_registered(pool2: RankPool, options: dict[str, Any]) -> None:
    for message in pool2.run(fit_or_refusal, options, Unregistered):
        assert message.startswith("1 parameters of SGD are not those of Unregistered")
        assert "(self.x = nn.Parameter(...), an nn.ParameterDict or an nn.ParameterList)" in message


class ReplacedWeight(Replaced):
    parameter_name = "weight"


USES: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda old: old.T,
    "data": lambda old: old.data,
    "product": lambda old: 2 * old,
    "sum": torch.sum,
    "in a list": lambda old: torch.stack([torch.ones(0), old]),
    "size": lambda old: old.numel(),  # it would be 0
    "shape": lambda old: old.shape,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_raises(use: str) -> None:
    """But as a key, and to be shown."""
    old: Any = nn.Parameter(torch.zeros(0))
    old.__class__ = ReplacedWeight
    assert {old: 1}[old] == 1
    assert repr(old) == "<weight, which a shard has replaced>"
    with pytest.raises(RuntimeError, match="weight was used past the module"):
        USES[use](old)


def _beside_a_shard() -> None:
    shard = make_shard(distribute_tensor(torch.ones(3, 1), init_device_mesh("cpu", (2,)), [Shard(0)]))
    old: Any = nn.Parameter(torch.zeros(0))
    old.__class__ = ReplacedWeight
    (shard * old).sum()


def test_use_beside_a_shard_raises(pool2: RankPool) -> None:
    """An empty tensor would broadcast."""
    with pytest.raises(RankError, match="was used past the module"):
        pool2.run(_beside_a_shard)
