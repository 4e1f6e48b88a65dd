"""Where parameters are shards: between forward and backward, in `on_fit_end` and after the fit, on all ranks or on one.

What was lost or wrong there without a word is right, or refused in words.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.rank_pool import RankPool
from tests.sharding.writers import Writer, fit, fit_or_refusal, fit_plainly, train
from tests.trainer.exactness import Outcome, assert_exact, full_weights, weight_error
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default


def right_everywhere(
    pool: RankPool, options: dict[str, Any], make: Callable[..., Writer], *args: Any
) -> None:
    """Weights of a fit are those of one process, on every rank."""
    assert_exact(pool.run(fit, options, make, args), fit_plainly(make, args))


# --- Between forward and backward -------------------------------------------------------------------------------------


def _replace(module: Writer) -> None:
    for p in module.student.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5


ZEROING: dict[str, Callable[[Writer], None]] = {
    "zero_module": lambda module: module.zero_grad(),
    "zero_in_place": lambda module: module.zero_grad(set_to_none=False),
    "replace": _replace,
}


class Zeroes(Writer):
    """Its `optimizer_zero_grad` does not ask the optimizer; `on_before_zero_grad` reads norms."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = ZEROING[how]
        self.norms: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.student.parameters() if p.grad is not None]
        self.norms.append(math.sqrt(sum(float(g.norm()) ** 2 for g in gradients)))
        self.norms.append(float(self.student.head.weight.norm(dim=0).sum()))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.how(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():  # where the test looks
            self.teacher.head.bias[:2].copy_(torch.tensor(self.norms[-2:], dtype=torch.float64))


class ReadsInStep(Writer):
    """Weighs a loss by a norm of the last step's gradients, and looks at weights, behind the forward."""

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.distance(batch)
        gradients = [p.grad for p in self.student.parameters() if p.grad is not None]
        if batch_idx == 2:
            assert len(gradients) == 6
            total = torch.stack([g.norm() for g in gradients]).norm()
            loss = loss * (1 + total + gradients[0].abs().max())
        return loss


class GrowsAGroupInStep(Writer):
    """Trains its head from the second window on."""

    def __init__(self, takes_from: str) -> None:
        super().__init__()
        self.takes_from = takes_from

    def configure_optimizers(self) -> Any:
        self.all = list(self.student.head.parameters())
        self.optimizer = torch.optim.SGD(self.student.blocks.parameters(), lr=0.1)
        return self.optimizer

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.distance(batch)
        if batch_idx == 2:
            taken = self.all if self.takes_from == "list" else list(self.student.head.parameters())
            self.optimizer.add_param_group({"params": taken})
        return loss


@pytest.mark.parametrize("engine", by_default({name: name for name in STRATEGIES}, "kept", "resharded"))
@pytest.mark.parametrize("how", ZEROING)
@pytest.mark.each_value
def test_gradients_zeroed_by_the_module(pool2: RankPool, engine: str, how: str) -> None:
    right_everywhere(pool2, STRATEGIES[engine], Zeroes, how)


@pytest.mark.parametrize("engine", by_default({name: name for name in STRATEGIES}, "kept", "resharded"))
@pytest.mark.every_case
def test_gradients_read_in_the_step(pool2: RankPool, engine: str) -> None:
    right_everywhere(pool2, STRATEGIES[engine], ReadsInStep)


def test_shards_join_an_optimizer_in_the_step(pool2: RankPool) -> None:
    right_everywhere(pool2, STRATEGIES["kept"], GrowsAGroupInStep, "list")


@pytest.mark.parametrize("engine", ["kept", "resharded"])
@pytest.mark.every_case
def test_copies_do_not_join_an_optimizer(pool2: RankPool, engine: str) -> None:
    """Within the step, behind the forward, what the module has may be copies: right, or refused in words."""
    expected = fit_plainly(GrowsAGroupInStep, ("module",))
    for found in pool2.run(fit_or_refusal, STRATEGIES[engine], GrowsAGroupInStep, "module"):
        if isinstance(found, str):
            assert "2 parameters of SGD are not those of" in found
        else:
            assert weight_error(Outcome(found), expected) <= TOLERANCE


# --- Hooks on parameters ----------------------------------------------------------------------------------------------


class Hooks(Writer):
    """Registers a hook on a parameter, after the module was distributed."""

    def __init__(self, place: str, how: str) -> None:
        super().__init__(place)
        self.how = how

    def write(self) -> None:
        getattr(self.student.blocks[0].linear.weight, self.how)(_doubled)

    def on_fit_start(self) -> None:
        self.reach("fit_start")

    def on_train_start(self) -> None:
        self.reach("train_start")

    def configure_optimizers(self) -> Any:
        self.reach("optimizers")
        return super().configure_optimizers()


def _doubled(value: Tensor) -> Any:
    """As a hook on a gradient, or on a parameter whose gradient is there."""
    if value.grad is None:
        return value * 2
    value.grad.mul_(2)
    return None


_STEP = "on_before_optimizer_step"
_AHEAD = {"count_window_ahead": True}
_INSTEAD = "use register_post_accumulate_grad_hook with count_window_ahead=True"
BY_GRADIENT, BY_PARAMETER = "register_hook", "register_post_accumulate_grad_hook"
REFUSED: list[tuple[dict[str, Any], str, str, tuple[str, ...]]] = [
    ({}, "fit_start", BY_GRADIENT, (BY_GRADIENT, _STEP)),
    ({}, "train_start", BY_PARAMETER, (BY_PARAMETER, _STEP)),
    ({}, "batch_end", BY_GRADIENT, (BY_GRADIENT, _STEP)),
    ({}, "optimizers", BY_PARAMETER, (BY_PARAMETER, _STEP)),
    # FSDP2 calls those after accumulation alone.
    (_AHEAD, "fit_start", BY_GRADIENT, (_INSTEAD,)),
    # They would see sums over label tokens.
    (STRATEGIES["ddp"], "train_start", BY_PARAMETER, ()),
]


def _refusals() -> list[dict[str, Tensor] | str]:
    return [fit_or_refusal(options, Hooks, where, how) for options, where, how, _ in REFUSED]


def test_hooks_are_refused(pool2: RankPool) -> None:
    for messages in pool2.run(_refusals):
        for (_, where, how, texts), message in zip(REFUSED, messages, strict=True):
            assert isinstance(message, str), f"{how} in {where}: nothing was refused"
            for text in ("student.blocks.0.linear.weight", *texts):
                assert text in message, f"{how} in {where}"


# --- The end of a fit, and after it -----------------------------------------------------------------------------------


class Merges(Writer):
    """Merges an adapter into its head at the end, as PEFT's `merge_and_unload` does, and takes values into a bias."""

    def write(self) -> None:
        head = self.student.head
        original = head.weight.data.clone()
        original += self.student.blocks[0].linear.weight[:3] @ self.student.blocks[1].linear.weight
        head.weight.data = original
        head.bias.data = torch.linspace(-1, 1, 3, dtype=torch.float64)
        self.student.blocks[0].linear.bias.data = self.student.blocks[0].linear.bias.data * 3

    def on_fit_end(self) -> None:
        self.reach("fit_end")


def _merge(place: str) -> dict[str, Tensor]:
    module = Merges(place)
    train(module, {})
    module.reach("after the fit")
    return full_weights(module)


@pytest.mark.parametrize("place", ["fit_end", "after the fit"])
@pytest.mark.every_case
def test_values_taken_at_the_end(pool2: RankPool, place: str) -> None:
    module = Merges()
    module.load_state_dict(fit_plainly(Merges, ()))
    with torch.no_grad():
        module.write()
    assert_exact(pool2.run(_merge, place), {name: p.detach() for name, p in module.named_parameters()})


SAVES: dict[str, Callable[[Writer], Any]] = {
    "state dict": lambda module: torch.save(module.state_dict(), io.BytesIO()),
    "parameter": lambda module: torch.save(module.student.head.weight, io.BytesIO()),
    "gradient": lambda module: torch.save(module.student.head.weight.grad, io.BytesIO()),
    "averages": lambda module: torch.save([p.detach().clone() for p in module.parameters()], io.BytesIO()),
    "optimizer": lambda module: torch.save(module.trainer.optimizers[0].state_dict(), io.BytesIO()),
    "pickle": lambda module: pickle.dumps(module.student.head.weight),
    "safetensors": lambda module: safetensors.torch.save(module.state_dict()),
}


class Saves(Writer):
    """Saves on the first rank alone, as scripts do, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, str] = {}

    def save(self, where: str) -> None:
        """Save everything that has shards."""
        if self.global_rank == 0:
            for what, save in SAVES.items():
                try:
                    save(self)
                    self.told[f"{what} {where}"] = "nothing was refused"
                except RuntimeError as error:
                    self.told[f"{what} {where}"] = str(error)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if optimizer.state:
            self.save("before the step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.save("at a batch's end")

    def on_fit_end(self) -> None:
        self.save("in on_fit_end")


def _save() -> dict[str, str]:
    module = Saves()
    train(module, {})
    module.save("after the fit")
    state = {name: value.full_tensor() for name, value in module.state_dict().items()}
    torch.save(state, io.BytesIO())
    return module.told


def test_shards_are_not_saved_by_one_rank(pool2: RankPool) -> None:
    """Half of the weights would be written; what the refusal says to do works."""
    told, nothing = pool2.run(_save)
    assert len(told) >= 3 * len(SAVES) - 1
    assert nothing == {}
    for what, message in told.items():
        assert "full_tensor()" in message, what
        assert "save_checkpoint" in message, what
        assert "export_hugging_face" in message, what
