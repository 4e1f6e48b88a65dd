"""What cannot be trained is refused with its reason, by every rank, in the place of errors from the depths of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.refusals import Refused, check_refused
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


class TooLarge(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


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


class SeveralDtypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.net[:2](batch)
        return self.net[2](hidden.double()).pow(2).mean()


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

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))


STATIC_GRAPH = "ddp_kwargs: static_graph=True works under automatic optimization without accumulation alone"
UNREDUCED = (
    "DistributedDataParallel did not reduce all gradients of this window: some parameters took no part in its"
    " last micro-batch (unused, frozen since set-up, or not toggled), so ranks would step with different gradients."
    " Pass AutomodelStrategy(data_parallel='ddp', ddp_kwargs={'find_unused_parameters': True})."
)
FREED = (
    "A backward needed parameters that FSDP2 had freed. It gathers those of a unit again when a gradient"
    " reaches what the unit has returned."
)


def batches() -> list[Tensor]:
    return [torch.linspace(-1, 1, 4).repeat(2, 1) * (index + 1) for index in range(4)]


def refused(make: type[Net], message: str, options: dict[str, Any], **settings: Any) -> Refused:
    return Refused(make, (message,), batches, {"per_token_loss": False, **options}, settings)


REFUSED = {
    "too-large": refused(
        TooLarge, "parameters stay gathered and gradients unsharded until a window ends", {}
    ),
    "gradient-penalty": refused(GradientPenalty, FREED, RESHARDS),
    "gradient-penalty-of-convolutions": refused(PenaltyOfConvolutions, FREED, RESHARDS),
    "copies-itself": refused(
        CopiesItself, "copy.deepcopy() of a sharded module, which torch refuses. Make", {}
    ),
    "sparse": refused(
        Sparse, "FSDP2 cannot reduce sparse gradients, such as those of nn.Embedding(sparse=True).", {}
    ),
    "several-dtypes": refused(
        SeveralDtypes,
        "Trainable parameters of one FSDP unit have several dtypes, and FSDP2 reduces their gradients in one.",
        {"auto_wrap_policy": set()},
    ),
    "unused": refused(Unused, UNREDUCED, DDP, accumulate_grad_batches=2),
    "frozen-later": refused(FreezesLater, UNREDUCED, DDP),
    "memory-that-ddp-never-freed": refused(FreesMemory, "setStorage: sizes [2, 4]", DDP),
    "static-graph-by-hand": refused(
        StepsByHand, STATIC_GRAPH, {**DDP, "ddp_kwargs": {"static_graph": True}}
    ),
    "static-graph-accumulating": refused(
        Net, STATIC_GRAPH, {**DDP, "ddp_kwargs": {"static_graph": True}}, accumulate_grad_batches=2
    ),
}


def test_refused(pool2: RankPool) -> None:
    check_refused(pool2, __name__)


def _fit_by_ddp(make: type[Net]) -> None:
    trainer = make_trainer(AutomodelStrategy(per_token_loss=False, **DDP))
    trainer.fit(make(), DataLoader(batches(), batch_size=None))


@pytest.mark.every_case
@pytest.mark.parametrize("make", [GradientPenalty, Sparse, SeveralDtypes])
def test_what_the_messages_advise(pool2: RankPool, make: type[Net]) -> None:
    """Trains."""
    pool2.run(_fit_by_ddp, make)
