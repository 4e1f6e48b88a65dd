"""What cannot be trained is refused with its reason, by every rank, in the place of errors from the depths of torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.runs import make_trainer

DDP: dict[str, Any] = {"data_parallel": "ddp"}
RESHARDS: dict[str, Any] = {"reshard_during_accumulation": True}


class Net(LightningModule):
    """A small regression; every case below changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class GradientPenalty(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch.clone().requires_grad_()
        loss = self.net(batch).pow(2).mean()
        (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + gradient.pow(2).sum()


class PenaltyOfConvolutions(GradientPenalty):
    """Torch has another message for these."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.SiLU(), nn.Conv2d(3, 1, 1)
        )


class NormOfWeightsFirst(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        norm = sum(parameter.pow(2).sum() for parameter in self.parameters())
        return super().training_step(batch, batch_idx) + norm


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class FreezesLater(Net):
    """Names of parameters must be those of the time when DDP was set up."""

    def on_train_start(self) -> None:
        self.net[0].requires_grad_(False)


class CopiesItself(Net):
    """A teacher, as it is often made."""

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.net)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = torch.arange(len(batch), device=batch.device)
        return self.net(batch + self.embedding(rows)).pow(2).mean()


class FreesMemory(Net):
    """As operators of a new device may return tensors without memory: nothing of FSDP2's."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        positions = torch.arange(4.0)
        positions.untyped_storage().resize_(0)
        return self.net(batch + positions.expand(2, 4)).pow(2).mean()


class StepsByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@dataclass(frozen=True)
class Refused:
    make: type[Net]
    message: str
    options: dict[str, Any] = field(default_factory=dict)
    trainer_options: dict[str, Any] = field(default_factory=dict)


STATIC_GRAPH = "ddp_kwargs: static_graph=True works under automatic optimization without accumulation alone"
UNREDUCED = (
    "DistributedDataParallel did not reduce all gradients of this window: some parameters took no part in its"
    " last micro-batch"
)
FREED = (
    "A backward needed parameters that FSDP2 had freed. It gathers those of a unit again when a gradient"
    " reaches what the unit has returned."
)
REFUSED: dict[str, Refused] = {
    "gradient-penalty": Refused(GradientPenalty, FREED, RESHARDS),
    "gradient-penalty-of-convolutions": Refused(PenaltyOfConvolutions, FREED, RESHARDS),
    "norm-before-the-forward": Refused(
        NormOfWeightsFirst,
        "net.2.bias, net.2.weight, net.0.bias: 4 parameters that FSDP2 shards got a gradient that it does not"
        " reduce, since training_step uses them outside of their unit's forward.",
    ),
    "copies-itself": Refused(CopiesItself, "copy.deepcopy() of a sharded module, which torch refuses. Make"),
    "sparse": Refused(
        Sparse, "FSDP2 cannot reduce sparse gradients, such as those of nn.Embedding(sparse=True)."
    ),
    "unused": Refused(Unused, UNREDUCED, DDP, {"accumulate_grad_batches": 2}),
    "frozen-later": Refused(
        FreezesLater,
        UNREDUCED
        + " micro-batch (unused, frozen since set-up, or not toggled), so ranks would step with different gradients."
        " Pass AutomodelStrategy(data_parallel='ddp', ddp_kwargs={'find_unused_parameters': True}).",
        DDP,
    ),
    "memory-that-ddp-never-freed": Refused(FreesMemory, "setStorage: sizes [2, 4]", DDP),
    "static-graph-by-hand": Refused(
        StepsByHand, STATIC_GRAPH, {**DDP, "ddp_kwargs": {"static_graph": True}}
    ),
    "static-graph-accumulating": Refused(
        Net, STATIC_GRAPH, {**DDP, "ddp_kwargs": {"static_graph": True}}, {"accumulate_grad_batches": 2}
    ),
}


def fit(module: LightningModule, options: dict[str, Any], **trainer_options: Any) -> None:
    samples = [torch.linspace(-1, 1, 4) * (index + 1) for index in range(8)]
    strategy = AutomodelStrategy(per_token_loss=False, **options)
    make_trainer(strategy, **trainer_options).fit(module, DataLoader(samples, batch_size=2))


def _error(case: Refused) -> str:
    with pytest.raises((ValueError, RuntimeError, AssertionError)) as raised:
        fit(case.make(), case.options, **case.trainer_options)
    return str(raised.value)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(pool2: RankPool, case: Refused) -> None:
    for message in pool2.run(_error, case):
        assert message.startswith(case.message)


@pytest.mark.parametrize("make", [GradientPenalty, NormOfWeightsFirst, Sparse])
def test_ddp_is_the_way_out_that_the_messages_name(pool2: RankPool, make: type[Net]) -> None:
    pool2.run(_fit, make)


def _fit(make: type[Net]) -> None:
    fit(make(), DDP)
