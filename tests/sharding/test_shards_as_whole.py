"""What a shard refuses, computes without gathering anything, and loads; what is done to shards outside of a step.

Between forward and backward, in `on_fit_end` and after the fit, on all ranks or on one: what was lost or wrong there
without a word is right, or refused in words. What is right in hooks: `test_user_code.py`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_automodel.sharding.shards import make_shard
from tests.rank_pool import RankPool
from tests.sharding.fits import fit_module
from tests.sharding.writers import Writer, fit, fit_or_refusal, fit_plainly, rows, train
from tests.trainer.exactness import Outcome, assert_exact, full_weights, weight_error
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, LabelledModule, by_default


def _row_set(p: Tensor) -> None:
    doubled = p * 2
    doubled[0] = 0


def _row_doubled(p: Tensor) -> None:
    (p * 2)[0].mul_(2)


FOLLOWED: dict[str, Callable[[Tensor], None]] = {
    "parameter": lambda p: p.tril_(),
    "row of a parameter": lambda p: p.__setitem__(0, 0),
    "row set": _row_set,
    "row doubled": _row_doubled,
}


def _rows_added(total: Tensor, p: Tensor) -> None:
    total.index_add_(0, torch.tensor([0]), p[:1])


def _row_assigned(total: Tensor, p: Tensor) -> None:
    total[0] = p[0]


SUMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows added": _rows_added,
    "row assigned": _row_assigned,
    "slice": lambda total, p: total[1:].add_(p[1:]),
    "list": lambda total, p: torch._foreach_add_([total], [p]),
    "product": lambda total, p: total.add_(p @ p.T),
}


def _sharded(whole: Tensor) -> DTensor:
    return distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])


def _parameter() -> Any:
    return make_shard(nn.Parameter(_sharded(torch.ones(3, 3))))


def _refuse_writes() -> None:
    for write in FOLLOWED.values():
        parameter = _parameter()
        with pytest.raises(
            RuntimeError, match=r"writes in place to a sharded tensor that autograd follows.*no_grad\(\)"
        ):
            write(parameter)
        with torch.no_grad():
            write(parameter)


def test_what_autograd_follows_is_not_written_in_parts(pool2: RankPool) -> None:
    """Its gradients would be those of before."""
    pool2.run(_refuse_writes)


def _refuse_derivatives() -> None:
    for write in SUMS.values():
        parameter = _parameter()
        total, expected = torch.zeros_like(parameter), torch.zeros(3, 3)
        write(total, parameter)
        write(expected, nn.Parameter(torch.ones(3, 3)))
        assert torch.equal(total.full_tensor(), expected)
        with pytest.raises(RuntimeError, match="A backward reaches what was written in place"):
            (total.square().sum() + parameter.sum()).backward()


def test_derivatives_of_what_was_written_in_parts_are_refused(pool2: RankPool) -> None:
    """The values are right, and would be differentiated without what autograd follows."""
    pool2.run(_refuse_derivatives)


# --- Whole tensors loaded by `load_state_dict`: what projects do with a file that they kept ---------------------------


def other_weights() -> dict[str, Tensor]:
    """Those of another module."""
    return LabelledModule(CASE.seed + 2).state_dict()


def _altered(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in state.items()}
    first = next(iter(state))
    if how == "missing":
        del state[first]
    elif how == "unexpected":
        state["model.more"] = torch.zeros(2)
    elif how == "shape":
        state[first] = state[first][1:]
    elif how == "dtype":
        state = {name: value.float() for name, value in state.items()}
    return state


def _outcomes(module: nn.Module, whole: dict[str, Tensor]) -> list[Any]:
    """What `load_state_dict` does with each alteration: its error, or its answer and the weights."""
    found: list[Any] = []
    for how in ("none", "missing", "unexpected", "shape", "dtype"):
        for strict in (True, False):
            state = _altered(whole, how)
            try:
                answer = module.load_state_dict(state, strict=strict)
            except RuntimeError as error:
                found.append(str(error))
                continue
            weights = {name: value.sum().item() for name, value in full_weights(module.model).items()}
            found.append((tuple(answer), weights))
    return found


def _load_after_a_fit() -> tuple[list[Any], list[Any]]:
    """Outcomes with a sharded model, and with a plain one."""
    module = LabelledModule()
    fit_module(module, {})
    plain = LabelledModule()
    plain.load_state_dict(full_weights(module))
    return _outcomes(module, other_weights()), _outcomes(plain, other_weights())


def test_after_a_fit(pool2: RankPool) -> None:
    """Strict or not, with other keys, shapes and dtypes: what torch does with a whole model, in its words."""
    for sharded, plain in pool2.run(_load_after_a_fit):
        assert sharded == plain


# --- Between forward and backward, at the end of a fit and after it ---------------------------------------------------


def right_everywhere(
    pool: RankPool, options: dict[str, Any], make: Callable[..., Writer], *args: Any
) -> None:
    """Weights of a fit are those of one process, on every rank."""
    assert_exact(pool.run(fit, options, make, args), fit_plainly(make, args))


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
    """Registers a hook on a parameter, where it is made or after it was distributed."""

    def __init__(self, place: str, how: str) -> None:
        super().__init__(place)
        self.how = how
        self.reach("init")

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
    (
        {},
        "init",
        BY_GRADIENT,
        ("1 parameters that FSDP2 shards have gradient hooks", "which it never calls"),
    ),
    ({}, "fit_start", BY_GRADIENT, (BY_GRADIENT, _STEP)),
    ({}, "train_start", BY_PARAMETER, (BY_PARAMETER, _STEP)),
    ({}, "batch_end", BY_GRADIENT, (BY_GRADIENT, _STEP)),
    ({}, "optimizers", BY_PARAMETER, (BY_PARAMETER, _STEP)),
    # FSDP2 calls those after accumulation alone.
    (_AHEAD, "fit_start", BY_GRADIENT, (_INSTEAD,)),
    # They would see sums over label tokens.
    (STRATEGIES["ddp"], "train_start", BY_PARAMETER, ()),
]


def _refused_hooks() -> list[dict[str, Tensor] | str]:
    return [fit_or_refusal(options, Hooks, where, how) for options, where, how, _ in REFUSED]


def test_hooks_are_refused(pool2: RankPool) -> None:
    for messages in pool2.run(_refused_hooks):
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


def _after_a_fit() -> list[str]:
    """What a script does with a model that is trained."""
    module = Saves()
    train(module, {})
    weight = module.student.head.weight
    assert f"{weight[0, 0]:.3f}" == f"{weight.full_tensor()[0, 0].item():.3f}"
    other = Saves()
    other.student = module.student
    with pytest.raises(ValueError, match="sharded") as part:
        train(other, {})
    parameters = list(module.student.parameters())
    loss = module.student(rows(0, 0)).sum()
    with pytest.raises(RuntimeError) as second_derivative:
        torch.autograd.grad(loss, parameters, create_graph=True)
    fresh = Saves()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh.student.head.weight, weight.full_tensor())
    return [str(second_derivative.value), str(part.value)]


def test_what_a_run_alone_can_do_is_refused_after_it(pool2: RankPool) -> None:
    for derivative, part in pool2.run(_after_a_fit):
        assert "create_graph=True in a hook, or after a fit" in derivative
        assert "parameters that an earlier run has sharded as a part of another module" in part


def test_shards_are_not_saved_by_one_rank(pool2: RankPool) -> None:
    """Half of the weights would be written; what the refusal says to do works."""
    told, nothing = pool2.run(_save)
    assert len(told) >= 3 * len(SAVES) - 1
    assert nothing == {}
    for what, message in told.items():
        assert "full_tensor()" in message, what
        assert "save_checkpoint" in message, what
        assert "export_hugging_face" in message, what
