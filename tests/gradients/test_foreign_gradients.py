"""Gradients that users compute beside the strategy's own backward, and that they use in it.

`tests/search` draws gradients of inputs and parameters, and forwards, in each hook (`foreign`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import LEARNING_RATE, MOMENTUM, assert_exact, full_weights, weight_error
from tests.trainer.runs import TOLERANCE, by_default, first_by_default, make_trainer

WIDTH = 5
CLASSES = 3
NUM_BATCHES = 4
ACCUMULATE = 2
Batch = tuple[Tensor, Tensor]

LAYOUTS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_during_accumulation": False},
    "resharded": {"reshard_during_accumulation": True},
    "undeferred": {"defer_fsdp_grad_sync": False},
    "checkpointed": {"reshard_during_accumulation": True, "activation_checkpointing": True},
    "hsdp": {"data_parallel_replicate_size": 2, "reshard_during_accumulation": False},
    "hsdp resharded": {"data_parallel_replicate_size": 2, "reshard_during_accumulation": True},
    "hsdp all_reduce": {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"},
    "ddp": {"data_parallel": "ddp"},
}


class Net(nn.Module):
    """A stem and a head in the root unit, and two blocks that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        generator = torch.Generator().manual_seed(3)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, inputs: Tensor) -> Tensor:
        """[b, d] inputs to [b, c] logits."""
        hidden = torch.tanh(self.stem(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batch_of(rank: int, index: int) -> Batch:
    """[b, d] inputs and [b] labels, b differs by rank and index."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    rows = 2 + 3 * rank + index % 3
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def of_loss_and_penalty(net: Net, batch: Batch) -> None:
    """The penalty is on parameters as the module shows them before the forward, the loss on what it gathers."""
    parameters = list(net.parameters())
    with torch.enable_grad():
        loss = F.cross_entropy(net(batch[0]), batch[1])
        of_loss = torch.autograd.grad(loss, parameters, retain_graph=True)
        penalty = sum(parameter.square().sum() for parameter in parameters)
        of_both = torch.autograd.grad(loss + penalty, parameters)
    for parameter, first, both in zip(parameters, of_loss, of_both, strict=True):
        assert (both - first - 2 * parameter.detach()).abs().max() < 1e-9


class Trains(LightningModule):
    """Trains the net on its mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            [batch_of(dist.get_rank(), index) for index in range(NUM_BATCHES)], batch_size=None
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def fit(make: Callable[[], Trains], options: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    """Runs on every rank: weights."""
    module = make()
    trainer = make_trainer(AutomodelStrategy(count="samples", **options), accumulate_grad_batches=accumulate)
    trainer.fit(module)
    return full_weights(module.net)


def fit_or_error(
    make: Callable[[], Trains], options: dict[str, Any], accumulate: int
) -> dict[str, Tensor] | str:
    """Weights, or the message of the RuntimeError."""
    try:
        return fit(make, options, accumulate)
    except RuntimeError as error:
        return str(error)


def sum_of_losses(net: Net, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="sum")


def plainly(
    accumulate: int,
    num_ranks: int = 2,
    sums: Callable[[Net, Batch], Tensor] = sum_of_losses,
    trains: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters,
    prepare: Callable[[Net], Any] = lambda net: None,
    count: Callable[[Batch], int] = lambda batch: len(batch[1]),
) -> dict[str, Tensor]:
    """Weights of one process.

    ``sums`` gives [] the sum of the losses of a batch, ``trains`` what the backwards train, ``prepare`` changes the
    network, and ``count`` says how much a batch weighs.
    """
    net = Net()
    prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for start in range(0, NUM_BATCHES, accumulate):
        batches = [
            batch_of(rank, index) for rank in range(num_ranks) for index in range(start, start + accumulate)
        ]
        optimizer.zero_grad()
        mean = sum(sums(net, batch) for batch in batches) / sum(map(count, batches))
        mean.backward(inputs=list(trains(net)))  # type: ignore[union-attr]
        optimizer.step()
    return full_weights(net)


class LooksBeside(Trains):
    """Computes gradients before its forward or behind it."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.is_first:
            of_loss_and_penalty(self.net, batch)
        loss = self.loss(batch)
        if not self.is_first:
            of_loss_and_penalty(self.net, batch)
        return loss


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("is_first", "layout"),
    first_by_default(
        [(True, "kept"), (False, "ddp"), (False, "checkpointed"), (True, "hsdp all_reduce")], 2
    ),
)
def test_gradients_by_shards_and_gathered_parameters(
    pool2: RankPool, pool4: RankPool, is_first: bool, layout: str
) -> None:
    """In one call, while a window is open: both are right, and training is what it is without."""
    pool = pool4 if "hsdp" in layout else pool2
    found = pool.run(fit, partial(LooksBeside, is_first), LAYOUTS[layout], ACCUMULATE)
    assert_exact(found, plainly(ACCUMULATE, pool.num_ranks))


# --- Gradients that training uses -------------------------------------------------------------------------------------


def by_plain_backward(net: Net, batch: Batch) -> Tensor:
    """[b] losses of adversarial inputs, as people wrote it first: weights get gradients too."""
    inputs = batch[0].clone().requires_grad_()
    F.cross_entropy(net(inputs), batch[1]).backward()
    moved = batch[0] + 0.1 * inputs.grad.sign()
    return F.cross_entropy(net(moved), batch[1], reduction="none")


def penalty(net: Net, batch: Batch) -> Tensor:
    """[b] squared norms of the gradients of inputs, which training differentiates again."""
    inputs = batch[0].clone().requires_grad_()
    gradient = torch.autograd.grad(net(inputs).square().sum(), inputs, create_graph=True)[0]
    return 0.1 * gradient.square().sum(1)


USED = {"by_plain_backward": by_plain_backward, "penalty": penalty}


class Uses(Trains):
    """Adds what ``USED`` makes of foreign gradients to the loss."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.used = USED[used]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.used(self.net, batch).mean()


def _penalised(net: Net, batch: Batch) -> Tensor:
    return sum_of_losses(net, batch) + penalty(net, batch).sum()


@pytest.mark.every_case
@pytest.mark.parametrize("layout", by_default({name: name for name in LAYOUTS}, "resharded", "kept"))
def test_gradients_that_training_differentiates(pool2: RankPool, pool4: RankPool, layout: str) -> None:
    """Right where parameters stay gathered; second derivatives through freed ones name the option that keeps them."""
    options = LAYOUTS[layout]
    pool = pool4 if "hsdp" in layout else pool2
    expected = plainly(ACCUMULATE, pool.num_ranks, _penalised)
    for found in pool.run(fit_or_error, partial(Uses, "penalty"), options, ACCUMULATE):
        if options.get("reshard_during_accumulation", False):
            assert isinstance(found, str)
            assert "A backward needed parameters that FSDP2 had freed" in found
            assert "reshard_during_accumulation=False" in found
        else:
            assert not isinstance(found, str), found
            assert weight_error(found, expected) <= TOLERANCE


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_second_derivatives_of_selective_checkpoints(pool2: RankPool, engine: str) -> None:
    """Refused with a remedy, which "penalty" with "checkpointed" layouts trains."""
    options = {"data_parallel": engine, "activation_checkpointing": "selective"}
    for message in pool2.run(fit_or_error, partial(Uses, "penalty"), options, 1):
        assert "Pass activation_checkpointing=True" in message


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(LAYOUTS, "kept", "ddp"))
def test_a_plain_backward_in_mid_window(pool2: RankPool, pool4: RankPool, options: dict[str, Any]) -> None:
    """Its gradients would join those of the window, and under DDP differ by rank."""
    pool = pool4 if "data_parallel_replicate_size" in options else pool2
    for message in pool.run(fit_or_error, partial(Uses, "by_plain_backward"), options, ACCUMULATE):
        assert isinstance(message, str)
        assert "A plain loss.backward() in the middle of an accumulation window" in message
        assert "torch.autograd.grad(loss, inputs)" in message


def _first_parts(net: nn.Module) -> Iterator[nn.Parameter]:
    """A whole unit, and a part of the root."""
    return itertools.chain(net.blocks[0].parameters(), net.head.parameters())  # type: ignore[index,union-attr]


class TrainsParts(Trains):
    """Names the parameters that a backward trains, as a GAN may without toggling."""

    def __init__(self, only_first: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.only_first = only_first

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        trained = _first_parts(self.net) if self.only_first else self.net.parameters()
        self.manual_backward(self.loss(batch), inputs=list(trained))
        optimizer.step()


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(LAYOUTS, "kept"))
@pytest.mark.parametrize("only_first", [False, True])
def test_a_backward_of_some_parameters(
    pool2: RankPool, pool4: RankPool, only_first: bool, options: dict[str, Any]
) -> None:
    """`manual_backward(loss, inputs=parameters)` trains these and no others. Torch's DDP waits for the others."""
    pool = pool4 if "data_parallel_replicate_size" in options else pool2
    expected = plainly(1, pool.num_ranks, trains=_first_parts if only_first else nn.Module.parameters)
    if only_first and "data_parallel" in options:
        with pytest.raises(
            RankError, match="DistributedDataParallel did not reduce all gradients of this window"
        ):
            pool.run(fit, partial(TrainsParts, only_first), options, 1)
        return
    assert_exact(pool.run(fit, partial(TrainsParts, only_first), options, 1), expected)
