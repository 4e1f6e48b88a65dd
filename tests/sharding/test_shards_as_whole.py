"""Gradients and weights that hooks index and write as if they were whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from lightning_automodel.sharding.shards import make_shard
from tests.rank_pool import RankPool
from tests.sharding import writers
from tests.sharding.writers import Writer, fit, fit_plainly
from tests.trainer.exactness import Outcome, weight_error
from tests.trainer.runs import TOLERANCE

ROWS = torch.tensor([0, 4])
MASK = torch.tensor([True, False, False, False, True])


def _halved(p: Tensor) -> None:
    p.grad[2:4] *= 0.5


def _halved_rows(p: Tensor) -> None:
    p.grad[ROWS] *= 0.5


def _swapped(p: Tensor) -> None:
    p.grad[0] = p.grad[4]


def _noisy(p: Tensor) -> None:
    torch.manual_seed(3)
    p.grad.add_(torch.randn_like(p.grad)).mul_(torch.rand_like(input=p) < 0.8)


def _drawn_again(p: Tensor) -> None:
    torch.manual_seed(3)
    torch.nn.init.xavier_uniform_(p)
    p.data.mul_(torch.bernoulli(torch.full_like(p, 0.8))).add_(torch.full_like(p, 0.1).bernoulli())
    p.add_(torch.normal(p.detach(), 0.1))


RIGHT: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda p: p.grad.__setitem__(ROWS, 0),
    "list": lambda p: p.grad.__setitem__([0, 4], 0.0),
    "mask": lambda p: p.grad.__setitem__(MASK, 0),
    "mask of all": lambda p: p.grad.__setitem__(p.grad > 0, 0),
    "slice": lambda p: p.grad.__setitem__(slice(2, 5), 0),
    "element": lambda p: p.grad.__setitem__((4, 1), 0),
    "columns": lambda p: p.grad[:, 1].zero_(),
    "data": lambda p: p.grad.data.__setitem__(4, torch.ones(5, dtype=torch.float64)),
    "in place": _halved,
    "rows in place": _halved_rows,
    "row": _swapped,
    "read": lambda p: p.grad.mul_(p.grad[ROWS].sum()),
    "weights": lambda p: p.data.__setitem__(slice(2, 5), 0),
    "plain tensors by keywords": lambda p: p.grad.mul_(
        torch.narrow(input=torch.ones(3), dim=0, start=1, length=2).sum()
    ),
    "noise": _noisy,
    "drawn again": _drawn_again,
    "slice zeroed": lambda p: p.grad[3:].zero_(),
    "row doubled": lambda p: p.grad[4].mul_(2),
    "narrow": lambda p: p.grad.narrow(0, 2, 3).zero_(),
    "function": lambda p: torch.narrow(p.grad, 0, 2, 3).zero_(),
    "parts": lambda p: p.grad.tensor_split(2)[1].zero_(),
    "slice of a view": lambda p: p.grad.unsqueeze(0)[0, 3].zero_(),
    "slice of a slice": lambda p: p.grad[1:][2:].zero_(),
    "slice of weights": lambda p: p.data[3:].zero_(),
    "norm": lambda p: p.grad.mul_(float(p.grad.norm())),
    "product with a mask": lambda p: p.grad.mul_(MASK.double().view(5, 1)),
}


class Indexes(Writer):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.change = RIGHT[what]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            for net in (self.student,):
                self.change(net.blocks[1].linear.weight)


writers.MODULES["Indexes"] = Indexes


@pytest.mark.every_case
@pytest.mark.parametrize("what", RIGHT)
def test_right(pool2: RankPool, what: str) -> None:
    expected = Outcome(fit_plainly("Indexes", (what,)), None)
    for weights in pool2.run(_fit_indexing, {}, what):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


def _fit_indexing(options: dict[str, Any], what: str) -> dict[str, Tensor]:
    return fit(options, "Indexes", (what,))


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


def _refusals() -> dict[str, str]:
    found = {}
    for what, write in FOLLOWED.items():
        sharded = distribute_tensor(torch.ones(3, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        parameter = make_shard(nn.Parameter(sharded))
        with pytest.raises(RuntimeError) as raised:
            write(parameter)
        found[what] = str(raised.value)
        with torch.no_grad():
            write(parameter)
    return found


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
    "norm by keyword": lambda g: g.norm(p=1),
    "third norm": lambda g: torch.linalg.vector_norm(g, 3),
    "list": lambda g: torch.nn.utils.get_total_norm([g, g]),
    "norms of columns": lambda g: g.norm(dim=0),
    "largest": lambda g: g.norm(float("inf")),
    "spectral norm": lambda g: torch.linalg.norm(g, 2),
}
GATHERED = {"norms of columns", "largest", "spectral norm"}


def _gathers_of_reductions() -> dict[str, int]:
    whole = torch.arange(15.0, dtype=torch.float64).reshape(5, 3) - 4
    sharded = make_shard(distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)]))
    found = {}
    for what, reduce in REDUCED.items():
        with CommDebugMode() as communicated:
            value = reduce(sharded)
        assert torch.allclose(value, reduce(whole), rtol=1e-14), what
        counts = communicated.get_comm_counts()
        found[what] = sum(number for name, number in counts.items() if "all_gather" in str(name))
    return found


def test_sums_and_norms_of_all_elements_gather_nothing(pool2: RankPool) -> None:
    for counts in pool2.run(_gathers_of_reductions):
        assert {what for what, number in counts.items() if number} == GATHERED
