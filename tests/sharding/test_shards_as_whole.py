"""What a shard refuses, what it computes without gathering anything, and whole tensors that a sharded model loads.

What is right: `test_user_code.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from lightning_automodel.sharding.shards import make_shard
from tests.rank_pool import RankPool
from tests.sharding.fits import fit_module
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, LabelledModule


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


def _gradient_written(p: Any) -> None:
    """What is written to gradients may be followed: nobody differentiates them."""
    p.parameter_name = "weight"
    p.grad = torch.ones(3, 3)
    p.grad[0] += p[0]
    p.grad[1].add_(p[1])
    torch._foreach_add_([p.grad], [p])
    assert torch.equal(p.grad, torch.tensor([[3.0], [3.0], [2.0]]).expand(3, 3))


def _sharded(whole: Tensor) -> DTensor:
    return distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])


def _parameter() -> Any:
    return make_shard(nn.Parameter(_sharded(torch.ones(3, 3))))


def _refusals() -> dict[str, str]:
    found = {}
    for what, write in FOLLOWED.items():
        parameter = _parameter()
        with pytest.raises(RuntimeError) as raised:
            write(parameter)
        found[what] = str(raised.value)
        with torch.no_grad():
            write(parameter)
    _gradient_written(_parameter())
    return found


def _lost_derivatives() -> dict[str, str]:
    found = {}
    for what, write in SUMS.items():
        parameter = _parameter()
        plain = nn.Parameter(torch.ones(3, 3))
        total = torch.zeros_like(parameter)
        expected = torch.zeros(3, 3)
        write(total, parameter)
        write(expected, plain)
        assert torch.equal(total.full_tensor(), expected)
        with pytest.raises(RuntimeError) as raised:
            (total.square().sum() + parameter.sum()).backward()
        found[what] = str(raised.value)
    return found


def test_derivatives_of_what_was_written_in_parts_are_refused(pool2: RankPool) -> None:
    """The values are right, and would be differentiated without what autograd follows."""
    for messages in pool2.run(_lost_derivatives):
        assert messages.keys() == SUMS.keys()
        assert all("A backward reaches what was written in place" in text for text in messages.values())


def test_what_autograd_follows_is_not_written_in_parts(pool2: RankPool) -> None:
    """Its gradients would be those of before."""
    for messages in pool2.run(_refusals):
        for what, message in messages.items():
            assert "writes in place to a sharded tensor that autograd follows" in message, what
            assert "torch.no_grad()" in message


REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda g: g.sum(),
    "norm": lambda g: g.norm(),
    "norm of torch": torch.norm,
    "norm by keyword": lambda g: g.norm(p=2),
    "first norm": lambda g: g.norm(p=1),
    "third norm": lambda g: torch.linalg.vector_norm(g, 3),
    "norm of a keyword": lambda g: torch.linalg.vector_norm(x=g),
    "list": lambda g: torch.nn.utils.get_total_norm([g, g]),
    "norms of columns": lambda g: g.norm(dim=0),
    "largest": lambda g: g.norm(float("inf")),
    "spectral norm": lambda g: torch.linalg.norm(g, 2),
}
GATHERED = {"first norm", "norm of a keyword", "third norm", "norms of columns", "largest", "spectral norm"}


def _gathers_of_reductions() -> dict[str, int]:
    whole = torch.arange(15.0, dtype=torch.float64).reshape(5, 3) - 4
    sharded = make_shard(_sharded(whole))
    found = {}
    for what, reduce in REDUCED.items():
        with CommDebugMode() as communicated:
            value = reduce(sharded)
        assert torch.allclose(value, reduce(whole), rtol=1e-14), what
        counts = communicated.get_comm_counts()
        found[what] = sum(number for name, number in counts.items() if "all_gather" in str(name))
    return found


def test_sums_and_roots_of_squares_gather_nothing(pool2: RankPool) -> None:
    for counts in pool2.run(_gathers_of_reductions):
        assert {what for what, number in counts.items() if number} == GATHERED


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


class Assigns(LabelledModule):
    """Replaces its parameters instead of writing to them."""

    def on_train_start(self) -> None:
        self.load_state_dict(other_weights(), assign=True)


def _assign() -> str:
    with pytest.raises(AttributeError) as raised:
        fit_module(Assigns(), {})
    return str(raised.value)


def test_assigned_parameters_are_refused(pool2: RankPool) -> None:
    """FSDP2 would train shards that the module does not have."""
    for message in pool2.run(_assign):
        assert message.startswith("load_state_dict(..., assign=True), or an initialiser")


def _load_on_one_rank() -> bool:
    module = LabelledModule()
    fit_module(module, {})
    before = {name: p.to_local().detach().clone() for name, p in module.named_parameters()}
    if torch.distributed.get_rank() == 1:
        module.load_state_dict(other_weights())
    assert all(isinstance(p, DTensor) for p in module.parameters())
    after = {name: p.to_local() for name, p in module.named_parameters() if p.to_local().numel()}
    return not any(torch.equal(part, before[name]) for name, part in after.items())


def test_is_not_a_collective(pool2: RankPool) -> None:
    assert pool2.run(_load_on_one_rank) == [False, True]
