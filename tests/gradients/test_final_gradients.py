"""Gradients are final when a window's last backward returns: whatever a user then does with them equals one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.gradients.recipes import RECIPES, Recipe, case, count, run_plainly
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    TinyDecoder,
    assert_exact,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.runs import TOLERANCE, LabelledModule, loader, make_trainer, mean_loss, refusal

# GANs leave parameters out of a backward, which DDP has to be told.
DDP = {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "undeferred": (2, {"defer_fsdp_grad_sync": False}),
    "ddp": (2, DDP),
    "bucket_view": (
        2,
        {"data_parallel": "ddp", "ddp_kwargs": {**DDP["ddp_kwargs"], "gradient_as_bucket_view": True}},
    ),  # type: ignore[dict-item]
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "hsdp_all_reduce": (4, {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"}),
}


EVERY_ENGINE = [
    pytest.param(name, marks=[] if name in ("fsdp2", "ddp", "hsdp") else [pytest.mark.sweep])
    for name in ENGINES
]


def _batches(num_ranks: int) -> DataLoader:
    return DataLoader(
        [[batch] for batch in micro_batches(case(num_ranks))[dist.get_rank()]], batch_size=None
    )


def _fit_recipe(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    module = RECIPES[name]()
    make_trainer(AutomodelStrategy(**options)).fit(module, _batches(dist.get_world_size()))
    return full_weights(module)


UNDER_DDP = ("EndedUntoggled", "NeverZeroed", "AddedInBetween", "Adversarial")


def _is_default(engine: str, name: str) -> bool:
    """Of DDP one for each kind of window; four ranks on two cores take their time: of HSDP the first recipe."""
    return (
        engine == "fsdp2"
        or (engine == "ddp" and name in UNDER_DDP)
        or (engine, name) == ("hsdp", UNDER_DDP[0])
    )


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        pytest.param(engine, name, marks=[] if _is_default(engine, name) else [pytest.mark.sweep])
        for engine in ENGINES
        for name in RECIPES
    ],
)
def test_what_users_write(pool2: RankPool, pool4: RankPool, name: str, engine: str) -> None:
    """Manual optimization, each row under each engine: weights are those of one process."""
    num_ranks, options = ENGINES[engine]
    pool = pool2 if num_ranks == 2 else pool4
    assert_exact(pool.run(_fit_recipe, name, options), run_plainly(RECIPES[name], num_ranks))


# --- A backward that is not the strategy's ----------------------------------------------------------------------------


class PlainBackward(Recipe):
    """No count, no `manual_backward`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


def _fit_plain_backward() -> dict[str, Tensor]:
    module = PlainBackward()
    make_trainer(AutomodelStrategy()).fit(module, _batches(2))
    return full_weights(module)


def test_plain_backward_is_averaged_by_fsdp2(pool2: RankPool) -> None:
    """FSDP2 synchronises it: the mean over ranks, no tokens asked."""
    module = PlainBackward()
    optimizer = module.configure_optimizers()
    for batches in zip(*micro_batches(case(2)), strict=True):
        optimizer.zero_grad()
        torch.stack([module.loss([batch]) for batch in batches]).mean().backward()
        optimizer.step()
    expected = full_weights(module)
    assert_exact(pool2.run(_fit_plain_backward), expected)


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


def _refused() -> list[str]:
    """Of a plain backward in a training step, of one in a hook, and of one under FSDP2."""
    return [
        refusal(make_trainer(AutomodelStrategy(**DDP)), PlainBackward(), _batches(2)),
        refusal(make_trainer(AutomodelStrategy(data_parallel="ddp")), PlainBackwardAfterwards(), loader()),
        refusal(make_trainer(AutomodelStrategy()), PlainBackwardOfAScalar(), _batches(2)),
    ]


def test_a_plain_backward_of_what_nobody_averages_raises(pool2: RankPool) -> None:
    """Ranks would drift apart."""
    for in_step, in_hook, of_scalar in pool2.run(_refused):
        assert "Call self.manual_backward(loss) instead" in in_step
        assert "under automatic optimization, return the sum of the losses" in in_hook
        assert "1 parameters of SGD have gradients of a plain loss.backward()" in of_scalar


class GradientsByHand(Recipe):
    """Writes .grad itself: what `torch.autograd.grad` returns, or the same on all ranks, as evolution strategies do."""

    def __init__(self, equal: bool) -> None:
        super().__init__()
        self.equal = equal

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        parameters = list(self.parameters())
        if self.equal:
            gradients = [torch.full(p.shape, 0.1, dtype=p.dtype) for p in parameters]
        else:
            gradients = list(torch.autograd.grad(self.loss(batch), parameters))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def _fit_gradients_by_hand(equal: bool, options: dict[str, Any]) -> str:
    return refusal(make_trainer(AutomodelStrategy(**options)), GradientsByHand(equal), _batches(2))


@pytest.mark.each_value
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_gradients_by_hand_must_be_alike(pool2: RankPool, engine: str) -> None:
    """No window averages them, and of a shard each rank would step its part with its own."""
    for message in pool2.run(_fit_gradients_by_hand, False, ENGINES[engine][1]):
        assert "SGD would step with gradients that differ between ranks: their norms are" in message
    assert pool2.run(_fit_gradients_by_hand, True, ENGINES[engine][1]) == ["", ""]


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
    "step past the wrapper": (
        lambda: ActsInMidWindow(lambda module, optimizer: optimizer.optimizer.step()),
        f"SGD.step() {IN_MID_WINDOW}",
    ),
    "step with a closure": (
        lambda: ActsInMidWindow(lambda module, optimizer: optimizer.optimizer.step(lambda: torch.zeros(()))),
        f"SGD.step() {IN_MID_WINDOW}",
    ),
    "clip": (
        lambda: ActsInMidWindow(lambda module, opt: module.trainer.strategy.clip_gradients(opt, 1.0)),
        IN_MID_WINDOW,
    ),
    "clip values": (
        lambda: ActsInMidWindow(lambda module, opt: module.clip_gradients(opt, 1.0, "value")),
        IN_MID_WINDOW,
    ),
    "two windows": (UntoggledBesideTwo, "2 accumulation windows are open (SGD, SGD)"),
    "shared": (SharedParameters, "1 parameters of SGD belong to the open accumulation window of SGD"),
}


def _messages(options: dict[str, Any]) -> dict[str, str]:
    return {
        name: refusal(make_trainer(AutomodelStrategy(**options)), make(), _batches(2))
        for name, (make, _) in MISUSE.items()
    }


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_misuse_raises(pool2: RankPool, engine: str) -> None:
    """Never zero, never a guess: on every rank, with the next step in the sentence."""
    for messages in pool2.run(_messages, ENGINES[engine][1]):
        for name, (_, sentence) in MISUSE.items():
            assert sentence in messages[name], name


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


class FailsBeforeItsBackward(Recipe):
    """Gradients that the window has kept no longer fit the last parameter, when all others show theirs already."""

    restored = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.optimizers().toggle_model(sync_grad=batch_idx > 0):
            loss = self.loss(batch)
            if batch_idx > 0:
                *others, last = self.parameters()
                last.data = last.data.float()
                before = {parameter: torch.full_like(parameter, 0.5) for parameter in others}
                for parameter, grad in before.items():
                    parameter.grad = grad
            try:
                self.manual_backward(loss, num_label_tokens=count(batch))
            except RuntimeError as error:
                self.restored = all(parameter.grad is grad for parameter, grad in before.items())
                raise ArithmeticError from error


def _fail_in_backward(module: torch.nn.Module, args: Any, output: Tensor) -> None:
    def fail(_: Tensor) -> None:
        raise ArithmeticError("in the middle of a backward")

    output.register_hook(fail)


def _restored_after_failure(kind: Any, options: dict[str, Any]) -> bool:
    module = kind()
    trainer = make_trainer(AutomodelStrategy(**options))
    with pytest.raises(ArithmeticError):
        trainer.fit(module, _batches(2))
    return module.restored


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "engine"),
    [(FailsInBackward, "fsdp2"), (FailsInBackward, "ddp"), (FailsBeforeItsBackward, "ddp")],
)
def test_a_failed_backward_leaves_what_stood_there(pool2: RankPool, kind: Any, engine: str) -> None:
    """The user's own tensors, untouched, on every rank."""
    assert pool2.run(_restored_after_failure, kind, ENGINES[engine][1]) == [True, True]


# --- Automatic optimization -------------------------------------------------------------------------------------------

ACCUMULATE = 2


class Automatic(LabelledModule):
    """Returns the bare mean; the strategy counts the labels."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mean_loss(self.model, batch[0])

    @staticmethod
    def after_backward(model: torch.nn.Module) -> None:
        """What `plain` does where Lightning calls `on_after_backward`."""

    zeroes = True


class Decays(Automatic):
    """Weight decay by hand, as soon as gradients are there."""

    @staticmethod
    def after_backward(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter, alpha=0.05)

    def on_after_backward(self) -> None:
        self.after_backward(self.model)


class StepsByHand(Automatic):
    """`optimizer_step` overridden to step past the wrapper."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


class SkipsZeroing(Automatic):
    """`optimizer_zero_grad` overridden to do nothing: gradients add up over all windows."""

    zeroes = False

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        pass


AUTOMATIC: dict[str, type[Automatic]] = {
    c.__name__: c for c in (Automatic, Decays, StepsByHand, SkipsZeroing)
}


def _automatic_plainly(
    kind: type[Automatic], num_ranks: int
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Weights, and the norm and the loss of each window."""
    model = TinyDecoder(20).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    norms = []
    losses = []
    by_rank = micro_batches(case(num_ranks))
    for start in range(0, len(by_rank[0]), ACCUMULATE):
        window = [batch for batches in by_rank for batch in batches[start : start + ACCUMULATE]]
        if kind.zeroes:
            optimizer.zero_grad()
        loss = torch.stack([mean_loss(model, batch, "sum") for batch in window]).sum() / count(window)
        loss.backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        losses.append(loss.item())
        kind.after_backward(model)
        optimizer.step()
    return full_weights(model), norms, losses


class Watching(Callback):
    """Between the backwards of a window `.grad` is None; after the last one its norm is final."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.reported: list[float] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        if trainer.fit_loop.epoch_loop.batch_idx % ACCUMULATE != ACCUMULATE - 1:
            assert not grads
            return
        full = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        self.norms.append(float(torch.cat([grad.flatten() for grad in full]).norm()))
        assert trainer.strategy.last_step.grad_norm is None
        self.reported.append(float(trainer.strategy.last_step.loss))


def _fit_automatic(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in AUTOMATIC.items():
        module = kind()
        watching = Watching()
        callbacks = [watching] if kind is Automatic else []
        trainer = make_trainer(
            AutomodelStrategy(count_label_tokens=count, **options),
            accumulate_grad_batches=ACCUMULATE,
            callbacks=callbacks,
        )
        trainer.fit(module, _batches(dist.get_world_size()))
        found[name] = full_weights(module.model), watching.norms, watching.reported
    return found


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_automatic_optimization(pool2: RankPool, pool4: RankPool, engine: str) -> None:
    """What hooks see after a window's last backward is final, what they add stays, whoever steps steps with it."""
    num_ranks, options = ENGINES[engine]
    results = (pool2 if num_ranks == 2 else pool4).run(_fit_automatic, options, timeout_s=240)
    for name, kind in AUTOMATIC.items():
        expected, norms, losses = _automatic_plainly(kind, num_ranks)
        for result in results:
            weights, seen_norms, seen_losses = result[name]
            assert weight_error(weights, expected) <= TOLERANCE, name
            if kind is Automatic:
                assert seen_norms == pytest.approx(norms, rel=1e-10)
                assert seen_losses == pytest.approx(losses, rel=1e-10)


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation as a closure-based optimizer: two backwards a step."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        climb = {}
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                climb[parameter] = 0.05 * parameter.grad
                parameter.add_(climb[parameter])
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for parameter, step in climb.items():
                parameter.sub_(step)
        super().step()
        return loss


def _lbfgs(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Compares losses of several closures in one step."""
    return torch.optim.LBFGS(parameters, lr=LEARNING_RATE, max_iter=4, line_search_fn="strong_wolfe")


BY_CLOSURES: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sam": partial(SAM, lr=LEARNING_RATE, momentum=MOMENTUM),
    "lbfgs": _lbfgs,
}


class ByClosures(Automatic):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return BY_CLOSURES[self.kind](self.parameters())


def _fit_by_closures(kind: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    module = ByClosures(kind)
    strategy = AutomodelStrategy(count_label_tokens=count, **options)
    make_trainer(strategy).fit(module, _batches(dist.get_world_size()))
    return full_weights(module.model), int(strategy.last_step.num_micro_batches)


@pytest.mark.parametrize("kind", BY_CLOSURES)
@pytest.mark.parametrize("engine", ["fsdp2", "ddp", "hsdp"])
def test_several_closures_in_a_step(pool2: RankPool, pool4: RankPool, engine: str, kind: str) -> None:
    """Each closure is a window of its own, and returns its loss over all ranks; the report counts all of them."""
    num_ranks, options = ENGINES[engine]
    model = TinyDecoder(20).double()
    optimizer = BY_CLOSURES[kind](model.parameters())
    for window in zip(*micro_batches(case(num_ranks)), strict=True):

        def closure(window: Any = window) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([mean_loss(model, batch, "sum") for batch in window]).sum() / max(
                count(window), 1
            )
            loss.backward()
            return loss

        optimizer.step(closure)
    expected = full_weights(model)
    for weights, num_micro_batches in (pool2 if num_ranks == 2 else pool4).run(
        _fit_by_closures, kind, options
    ):
        # A line search amplifies the rounding of a loss.
        assert weight_error(weights, expected) <= (TOLERANCE if kind == "sam" else 1e-9)
        assert kind != "sam" or num_micro_batches == 2 * num_ranks
