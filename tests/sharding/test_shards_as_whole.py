"""Gradients and weights that hooks index as if they were whole: right, or refused with a recipe that is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.rank_pool import RankPool
from tests.sharding import writers
from tests.sharding.writers import Writer, fit, fit_plainly
from tests.trainer.exactness import Outcome, weight_error
from tests.trainer.runs import STRATEGIES, TOLERANCE

ROWS = torch.tensor([0, 4])
MASK = torch.tensor([True, False, False, False, True])


def _masked_alike(p: Tensor) -> None:
    """The recipe for a mask."""
    mask = (torch.arange(p.numel()).view(p.shape) % 2).double()
    if isinstance(p, DTensor):
        mask = distribute_tensor(mask, p.device_mesh, p.placements, src_data_rank=None)
    p.grad.mul_(mask)


def _limited(p: Tensor) -> None:
    """The recipe for a norm."""
    norm = p.grad.norm()
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    p.grad.mul_(min(1.0, 0.1 / float(norm)))


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
    "mask recipe": _masked_alike,
    "norm recipe": _limited,
}
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "slice": (
        lambda p: p.grad[3:].zero_(),
        "A slice of a sharded parameter or gradient was written in place",
    ),
    "row": (lambda p: p.grad[4].mul_(2), "A slice of a sharded parameter or gradient was written in place"),
    "narrow": (
        lambda p: p.grad.narrow(0, 2, 3).zero_(),
        "A slice of a sharded parameter or gradient was written",
    ),
    "function": (
        lambda p: torch.narrow(p.grad, 0, 2, 3).zero_(),
        "A slice of a sharded parameter or gradient was written",
    ),
    "parts": (
        lambda p: p.grad.tensor_split(2)[1].zero_(),
        "A slice of a sharded parameter or gradient was written",
    ),
    "slice of a view": (
        lambda p: p.grad.unsqueeze(0)[0, 3].zero_(),
        "A slice of a sharded parameter or gradient was written",
    ),
    "slice of a slice": (
        lambda p: p.grad[1:][2:].zero_(),
        "A slice of a sharded parameter or gradient was written",
    ),
    "weights": (
        lambda p: p.data[3:].zero_(),
        "A slice of a sharded parameter or gradient was written in place",
    ),
    "norm": (
        lambda p: p.grad.mul_(float(p.grad.norm())),
        "The number of a sharded parameter or gradient was read",
    ),
    "mask": (lambda p: p.grad.mul_(MASK.double().view(5, 1)), "A sharded parameter met a plain tensor"),
}


class Indexes(Writer):
    def __init__(self, what: str, is_right: bool = True) -> None:
        super().__init__()
        self.change = RIGHT[what] if is_right else REFUSED[what][0]

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


def _norm_of_one_rank() -> float:
    weights = fit({}, "Indexes", ("norm", False))
    return weight_error(
        Outcome(weights, None), Outcome(fit_plainly("Indexes", ("norm", False), num_ranks=1), None)
    )


def test_numbers_on_one_rank(pool1: RankPool) -> None:
    """There nothing is a part."""
    assert max(pool1.run(_norm_of_one_rank)) <= TOLERANCE


def _refusal(what: str) -> str:
    try:
        fit(STRATEGIES["kept"], "Indexes", (what, False))
    except RuntimeError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.every_case
@pytest.mark.parametrize("what", REFUSED)
def test_refused(pool2: RankPool, what: str) -> None:
    for message in pool2.run(_refusal, what):
        assert message.startswith(REFUSED[what][1])
