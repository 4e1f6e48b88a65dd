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

    def features(self, inputs: Tensor) -> Tensor:
        """[b, d] inputs to [b, d] what the first block makes of them."""
        return self.blocks[0](torch.tanh(self.stem(inputs)))

    def classify(self, features: Tensor) -> Tensor:
        """[b, d] features to [b, c] logits."""
        return self.head(self.blocks[1](features))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classify(self.features(inputs))


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


def of_features(net: Net, batch: Batch) -> Tensor:
    """Grad-CAM: what a score says of a layer's activations."""
    with torch.enable_grad():
        features = net.features(batch[0])
        return torch.autograd.grad(net.classify(features)[:, 0].sum(), features)[0]


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
    f.__name__: f for f in (of_inputs, of_features, twice, of_all_parameters, of_loss_and_penalty)
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

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.at("validation", batch)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            [batch_of(dist.get_rank(), index) for index in range(NUM_BATCHES)], batch_size=None
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader([batch_of(dist.get_rank(), 7)], batch_size=None)

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
        val_check_interval=1,
        limit_val_batches=1 if module.where == "validation" else 0,
        inference_mode=False,
    )
    trainer.fit(module)
    assert module.computed
    return full_weights(module.net)


def plainly(
    accumulate: int,
    num_ranks: int = 2,
    adds: Callable[[Net, Batch], Tensor] | None = None,
    trains: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters,
    factor: float = 1.0,
) -> dict[str, Tensor]:
    """Weights of one process.

    ``adds`` gives [b] a second loss of each row. ``trains`` has what the backwards train, ``factor`` what
    gradients are multiplied by.
    """
    net = Net()
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
        (factor * mean).backward(inputs=list(trains(net)))  # type: ignore[union-attr]
        optimizer.step()
    return full_weights(net)


BESIDE = [
    # What, where, by hand or not, the layout, and micro-batches a window. The search draws others.
    ("of_inputs", "before the forward", Trains, "kept", 2),
    ("of_inputs", "after the forward", Trains, "resharded", 2),
    ("of_features", "after the forward", Trains, "kept", 1),
    ("of_inputs", "validation", Trains, "kept", 2),
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
@pytest.mark.parametrize("case", first_by_default([(case,) for case in BESIDE], 8))
def test_gradients_beside_the_backward(pool2: RankPool, pool4: RankPool, case: tuple[Any, ...]) -> None:
    pool = pool4 if "hsdp" in case[3] else pool2
    expected = plainly(case[4], pool.num_ranks)
    assert_exact(pool.run(_beside, *case), expected)


# --- Gradients that training uses -------------------------------------------------------------------------------------


def adversarial(net: Net, batch: Batch) -> Tensor:
    """[b] losses of inputs that were moved along the sign of their own gradient."""
    moved = batch[0] + 0.1 * of_inputs(net, batch).sign()
    return F.cross_entropy(net(moved), batch[1], reduction="none")


def by_plain_backward(net: Net, batch: Batch) -> Tensor:
    """[b] the same as people wrote it first: weights get gradients too."""
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


USED = {"adversarial": adversarial, "by_plain_backward": by_plain_backward, "penalty": penalty}


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


USES = {
    f"{used}, {'by hand' if by_hand else 'automatic'}, {layout}": (used, by_hand, layout)
    for used in ("adversarial", "penalty")
    for by_hand in (False, True)
    for layout in LAYOUTS
}
FREED = "A backward needed parameters that FSDP2 had freed"


def is_refused(used: str, by_hand: bool, layout: str) -> bool:
    """Second derivatives through parameters that were freed; what is asked to keep them is "auto" by hand."""
    options = LAYOUTS[layout]
    frees = options.get("reshard_during_accumulation", by_hand)
    return used == "penalty" and frees and "data_parallel" not in options


@pytest.mark.every_case
@pytest.mark.parametrize(
    "case",
    by_default(
        USES,
        "adversarial, automatic, resharded",
        "adversarial, by hand, kept",
        "penalty, automatic, kept",
        "penalty, automatic, resharded",
        "penalty, by hand, undeferred",
    ),
)
def test_gradients_that_training_uses(pool2: RankPool, pool4: RankPool, case: tuple[str, bool, str]) -> None:
    """Right where parameters stay gathered; second derivatives through freed ones name the option that keeps them."""
    used, by_hand, layout = case
    pool = pool4 if "hsdp" in layout else pool2
    expected = plainly(ACCUMULATE, pool.num_ranks, USED[used])
    for found in pool.run(_using, used, by_hand, LAYOUTS[layout], ACCUMULATE):
        if is_refused(used, by_hand, layout):
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


class ScalesAfterAForward(Trains):
    """Looks at the loss in hooks that see final gradients, and scales them there."""

    def __init__(self) -> None:
        super().__init__("of_inputs", "nowhere")
        self.computed = 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.batch = batch
        return self.loss(batch)

    def at(self, where: str, batch: Batch) -> None:
        if where in ("on_after_backward", "on_before_optimizer_step"):
            self.loss(batch)
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 0.5


def _scale(options: dict[str, Any]) -> dict[str, Tensor]:
    return fit(ScalesAfterAForward(), options, 1)


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(LAYOUTS, "kept", "resharded"))
def test_gradients_scaled_after_a_forward(pool2: RankPool, pool4: RankPool, options: dict[str, Any]) -> None:
    """A forward in a hook leaves no gathered parameters in the module, which have no gradients."""
    pool = pool4 if "data_parallel_replicate_size" in options else pool2
    expected = plainly(1, pool.num_ranks, factor=0.25)
    assert_exact(pool.run(_scale, options), expected)


class LooksAround(Trains):
    """Runs a forward before each step that no backward follows, and another one after it."""

    def __init__(self) -> None:
        super().__init__("of_inputs", "nowhere")
        self.computed = 1
        self.seen: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.batch = batch
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.net(self.batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.seen.append(float(self.net(batch_of(0, 7)[0]).detach().sum()))


def _look_around(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    module = LooksAround()
    weights = fit(module, options, 1)
    return module.seen, weights


@pytest.mark.parametrize("options", by_default(LAYOUTS, "kept"))
def test_a_forward_after_the_step_sees_its_weights(
    pool2: RankPool, pool4: RankPool, options: dict[str, Any]
) -> None:
    """What a forward before the step has gathered is older than the step."""
    pool = pool4 if "data_parallel_replicate_size" in options else pool2
    for seen, weights in pool.run(_look_around, options):
        net = Net()
        net.load_state_dict(weights)
        assert seen[-1] == pytest.approx(float(net(batch_of(0, 7)[0]).detach().sum()), rel=TOLERANCE)
