"""Sums over ranks: losses with their denominators, replicated gradients, and waiting for everybody before logging."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel import barrier_and_log, reduce_loss
from lightning_automodel.gradients.rescale_clip import average_gradients_
from tests.rank_pool import RankPool


class AllReduces(TorchDispatchMode):
    """Counts the all-reduces that run inside, and other collectives of the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            is_all_reduce = func.overloadpacket.__name__ == "allreduce_"
            self.count += is_all_reduce
            self.others += not is_all_reduce
        return func(*args, **(kwargs or {}))


def _reduce(
    losses: list[list[float]], counts: list[Any], dtype: torch.dtype, per_token_loss: bool
) -> tuple[Tensor, ...]:
    """Runs on every rank: its own losses and count, over the world."""
    rank = dist.get_rank()
    store = [torch.tensor(loss, dtype=dtype) for loss in losses[rank]]
    with AllReduces() as seen:
        loss, denominator = reduce_loss(store, counts[rank], per_token_loss, dist.group.WORLD)
    assert (seen.count, seen.others) == (1, 0)
    assert [loss.item() for loss in store] == torch.tensor(losses[rank], dtype=dtype).tolist()
    return loss, denominator


LOSSES = [[1 / 3, 2.0, 5.5], [1 / 7]]
SUMS: dict[str, tuple[list[list[float]], list[Any], torch.dtype, bool, int]] = {
    "tokens": (LOSSES, [5, torch.tensor([2], dtype=torch.int32)], torch.float64, True, 7),
    "micro-batches": (LOSSES, [5, 2], torch.float64, False, 4),
    "a rank without losses": ([[1 / 3], []], [4, 0], torch.float64, True, 4),
    "counts beyond float32": (
        [[0.5], []],
        [2**24 + 1, torch.tensor(2**40 + 1)],
        torch.float32,
        True,
        2**24 + 2**40 + 2,
    ),
    "many in half precision": ([[1.0] * 257, [1.0] * 300], [257, 300], torch.bfloat16, True, 557),
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("losses", "counts", "dtype", "per_token_loss", "denominator"), SUMS.values(), ids=SUMS
)
def test_losses_and_denominators_are_summed(
    pool2: RankPool,
    losses: list[list[float]],
    counts: list[Any],
    dtype: torch.dtype,
    per_token_loss: bool,
    denominator: int,
) -> None:
    """Exactly, and neither is divided: unequally many losses, and tokens or micro-batches, on every rank."""
    for loss, total in pool2.run(_reduce, losses, counts, dtype, per_token_loss):
        assert (loss.shape, total.shape, total.dtype) == ((), (), torch.int64)
        assert loss.dtype in (torch.promote_types(dtype, torch.float32), torch.float64)
        assert loss.item() == pytest.approx(sum(map(sum, losses)), rel=1e-15)
        assert total.item() == denominator


def _average(dtype: torch.dtype) -> list[Tensor | None]:
    """Gradients of four parameters: used everywhere, on rank 1 only, on rank 0 only, and nowhere."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((2, 2), (3,), (), (1,))]
    for parameter, used in zip(parameters, (True, rank == 1, rank == 0, False), strict=True):
        if used:
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
    with AllReduces() as seen:
        average_gradients_(parameters, dist.group.WORLD)
    assert (seen.count, seen.others) == (1, 0)
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex128])
def test_replicated_gradients_are_averaged(pool2: RankPool, dtype: torch.dtype) -> None:
    """A parameter that some ranks, or all, did not use counts as zero there."""
    for gradients in pool2.run(_average, dtype):
        expected = [torch.full((2, 2), 1.5), torch.full((3,), 1.0), torch.tensor(0.5), torch.zeros(1)]
        for gradient, value in zip(gradients, expected, strict=True):
            assert gradient.equal(value.to(dtype))


def _log_after_a_late_rank() -> tuple[list[str], float, float]:
    """Messages, when the first was logged, and when this rank arrived."""
    logged: list[tuple[str, float]] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append((record.getMessage(), time.monotonic()))

    logger = logging.getLogger("lightning_automodel")
    recorder = Recorder()
    level = logger.level
    logger.addHandler(recorder)
    logger.setLevel(logging.INFO)
    try:
        if dist.get_rank() == 1:
            time.sleep(0.3)
        arrived = time.monotonic()
        barrier_and_log("100 % of {ranks} are here")
    finally:
        logger.removeHandler(recorder)
        logger.setLevel(level)
    return [message for message, _ in logged], logged[0][1] if logged else 0.0, arrived


def test_barrier_and_log(pool2: RankPool) -> None:
    """Rank 0 alone logs the message as it stands, and not before the last rank has come."""
    (messages0, logged_at, arrived0), (messages1, _, arrived1) = pool2.run(_log_after_a_late_rank)
    assert (messages0, messages1) == (["100 % of {ranks} are here"], [])
    assert arrived0 < arrived1 <= logged_at
