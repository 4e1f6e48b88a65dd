"""Gradients that users compute beside the strategy's own backward leave nothing behind, wherever they do it.

Saliency, adversarial inputs, Grad-CAM, forces: each runs autograd while a window is open. What a window has
deferred must neither be reduced early nor counted as older than the window. The reference is one process
that never hears of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
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


# --- The gradients ----------------------------------------------------------------------------------------------------


def of_inputs(net: Net, batch: Batch) -> Tensor:
    """Saliency, and the direction of an adversarial step."""
    inputs = batch[0].clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(F.cross_entropy(net(inputs), batch[1]), inputs)[0]


def twice(net: Net, batch: Batch) -> Tensor:
    """Two gradients through one forward."""
    inputs = batch[0].clone().requires_grad_()
    with torch.enable_grad():
        logits = net(inputs)
        first = torch.autograd.grad(logits[:, 0].sum(), inputs, retain_graph=True)[0]
        return first + torch.autograd.grad(logits[:, 1].sum(), inputs)[0]


def of_all_parameters(net: Net, batch: Batch) -> Tensor:
    """First-order meta-learning: by parameters as the module shows them before the forward, which are shards."""
    parameters = list(net.parameters())
    with torch.enable_grad():
        loss = F.cross_entropy(net(batch[0]), batch[1])
        gradients = torch.autograd.grad(
            loss, [*parameters, torch.ones(1, requires_grad=True)], allow_unused=True
        )
    assert gradients[-1] is None
    assert [each.shape for each in gradients[:-1]] == [parameter.shape for parameter in parameters]
    return gradients[0]


def of_loss_and_penalty(net: Net, batch: Batch) -> Tensor:
    """The penalty is on parameters as the module shows them before the forward, the loss on what it gathers."""
    parameters = list(net.parameters())
    with torch.enable_grad():
        loss = F.cross_entropy(net(batch[0]), batch[1])
        of_loss = torch.autograd.grad(loss, parameters, retain_graph=True)
        penalty = sum(parameter.square().sum() for parameter in parameters)
        of_both = torch.autograd.grad(loss + penalty, parameters)
    for parameter, first, both in zip(parameters, of_loss, of_both, strict=True):
        assert (both - first - 2 * parameter.detach()).abs().max() < 1e-9
    return of_both[0]


GRADIENTS: dict[str, Callable[[Net, Batch], Tensor]] = {
    f.__name__: f for f in (of_inputs, twice, of_all_parameters, of_loss_and_penalty)
}


# --- Where they are computed ------------------------------------------------------------------------------------------


class Trains(LightningModule):
    """Trains the net on its mean loss, and computes foreign gradients in one of its hooks."""

    def __init__(self, gradient: str, where: str) -> None:
        super().__init__()
        self.net = Net()
        self.gradient = GRADIENTS[gradient]
        self.where = where
        self.computed = 0

    def at(self, where: str, batch: Batch) -> None:
        if where == self.where:
            assert self.gradient(self.net, batch).abs().max() > 0
            self.computed += 1

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.batch = batch
        self.at("before the forward", batch)
        loss = self.loss(batch)
        self.at("after the forward", batch)
        return loss

    def on_after_backward(self) -> None:
        self.at("on_after_backward", self.batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.at("on_before_optimizer_step", self.batch)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.at("on_train_batch_end", batch)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            [batch_of(dist.get_rank(), index) for index in range(NUM_BATCHES)], batch_size=None
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class ByHand(Trains):
    """The same under manual optimization."""

    def __init__(self, gradient: str, where: str) -> None:
        super().__init__(gradient, where)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        is_last = (batch_idx + 1) % ACCUMULATE == 0
        self.batch = batch
        self.at("before the forward", batch)
        with optimizer.toggle_model(sync_grad=is_last):
            loss = self.loss(batch)
            self.at("after the forward", batch)
            self.manual_backward(loss)
            self.at("after a manual backward", batch)
        self.at("between backwards", batch)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def fit(module: Trains, options: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    trainer = make_trainer(
        AutomodelStrategy(count="samples", **options),
        accumulate_grad_batches=accumulate if module.automatic_optimization else 1,
    )
    trainer.fit(module)
    assert module.computed
    return full_weights(module.net)


def plainly(
    accumulate: int,
    num_ranks: int = 2,
    adds: Callable[[Net, Batch], Tensor] | None = None,
    trains: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters,
    prepare: Callable[[Net], Any] = lambda net: None,
) -> dict[str, Tensor]:
    """Weights of one process.

    ``adds`` gives [b] a second loss of each row, ``trains`` what the backwards train,
    ``prepare`` changes the network.
    """
    net = Net()
    prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for start in range(0, NUM_BATCHES, accumulate):
        batches = [
            batch_of(rank, index) for rank in range(num_ranks) for index in range(start, start + accumulate)
        ]
        loss = sum(F.cross_entropy(net(inputs), labels, reduction="sum") for inputs, labels in batches)
        if adds is not None:
            loss = loss + sum(adds(net, batch).sum() for batch in batches)
        optimizer.zero_grad()
        mean = loss / sum(len(labels) for _, labels in batches)
        mean.backward(inputs=list(trains(net)))  # type: ignore[union-attr]
        optimizer.step()
    return full_weights(net)


BESIDE = [
    # What, where, by hand or not, the layout, and micro-batches a window. The search draws others: `FOUND` and
    # `NAMED` of `tests/search/test_search.py` have gradients of inputs in each hook, and forwards beside the step.
    ("twice", "on_after_backward", Trains, "resharded", 2),
    ("of_inputs", "between backwards", ByHand, "kept", 2),
    ("of_all_parameters", "before the forward", Trains, "kept", 2),
    ("of_loss_and_penalty", "on_train_batch_end", Trains, "resharded", 2),
    ("of_loss_and_penalty", "before the forward", Trains, "kept", 2),
    ("of_inputs", "on_before_optimizer_step", Trains, "checkpointed", 2),
    ("of_all_parameters", "after the forward", Trains, "hsdp all_reduce", 2),
    ("twice", "after a manual backward", ByHand, "hsdp resharded", 2),
    ("of_loss_and_penalty", "after the forward", Trains, "ddp", 2),
]


def _beside(
    gradient: str, where: str, make: type[Trains], layout: str, accumulate: int
) -> dict[str, Tensor]:
    return fit(make(gradient, where), LAYOUTS[layout], accumulate)


@pytest.mark.every_case
@pytest.mark.parametrize("case", first_by_default([(case,) for case in BESIDE], 5))
def test_gradients_beside_the_backward(pool2: RankPool, pool4: RankPool, case: tuple[Any, ...]) -> None:
    pool = pool4 if "hsdp" in case[3] else pool2
    expected = plainly(case[4], pool.num_ranks)
    assert_exact(pool.run(_beside, *case), expected)


# --- Gradients that training uses -------------------------------------------------------------------------------------


def by_plain_backward(net: Net, batch: Batch) -> Tensor:
    """[b] losses of adversarial inputs, as people wrote it first: weights get gradients too."""
    inputs = batch[0].clone().requires_grad_()
    F.cross_entropy(net(inputs), batch[1]).backward()
    assert inputs.grad is not None
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
        super().__init__("of_inputs", "nowhere")
        self.used = USED[used]
        self.computed = 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.batch = batch
        return self.loss(batch) + self.used(self.net, batch).mean()


class UsesByHand(Uses):
    def __init__(self, used: str) -> None:
        super().__init__(used)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        is_last = (batch_idx + 1) % ACCUMULATE == 0
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(super().training_step(batch, batch_idx))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def _using(used: str, by_hand: bool, options: dict[str, Any], accumulate: int) -> dict[str, Tensor] | str:
    module = UsesByHand(used) if by_hand else Uses(used)
    try:
        return fit(module, options, accumulate)
    except RuntimeError as error:
        return str(error)


FREED = "A backward needed parameters that FSDP2 had freed"


USES = {
    f"{'by hand' if by_hand else 'automatic'}, {layout}": (by_hand, layout)
    for by_hand in (False, True)
    for layout in LAYOUTS
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "case", by_default(USES, "automatic, kept", "automatic, resharded", "by hand, undeferred")
)
def test_gradients_that_training_differentiates(
    pool2: RankPool, pool4: RankPool, case: tuple[bool, str]
) -> None:
    """Right where parameters stay gathered; second derivatives through freed ones name the option that keeps them."""
    by_hand, layout = case
    options = LAYOUTS[layout]
    pool = pool4 if "hsdp" in layout else pool2
    expected = plainly(ACCUMULATE, pool.num_ranks, penalty)
    frees = options.get("reshard_during_accumulation", by_hand)  # by hand, "auto" does
    for found in pool.run(_using, "penalty", by_hand, options, ACCUMULATE):
        if frees and layout != "ddp":
            assert isinstance(found, str)
            assert FREED in found
            assert "reshard_during_accumulation=False" in found
        else:
            assert not isinstance(found, str), found
            assert weight_error(found, expected) <= TOLERANCE


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_second_derivatives_of_selective_checkpoints(pool2: RankPool, engine: str) -> None:
    """Refused with a remedy, which "penalty" with "checkpointed" layouts trains."""
    options = {"data_parallel": engine, "activation_checkpointing": "selective"}
    for message in pool2.run(_using, "penalty", False, options, 1):
        assert "Pass activation_checkpointing=True" in message


def test_a_plain_backward_in_the_first_forward_of_a_window(pool2: RankPool) -> None:
    """As adversarial training was first written. Lightning zeroes what it gives to weights before the real backward."""
    expected = plainly(1, adds=by_plain_backward)
    for found in pool2.run(_using, "by_plain_backward", False, {}, 1):
        assert not isinstance(found, str), found
        assert weight_error(found, expected) <= TOLERANCE


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(LAYOUTS, "kept", "ddp"))
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_plain_backward_in_mid_window(
    pool2: RankPool, pool4: RankPool, by_hand: bool, options: dict[str, Any]
) -> None:
    """Its gradients would join those of the window, and under DDP differ by rank."""
    pool = pool4 if "data_parallel_replicate_size" in options else pool2
    for message in pool.run(_using, "by_plain_backward", by_hand, options, ACCUMULATE):
        assert isinstance(message, str)
        assert "A plain loss.backward() in the middle of an accumulation window" in message
        assert "torch.autograd.grad(loss, inputs)" in message


def _first_parts(net: nn.Module) -> Iterator[nn.Parameter]:
    """A whole unit, and a part of the root."""
    return itertools.chain(net.blocks[0].parameters(), net.head.parameters())  # type: ignore[index,union-attr]


class TrainsParts(Trains):
    """Names the parameters that a backward trains, as a GAN may without toggling."""

    def __init__(self, only_first: bool) -> None:
        super().__init__("of_inputs", "nowhere")
        self.automatic_optimization = False
        self.only_first = only_first
        self.computed = 1

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.batch = batch
        optimizer.zero_grad()
        trained = _first_parts(self.net) if self.only_first else self.net.parameters()
        self.manual_backward(self.loss(batch), inputs=list(trained))
        optimizer.step()


def _train_parts(only_first: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    return fit(TrainsParts(only_first), options, 1)


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
            pool.run(_train_parts, only_first, options)
        return
    assert_exact(pool.run(_train_parts, only_first, options), expected)
