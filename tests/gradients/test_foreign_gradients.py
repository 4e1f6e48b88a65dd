"""Gradients that users compute beside the strategy's own backward, or change in it by hooks.

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
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.plain import fill, sgd
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, make_trainer, warnings_of

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
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """[b, d] inputs to [b, c] logits."""
        hidden = torch.tanh(self.stem(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batch_of(rank: int, index: int) -> Batch:
    """[b, d] inputs and [b] labels, b differs by rank and index."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    rows = 2 + 3 * rank + index % 2
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


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
        return sgd(self)


def fit_or_error(
    make: Callable[[], Trains], options: dict[str, Any], accumulate: int
) -> dict[str, Tensor] | str:
    """Runs on every rank: weights, or the message of the RuntimeError."""
    module = make()
    trainer = make_trainer(AutomodelStrategy(count="samples", **options), accumulate_grad_batches=accumulate)
    try:
        trainer.fit(module)
    except RuntimeError as error:
        return str(error)
    return full_weights(module.net)


def sum_of_losses(net: Net, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="sum")


def plainly(
    accumulate: int,
    num_ranks: int = 2,
    sums: Callable[[Net, Batch], Tensor] = sum_of_losses,
    trains: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters,
    prepare: Callable[[Net], Any] = lambda net: None,
    count: Callable[[Batch], int] = lambda batch: len(batch[1]),
    net: Any = None,
) -> dict[str, Tensor]:
    """Weights of one process.

    ``sums`` gives [] the sum of the losses of a batch, ``trains`` what the backwards train, ``prepare`` changes the
    network, and ``count`` says how much a batch weighs. Another ``net`` is told its number of calls, as of one rank.
    """
    net = Net() if net is None else net
    prepare(net)
    optimizer = sgd(net)
    for start in range(0, NUM_BATCHES, accumulate):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        counted = 0
        for index in range(start, start + accumulate):
            for rank in range(num_ranks):
                net.calls, batch = index, batch_of(rank, index)
                total = total + sums(net, batch)
                counted += count(batch)
        (total / counted).backward(inputs=[p for p in trains(net) if p.requires_grad])
        optimizer.step()
    return full_weights(net)


# --- Gradients that training uses -------------------------------------------------------------------------------------


def penalty(net: Net, batch: Batch) -> Tensor:
    """[b] squared norms of the gradients of inputs, which training differentiates again."""
    inputs = batch[0].clone().requires_grad_()
    gradient = torch.autograd.grad(net(inputs).square().sum(), inputs, create_graph=True)[0]
    return 0.1 * gradient.square().sum(1)


class Penalised(Trains):
    """Adds the penalty to the loss, and goes on with another forward of the same units."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        penalised = penalty(self.net, batch).mean()
        return self.loss(batch) + penalised

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            inputs = batch[0].clone()
            penalty(self.net, (inputs, batch[1])).sum().backward(inputs=[self.net.head.bias])


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(LAYOUTS, "resharded"))
def test_second_derivatives(pool2: RankPool, pool4: RankPool, options: dict[str, Any]) -> None:
    """What a backward with `create_graph=True` has gathered stays for the step: norms would read freed memory."""
    pool = pool4 if "data_parallel_replicate_size" in options else pool2
    expected = plainly(
        ACCUMULATE,
        pool.num_ranks,
        sums=lambda net, batch: sum_of_losses(net, batch) + penalty(net, batch).sum(),
    )
    for weights in pool.run(fit_or_error, Penalised, options, ACCUMULATE):
        assert weight_error(weights, expected) <= TOLERANCE


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_second_derivatives_of_selective_checkpoints(pool2: RankPool, engine: str) -> None:
    """Refused with a remedy, which `Penalised` with "checkpointed" layouts trains."""
    options = {"data_parallel": engine, "activation_checkpointing": "selective"}
    for message in pool2.run(fit_or_error, Penalised, options, 1):
        assert "Pass activation_checkpointing=True" in message


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
    for found in pool.run(fit_or_error, partial(TrainsParts, only_first), options, 1):
        if only_first and "data_parallel" in options:
            assert "DistributedDataParallel did not reduce all gradients of this window" in found
        else:
            assert not isinstance(found, str), found
            assert weight_error(found, expected) <= TOLERANCE


# --- Backward hooks ---------------------------------------------------------------------------------------------------

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


HOOKED = {
    f"{rule}, {how}, {layout}": (rule, how, options)
    for rule in RULES
    for how in NAMED
    for layout, options in STRATEGIES.items()
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "case", by_default(HOOKED, "clipped, module hook, kept", "clipped, tensor hook, ddp")
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
