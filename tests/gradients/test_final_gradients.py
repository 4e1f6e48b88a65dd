"""Gradients are final when a window's last backward returns: whatever a user then does with them equals one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.gradients.every_optimizer import step_alone
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Batch,
    TinyDecoder,
    assert_exact,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.plain import ModelModule
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import LabelledModule, by_default, count_labels, loader, make_trainer

UNUSED = {"find_unused_parameters": True}
DDP = {"data_parallel": "ddp", "ddp_kwargs": UNUSED}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "undeferred": (2, {"defer_fsdp_grad_sync": False}),
    "ddp": (2, DDP),
    "bucket_view": (2, {**DDP, "ddp_kwargs": {**UNUSED, "gradient_as_bucket_view": True}}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "hsdp_all_reduce": (4, {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"}),
}


# --- What users write under manual optimization: the same code on ranks, and in one plain process --------------------

NUM_BATCHES = 4
RADIUS = 0.05


def case(num_ranks: int) -> Case:
    """Ragged data; some micro-batches hold no label token."""
    return Case(seed=21, telling="labels", num_batches=NUM_BATCHES, gap="micro_batches", num_ranks=num_ranks)


def count(batches: list[Batch]) -> int:
    """Label tokens of some batches."""
    return sum(map(count_labels, batches))


class Recipe(LightningModule):
    """Two decoders whose logits meet; subclasses train them."""

    two_optimizers = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.left = TinyDecoder(1).double()
        self.right = TinyDecoder(2).double()

    def loss(self, batches: list[Batch]) -> Tensor:
        """Mean over the label tokens of the batches that this process has."""
        losses = []
        for batch in batches:
            logits = self.left(batch["input_ids"]) + self.right(batch["input_ids"])
            labels = batch["labels"].flatten()
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
        return torch.stack(losses).sum() / max(count(batches), 1)

    def backward_on(self, batches: list[Batch], **kwargs: Any) -> None:
        """The usual call."""
        self.manual_backward(self.loss(batches), num_label_tokens=count(batches), **kwargs)

    def configure_optimizers(self) -> Any:
        """SGD with momentum over everything, or one for each decoder."""
        groups = [self.left, self.right] if self.two_optimizers else [self]
        made = [
            torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM) for module in groups
        ]
        return made if self.two_optimizers else made[0]


class SharpnessAware(Recipe):
    """SAM by hand: climb along the gradient, take the gradient there, come back, step.

    One backward for two optimizers, named or not: Muon beside AdamW, a body and a head.
    """

    two_optimizers = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        named = ({}, {"optimizer": optimizers}, {"optimizer": optimizers[0]})[batch_idx % 3]
        self.zero_grad()
        self.backward_on(batch, **named)
        climb = []
        with torch.no_grad():
            for parameter in self.parameters():
                climb.append(RADIUS * parameter.grad)
                parameter.add_(climb[-1])
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.backward_on(batch)
        with torch.no_grad():
            for parameter, step in zip(self.parameters(), climb, strict=True):
                parameter.sub_(step)
        for optimizer in optimizers:
            optimizer.step()


class AddedInBetween(Recipe):
    """What a user puts into `.grad` within a window is added at the end, unscaled; an untoggled backward ends it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 2 == 1:
            self.backward_on(batch, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
            return
        with optimizer.toggle_model(sync_grad=False):
            self.backward_on(batch)
        assert all(parameter.grad is None for parameter in self.parameters())
        for parameter in self.parameters():
            parameter.grad = 0.01 * parameter.detach()


class GradientsByHand(Recipe):
    """Writes `.grad` itself, the same on all ranks, as evolution strategies do."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for parameter, gradient in zip(self.parameters(), self.gradients(batch), strict=True):
            parameter.grad = gradient
        self.optimizers().step()

    def gradients(self, batch: Any) -> Iterable[Tensor]:
        return (torch.full(parameter.shape, 0.1, dtype=parameter.dtype) for parameter in self.parameters())


RECIPES = {recipe.__name__: recipe for recipe in (SharpnessAware, AddedInBetween, GradientsByHand)}
"""`tests/search` draws GANs, windows of two optimizers or that add, and gradients that are zeroed in mid-window."""


class _PlainOptimizer:
    """The part of Lightning's wrapper that recipes use."""

    def __init__(self, module: Recipe, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.step = optimizer.step
        self.zero_grad = optimizer.zero_grad

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        self.module.plain_sync = sync_grad
        yield
        self.module.plain_sync = True


def run_plainly(recipe: type[Recipe], num_ranks: int) -> dict[str, Tensor]:
    """Weights of one process that has every rank's data."""

    class Plain(recipe):  # type: ignore[valid-type,misc]
        plain_sync = True

        def optimizers(self, use_pl_optimizer: bool = True) -> Any:
            return self.plain_optimizers if self.two_optimizers else self.plain_optimizers[0]

        def manual_backward(self, loss: Tensor, num_label_tokens: int, **_: Any) -> None:
            self.window.append((loss * num_label_tokens, num_label_tokens))
            if not self.plain_sync:
                return
            total = sum(tokens for _, tokens in self.window)
            mean = torch.stack([summed for summed, _ in self.window]).sum() / max(total, 1)
            self.window.clear()
            mean.backward()

    module = Plain()
    module.window = []
    made = module.configure_optimizers()
    module.plain_optimizers = [
        _PlainOptimizer(module, o) for o in (made if recipe.two_optimizers else [made])
    ]
    for index, batches in enumerate(zip(*micro_batches(case(num_ranks)), strict=True)):
        module.training_step(list(batches), index)
    return full_weights(module)


def _batches(num_ranks: int) -> DataLoader:
    return DataLoader(
        [[batch] for batch in micro_batches(case(num_ranks))[dist.get_rank()]], batch_size=None
    )


def _fit_recipe(make: type[Recipe], options: dict[str, Any]) -> dict[str, Tensor]:
    module = make()
    make_trainer(AutomodelStrategy(**options)).fit(module, _batches(dist.get_world_size()))
    return full_weights(module)


@pytest.mark.every_case
@pytest.mark.parametrize("engine", by_default({name: name for name in ENGINES}, "fsdp2", "ddp"))
@pytest.mark.parametrize("name", RECIPES)
def test_what_users_write(pool2: RankPool, pool4: RankPool, name: str, engine: str) -> None:
    """Manual optimization, each row under each engine: weights are those of one process."""
    num_ranks, options = ENGINES[engine]
    pool = pool2 if num_ranks == 2 else pool4
    assert_exact(pool.run(_fit_recipe, RECIPES[name], options), run_plainly(RECIPES[name], num_ranks))


# --- A backward that is not the strategy's ----------------------------------------------------------------------------


class PlainBackward(Recipe):
    """No count, no `manual_backward`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


def test_plain_backward_is_averaged_by_fsdp2(pool2: RankPool) -> None:
    """FSDP2 synchronises it: the mean over ranks, no tokens asked."""
    module = PlainBackward()
    optimizer = module.configure_optimizers()
    for batches in zip(*micro_batches(case(2)), strict=True):
        optimizer.zero_grad()
        torch.stack([module.loss([batch]) for batch in batches]).mean().backward()
        optimizer.step()
    assert_exact(pool2.run(_fit_recipe, PlainBackward, {}), full_weights(module))


class PlainBackwardAfterwards(LabelledModule):
    """Automatic optimization, with an auxiliary loss of this rank in a hook."""

    def on_after_backward(self) -> None:
        (self.model.head.weight * (1 + dist.get_rank())).sum().backward()


class PlainBackwardOfAScalar(PlainBackward):
    """FSDP2 neither shards a scalar nor averages its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), num_label_tokens=1)
        (self.scale * (1 + dist.get_rank())).backward()
        optimizer.step()


class UnequalByHand(GradientsByHand):
    """Writes what `torch.autograd.grad` returns: of a shard each rank would step its part with its own."""

    def gradients(self, batch: Any) -> Iterable[Tensor]:
        return torch.autograd.grad(self.loss(batch), list(self.parameters()))


class ActsInMidWindow(Recipe):
    """Does something with its optimizer while a window is open."""

    def __init__(self, act: Callable[[Recipe, Any], Any]) -> None:
        super().__init__()
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=False):
            self.backward_on(batch)
        if batch_idx == 1:
            self.act(self, optimizer)


class UntoggledBesideTwo(Recipe):
    two_optimizers = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model(sync_grad=False):
                self.backward_on(batch)
        self.backward_on(batch)


class PlainBesideAnother(Recipe):
    """A plain backward while the window of one optimizer is open, and that of another one has ended."""

    two_optimizers = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, ends in zip(self.optimizers(), (False, True), strict=True):
            with optimizer.toggle_model(sync_grad=ends):
                self.backward_on(batch)
        self.loss(batch).backward()


class SharedParameters(UntoggledBesideTwo):
    """A layer that both optimizers train."""

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD([*player.parameters(), self.left.head.weight])
            for player in (self.right, self.left.norm)
        ]


IN_MID_WINDOW = "in the middle of an accumulation window"
MISUSE: dict[str, tuple[Callable[[], Recipe], str]] = {
    "step": (
        lambda: ActsInMidWindow(lambda module, optimizer: optimizer.step()),
        f"SGD.step() {IN_MID_WINDOW}: 2 backward(s) have accumulated",
    ),
    "step with a closure": (
        lambda: ActsInMidWindow(lambda module, optimizer: optimizer.optimizer.step(lambda: torch.zeros(()))),
        f"SGD.step() {IN_MID_WINDOW}",
    ),
    "clip": (
        lambda: ActsInMidWindow(lambda module, opt: module.clip_gradients(opt, 1.0, "value")),
        IN_MID_WINDOW,
    ),
    "two windows": (UntoggledBesideTwo, "2 accumulation windows are open (SGD, SGD)"),
    "shared": (SharedParameters, "1 parameters of SGD belong to the open accumulation window of SGD"),
    "plain": (PlainBesideAnother, "A plain loss.backward() in the middle of an accumulation window"),
    "unequal": (UnequalByHand, "SGD would step with gradients that differ between ranks"),
}
REFUSED = {
    f"{name}, {engine}": Refused(make, (sentence,), lambda: _batches(2), ENGINES[engine][1])
    for name, (make, sentence) in MISUSE.items()
    for engine in ("fsdp2", "ddp")
}
REFUSED |= {
    "plain backward": Refused(
        PlainBackward, ("Call self.manual_backward(loss) instead",), lambda: _batches(2), DDP
    ),
    "plain backward in a hook": Refused(
        PlainBackwardAfterwards,
        ("under automatic optimization, return the sum of the losses",),
        options={"data_parallel": "ddp"},
    ),
    "plain backward of a scalar": Refused(
        PlainBackwardOfAScalar,
        ("1 parameters of SGD have gradients of a plain loss.backward()",),
        lambda: _batches(2),
    ),
}


def test_misuse_raises(pool2: RankPool) -> None:
    """Never zero, never a guess, and never ranks that drift apart: with the next step in the sentence."""
    check_refused(pool2, __name__)


class FailsInBackward(Recipe):
    """Halfway: the gradients of one decoder are there, those of the other are not."""

    restored = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        before = {parameter: torch.full_like(parameter, 0.5) for parameter in self.parameters()}
        for parameter, grad in before.items():
            parameter.grad = grad
        self.left.blocks[0].register_forward_hook(_fail_in_backward)
        loss = self.loss(batch)
        try:
            self.manual_backward(loss, num_label_tokens=count(batch))
        finally:
            self.restored = all(parameter.grad is grad for parameter, grad in before.items())


def _fail_in_backward(module: torch.nn.Module, args: Any, output: Tensor) -> None:
    def fail(_: Tensor) -> None:
        raise ArithmeticError("in the middle of a backward")

    output.register_hook(fail)


def _restored_after_failure(options: dict[str, Any]) -> bool:
    module = FailsInBackward()
    trainer = make_trainer(AutomodelStrategy(**options))
    with pytest.raises(ArithmeticError):
        trainer.fit(module, _batches(2))
    return module.restored


@pytest.mark.each_value
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_a_failed_backward_leaves_what_stood_there(pool2: RankPool, engine: str) -> None:
    """The user's own tensors, untouched, on every rank."""
    assert pool2.run(_restored_after_failure, ENGINES[engine][1]) == [True, True]


# --- Automatic optimization -------------------------------------------------------------------------------------------


def _lbfgs(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Compares losses of several closures in one step."""
    return torch.optim.LBFGS(parameters, lr=LEARNING_RATE, max_iter=4, line_search_fn="strong_wolfe")


class ByClosures(LabelledModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _lbfgs(self.parameters())


def _fit_by_closures(options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    module = ByClosures()
    strategy = AutomodelStrategy(**options)
    trainer = make_trainer(strategy, limit_train_batches=NUM_BATCHES - 1)
    trainer.fit(module, loader(case(dist.get_world_size())))
    return full_weights(module.model), int(strategy.last_step.num_micro_batches)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp", "hsdp"])
def test_several_closures_in_a_step(pool2: RankPool, pool4: RankPool, engine: str) -> None:
    """Each closure is a window of its own, and returns its loss over all ranks; the report counts all of them."""
    num_ranks, options = ENGINES[engine]
    module = ModelModule(TinyDecoder(20).double())
    optimizer = _lbfgs(module.parameters())
    called = [0]
    for index in range(NUM_BATCHES - 1):
        step_alone(module, optimizer, case(num_ranks), [index])
        called.append(next(iter(optimizer.state.values()))["func_evals"])
    pool = pool2 if num_ranks == 2 else pool4
    for weights, num_micro_batches in pool.run(_fit_by_closures, options):
        assert (
            weight_error(weights, full_weights(module.model)) <= 1e-9
        )  # it amplifies the rounding of a loss
        assert num_micro_batches == (called[-1] - called[-2]) * num_ranks > num_ranks
