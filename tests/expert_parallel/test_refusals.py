"""What expert parallelism refuses, each with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, spread_experts
from tests.expert_parallel.mixtures import CASE, Experts, MixtureDecoder, SpreadModule
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import Batch, micro_batches
from tests.trainer.plain import ModelModule, sgd
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import loader, make_trainer


class HookedModule(SpreadModule):
    """Looks at the gradients of experts within the backward."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        for parameter in self.model.blocks[0].experts.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        return sgd(self)


class PlainBackward(SpreadModule):
    """Manual optimization past the strategy."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self(batch).backward()


class Unmanaged(SpreadModule):
    """Holds experts itself, where manual optimization has no unit."""

    automatic_optimization = False

    def configure_model(self) -> None:
        self.own = nn.Parameter(torch.zeros(6, 2, 2, dtype=torch.float64))
        spread_experts(self, self.device_mesh["expert_parallel"], ["own"])


def refused(sentence: str, make: type[ModelModule] = SpreadModule, **options: Any) -> Refused:
    """Of six experts, on two ranks unless ``options`` say otherwise."""
    return Refused(
        lambda: make(MixtureDecoder(6)),
        (sentence,),
        lambda: loader(CASE),
        {"expert_parallel_size": 2, **options},
    )


REFUSED = {
    "nothing is spread": refused(
        "expert_parallel_size=2, but no parameter of ModelModule is spread over the expert-parallel ranks",
        ModelModule,
    ),
    "experts do not divide": refused(
        "expert_parallel_size=4 does not divide the 6 experts of Experts: valid sizes are 1, 2, 3, 6",
        expert_parallel_size=4,
    ),
    "ranks do not divide": refused(
        "expert_parallel_size=3 does not divide the 4 ranks that parameters are sharded over: valid sizes"
        " are 1, 2, 4",
        expert_parallel_size=3,
    ),
    "hooks": refused("on parameters that are no spread experts", HookedModule, count_window_ahead=True),
    # FSDP2 would average it over fewer ranks than the other parameters, and nobody multiplies.
    "plain backward": refused("call self.manual_backward", PlainBackward),
    "unmanaged": refused(
        "own is spread over expert-parallel ranks, but FSDP2 does not manage it", Unmanaged
    ),
}


def test_fits(pool4: RankPool) -> None:
    check_refused(pool4, __name__)


def _evaluate() -> None:
    """Runs on every rank, on unequal data."""
    batches = micro_batches(CASE)[dist.get_rank()][: (5, 2, 4, 1)[dist.get_rank()]]
    trainer = make_trainer(AutomodelStrategy(expert_parallel_size=2))
    trainer.validate(SpreadModule(MixtureDecoder()), DataLoader(batches, batch_size=None))


def test_unequal_evaluation(pool4: RankPool) -> None:
    """Other ranks' tokens would wait for the experts of a rank that runs no forwards."""
    with pytest.raises(RankError, match=r"evaluated all its data.*limit_val_batches"):
        pool4.run(_evaluate)


class _Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(8, 3, dtype=torch.uint8), requires_grad=False)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(8)
        self.norm = nn.LayerNorm(6)


def _distributed(mesh: DeviceMesh) -> None:
    experts = Experts(8)
    spread_experts(experts, mesh)
    spread_experts(experts, mesh)  # stays as it is
    experts.up = nn.Parameter(
        distribute_tensor(torch.zeros(8, 3), init_device_mesh("cpu", (4,)), [Shard(0)])
    )
    spread_experts(experts, mesh)


WRONG_CALLS: dict[str, tuple[Callable[[DeviceMesh], None], str]] = {
    "codes": (
        lambda mesh: spread_experts(_Quantised(), mesh),
        "codes of _Quantised is a Parameter of torch.uint8, which cannot be split by experts",
    ),
    "distributed": (
        _distributed,
        "up of Experts is a DTensor of torch.float32, which cannot be split by experts",
    ),
    "other parameters": (
        lambda mesh: spread_experts(_Layer(), mesh, names=["experts.up", "norm.weight"]),
        "and _Layer has {'experts.up': (8, 5, 6), 'norm.weight': (6,)}: pass names=",
    ),
    "another mesh": (
        lambda mesh: spread_experts(Experts(8), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))),
        "got a mesh with the dimensions ('dp',) of sizes (4,)",
    ),
}


def _messages() -> dict[str, str]:
    """Runs on every rank."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("expert_parallel",))
    found = {}
    for name, (call, _) in WRONG_CALLS.items():
        try:
            call(mesh)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_calls(pool4: RankPool) -> None:
    for found in pool4.run(_messages):
        for name, (_, message) in WRONG_CALLS.items():
            assert message in found[name], name


def _spread() -> dict[str, Any]:
    """Runs on every rank."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("expert_parallel",))
    layer = _Layer()
    with torch.no_grad():
        layer.experts.up.copy_(torch.arange(8.0).view(8, 1, 1) + 100 * dist.get_rank())
    layer.experts.up.note = "a tag"
    layer.experts.up.requires_grad_(False)
    spread_experts(layer, mesh, ["experts.up"])
    up = layer.experts.up
    return {
        "experts": up.to_local()[:, 0, 0].tolist(),
        "note": up.note,
        "trains": up.requires_grad,
        "whole": [name for name, parameter in layer.named_parameters() if type(parameter) is nn.Parameter],
    }


def test_what_is_spread(pool4: RankPool) -> None:
    """The first rank's values, by the order of ranks; attributes and flags stay."""
    for rank, found in enumerate(pool4.run(_spread)):
        assert found["experts"] == [2.0 * rank, 2.0 * rank + 1]
        assert (found["note"], found["trains"]) == ("a tag", False)
        assert "norm.weight" in found["whole"]
