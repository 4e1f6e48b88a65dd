"""Models of every build train to the weights of one process: what is shared, frozen, plain, scalar or sharded by hand.

Shapes: b rows, s positions, d width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
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
    Batch,
    Block,
    Outcome,
    TinyDecoder,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.plain import (
    ModelModule,
    differ_by_rank,
    fill,
    filled_decoder,
    plain_weights,
    prefixed,
    train_model_plainly,
    windows,
)
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, by_default, loader, make_trainer, mean_loss

ACCUMULATE = 3
ENGINES = {name: STRATEGIES[name] for name in ("kept", "resharded", "ddp")}


class TiedRoot(TinyDecoder):
    """Embedding and head share their matrix [v, d], both in the root."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight
        fill(self)


class TiedAcross(TinyDecoder):
    """Blocks share a matrix with each other, and another with a layer of the root."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.blocks[0].linear.weight = self.adapter.weight
        self.blocks[1].norm.weight = self.blocks[2].norm.weight
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.adapter(self.embedding(input_ids)))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class SharedModules(TinyDecoder):
    """One block stands in the list twice, another is called twice, and a parameter enters twice."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.blocks.append(self.blocks[0])
        self.shift = nn.Parameter(torch.empty(WIDTH))
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids) + self.shift
        for block in (*self.blocks, self.blocks[1]):
            hidden = block(hidden)
        return self.head(self.norm(hidden * self.shift))


class Frozen(TinyDecoder):
    """A frozen block, a frozen matrix beside trainable ones in another block, a frozen embedding."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        fill(self)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].linear.weight.requires_grad_(False)
        self.embedding.requires_grad_(False)


class Scalars(TinyDecoder):
    """0-dimensional parameters in the root and in a block, and single-element and empty ones beside them."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.temperature = nn.Parameter(torch.empty(()))
        self.blocks[1].gain = nn.Parameter(torch.empty(()))
        self.single = nn.Parameter(torch.empty(1))
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden * (1 + self.blocks[1].gain) + self.single
        return self.head(self.norm(hidden)) * torch.exp(self.temperature)


class NestedSequentials(nn.Module):
    """Sequentials within a Sequential and a bare Sequential of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Sequential(Block(), nn.Sequential(Block(), nn.Tanh())),
            nn.ModuleDict({"head": nn.Linear(WIDTH, VOCABULARY)})["head"],
        )
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layers(input_ids)


class Buffers(TinyDecoder):
    """Keeps a buffer that training reads and never writes, and one that is no part of the state dict."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        fill(self)
        self.register_buffer("offset", torch.linspace(-1, 1, WIDTH, dtype=torch.float64))
        self.register_buffer("slope", torch.full((WIDTH,), 0.5, dtype=torch.float64), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids) * self.slope + self.offset
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


MODELS: list[type[nn.Module]] = [
    TiedRoot,
    TiedAcross,
    SharedModules,
    Frozen,
    Scalars,
    NestedSequentials,
    Buffers,
]


def fit_model(
    make_model: Callable[[], nn.Module],
    options: dict[str, Any],
    make_module: Callable[[nn.Module], Any] = ModelModule,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train, from different weights on every rank; return weights and buffers."""
    module = make_module(make_model())
    differ_by_rank(module)
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return full_weights(module), dict(module.named_buffers())


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("make_model", MODELS)
def test_build(pool2: RankPool, make_model: type[nn.Module], options: dict[str, Any]) -> None:
    """Exact from rank 0's weights and buffers, which every rank ends up with."""
    model = make_model()
    buffers = {f"model.{name}": buffer.clone() for name, buffer in model.named_buffers()}
    expected = prefixed(plain_weights(model, ACCUMULATE))
    for weights, found in pool2.run(fit_model, make_model, options):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
        assert found.keys() == buffers.keys()
        assert all(torch.equal(found[name], buffers[name]) for name in buffers)


class DirectParameters(ModelModule):
    """A LightningModule with parameters of its own, one of them a scalar, that its step uses outside of `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.slope = nn.Parameter(torch.full((VOCABULARY,), 0.7, dtype=torch.float64))
        self.offset = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]) * self.slope + self.offset * self.slope.square()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class WithDirectParameters(TinyDecoder):
    """The same model in one piece, for the plain loop."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        fill(self)
        self.slope = nn.Parameter(torch.full((VOCABULARY,), 0.7, dtype=torch.float64))
        self.offset = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.slope + self.offset * self.slope.square()


@pytest.mark.parametrize("options", by_default(ENGINES, "kept", "ddp"))
def test_parameters_of_the_lightning_module(pool2: RankPool, options: dict[str, Any]) -> None:
    """Parameters that belong to no submodule train like all others."""
    weights = plain_weights(WithDirectParameters(), ACCUMULATE)
    own = ("slope", "offset")
    expected = Outcome({name if name in own else f"model.{name}": w for name, w in weights.items()}, None)
    for found, _ in pool2.run(fit_model, filled_decoder, options, DirectParameters):
        assert weight_error(Outcome(found, None), expected) <= TOLERANCE


class CallsTwice(ModelModule):
    """Two forwards of the module in one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.25 * self(batch) + 0.75 * self.forward(batch)


class CallsParts(ModelModule):
    """The parts of the model one by one, its own forward never."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.model.embedding(batch["input_ids"])
        for block in self.model.blocks:
            hidden = block(hidden)
        logits = nn.functional.linear(self.model.norm(hidden), self.model.head.weight, self.model.head.bias)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
@pytest.mark.parametrize("make_module", [CallsTwice, CallsParts])
def test_step_that_calls_what_it_likes(
    pool2: RankPool, make_module: type[ModelModule], options: dict[str, Any]
) -> None:
    """A training step needs no single forward of the module."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    for weights, _ in pool2.run(fit_model, filled_decoder, options, make_module):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


def _units_of_policy(policy: str) -> tuple[dict[str, Tensor], list[str]]:
    policies = {"set": {nn.Linear}, "predicate": _is_block_or_head}
    module = ModelModule(filled_decoder())
    strategy = AutomodelStrategy(auto_wrap_policy=policies[policy])
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return full_weights(module), strategy.describe()["units"]


def _is_block_or_head(module: nn.Module) -> bool:
    return isinstance(module, Block) or (isinstance(module, nn.Linear) and module.out_features == VOCABULARY)


@pytest.mark.parametrize(
    ("policy", "units"),
    [
        ("set", [*(f"model.blocks.{i}.linear (Linear)" for i in range(3)), "model.head (Linear)"]),
        ("predicate", [*(f"model.blocks.{i} (Block)" for i in range(3)), "model.head (Linear)"]),
    ],
)
def test_auto_wrap_policy(pool2: RankPool, policy: str, units: list[str]) -> None:
    """Classes and predicates decide on the units, and change nothing else."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    for weights, found in pool2.run(_units_of_policy, policy):
        assert found == units
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


def _units_of_nested_sequentials() -> list[str]:
    strategy = AutomodelStrategy()
    make_trainer(strategy).fit(ModelModule(NestedSequentials()), loader())
    return strategy.describe()["units"]


def test_units_are_the_outermost_blocks(pool2: RankPool) -> None:
    """A Sequential within a Sequential is one unit."""
    units = ["model.layers.0 (Embedding)", "model.layers.1 (Sequential)", "model.layers.2 (Linear)"]
    assert pool2.run(_units_of_nested_sequentials) == [units] * 2


class SkipsABlock(TinyDecoder):
    """Leaves its last block out of the last micro-batch of a window."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.step = 0
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks if self.step % ACCUMULATE != 2 else self.blocks[:-1]:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def _fit_with_a_skipped_block() -> tuple[str, bool]:
    module = ModelModule(SkipsABlock())
    before = full_weights(module)
    trainer = make_trainer(AutomodelStrategy(data_parallel="ddp"), accumulate_grad_batches=ACCUMULATE)
    with pytest.raises(RuntimeError, match="took no part") as raised:
        trainer.fit(module, loader())
    after = full_weights(module)
    return str(raised.value), all(torch.equal(before[name], after[name]) for name in before)


def test_ddp_refuses_a_layer_unused_in_the_last_micro_batch(pool2: RankPool) -> None:
    """DDP would leave each rank with its own gradient: it raises before the step, with the remedy."""
    for message, unchanged in pool2.run(_fit_with_a_skipped_block):
        assert unchanged
        assert "ddp_kwargs={'find_unused_parameters': True}" in message


def test_ddp_finds_a_layer_unused_in_the_last_micro_batch(pool2: RankPool) -> None:
    """What the message advises is exact."""
    expected = prefixed(plain_weights(SkipsABlock(), ACCUMULATE))
    options = {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}
    for weights, _ in pool2.run(fit_model, SkipsABlock, options):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


STARTS_FROZEN = ("blocks.0.", "embedding.", "temperature")


def set_frozen(model: nn.Module, frozen: bool) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(STARTS_FROZEN):
            parameter.requires_grad_(not frozen)


class Unfreezes(ModelModule):
    """Is frozen in part when it is set up, and trains everything from the second epoch on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        set_frozen(model, True)

    def on_train_epoch_start(self) -> None:
        set_frozen(self.model, self.current_epoch == 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def _unfreeze(options: dict[str, Any]) -> dict[str, Tensor]:
    module = Unfreezes(Scalars())
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, max_epochs=2).fit(
        module, loader()
    )
    return full_weights(module.model)


def _unfreeze_plainly() -> dict[str, Tensor]:
    model = Scalars()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for frozen in (True, False):
        set_frozen(model, frozen)
        train_model_plainly(model, ACCUMULATE, make_optimizer=lambda _: optimizer)
    return full_weights(model)


class UnfreezesWhatIsUnused(ModelModule):
    """Has a parameter that no forward uses, frozen until the second epoch, and decays all that have a gradient."""

    def __init__(self) -> None:
        model = Scalars()
        model.unused = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        super().__init__(model)

    def on_train_epoch_start(self) -> None:
        self.model.unused.requires_grad_(self.current_epoch == 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, weight_decay=0.5)


def _decayed(options: dict[str, Any]) -> Tensor:
    module = UnfreezesWhatIsUnused()
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, max_epochs=2).fit(
        module, loader()
    )
    return full_weights(module.model)["unused"]


@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}], ids=str)
def test_unused_once_it_is_unfrozen(pool2: RankPool, options: dict[str, Any]) -> None:
    """It gets no gradient, as in one process: a zero one would let the optimizer decay it."""
    for unused in pool2.run(_decayed, options):
        assert torch.equal(unused, torch.ones_like(unused))


class UnfrozenWithinWindows(Unfreezes):
    """Trains everything only in the micro-batch in the middle of each window."""

    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        set_frozen(self.model, batch_idx % ACCUMULATE != 1)


def _unfreeze_within_windows(options: dict[str, Any]) -> dict[str, Tensor]:
    module = UnfrozenWithinWindows(Scalars())
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return full_weights(module.model)


def _unfreeze_within_windows_plainly() -> dict[str, Tensor]:
    model = Scalars()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for window in windows(CASE, ACCUMULATE):
        optimizer.zero_grad()
        counts = 0
        for batches in micro_batches(CASE):
            for index in window:
                set_frozen(model, index % ACCUMULATE != 1)
                mean_loss(model, batches[index], "sum").backward()
                counts += int((batches[index]["labels"] != -100).sum())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= max(counts, 1)
        optimizer.step()
    return full_weights(model)


UNFREEZING = {
    "kept": ENGINES["kept"],
    "resharded": ENGINES["resharded"],
    "ddp": {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}},
}


@pytest.mark.parametrize("options", by_default(UNFREEZING, "kept", "ddp"))
def test_unfreezing_during_training(pool2: RankPool, options: dict[str, Any]) -> None:
    """What was frozen at set-up trains like all else once it is not, although DDP itself never reduces it."""
    expected = Outcome(_unfreeze_plainly(), None)
    for weights in pool2.run(_unfreeze, options):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


@pytest.mark.parametrize("options", by_default(UNFREEZING, "kept", "ddp"))
def test_unfreezing_for_a_part_of_each_window(pool2: RankPool, options: dict[str, Any]) -> None:
    """What is frozen again when a window ends is averaged too: ranks would drift apart."""
    expected = Outcome(_unfreeze_within_windows_plainly(), None)
    for weights in pool2.run(_unfreeze_within_windows, options):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE
