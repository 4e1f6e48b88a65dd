"""Sums over ranks: losses with their denominators, replicated gradients, and norms, by which gradients are clipped."""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel import barrier_and_log, clip_gradients, reduce_loss
from lightning_automodel.gradients.rescale_clip import average_gradients_
from tests.gradients.ragged import TOLERANCE, full
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


# --- `clip_gradients` over every mixture of plain, sharded and replicated gradients -----------------------------------

Parameter = tuple[str, tuple[int, ...]]  # how it is laid out, and its shape


@functools.cache
def _grid_of(world: dist.ProcessGroup) -> DeviceMesh:
    """One mesh a process group: torch caches DTensor specs, which would mix the groups of two equal meshes."""
    return init_device_mesh("cpu", (2, world.size() // 2), mesh_dim_names=("outer", "inner"))


def _grid() -> DeviceMesh:
    return _grid_of(dist.group.WORLD)


def _lay_out(tensor: Tensor, layout: str, grid: DeviceMesh) -> Tensor:
    """The tensor, the same on all ranks, as the layout has it."""
    layouts: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "outer": (grid["outer"], [Shard(0)]),
        "inner": (grid["inner"], [Shard(0)]),
        "hybrid": (grid, [Replicate(), Shard(0)]),
        "hybrid_columns": (grid, [Replicate(), Shard(1)]),
        "both": (grid, [Shard(0), Shard(1)]),
        "rows_twice": (grid, [Shard(0), Shard(0)]),
        "replicated": (grid, [Replicate(), Replicate()]),
    }
    return tensor if layout == "plain" else distribute_tensor(tensor, *layouts[layout], src_data_rank=None)


def _full_gradients(parameters: list[Parameter], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _, shape in parameters
    ]


@dataclass(frozen=True)
class Clipped:
    """What a rank saw: the returned norm, whole gradients, and the all-reduces that it took."""

    norm: Tensor
    gradients: list[Tensor | None]
    all_reduces: int


def _clip(
    parameters: list[Parameter],
    clip_norm: float,
    foreach: bool,
    dtype: torch.dtype,
    without: tuple[int, ...] = (),
) -> Clipped:
    """Runs on every rank; rank 1 has no gradient for the parameters whose index is in `without`."""
    grid = _grid()
    module = nn.Module()
    for index, ((layout, shape), gradient) in enumerate(
        zip(parameters, _full_gradients(parameters, dtype), strict=True)
    ):
        parameter = nn.Parameter(_lay_out(torch.zeros(shape, dtype=dtype), layout, grid))
        if not (dist.get_rank() == 1 and index in without):
            parameter.grad = _lay_out(gradient, layout, grid)
        module.register_parameter(f"p{index}", parameter)
    with AllReduces() as seen:
        norm = clip_gradients(module, clip_norm, foreach=foreach)
    assert seen.others == 0
    shown = [None if index in without else full(p.grad) for index, p in enumerate(module.parameters())]
    return Clipped(norm, shown, seen.count)


def _expected(parameters: list[Parameter], clip_norm: float) -> tuple[float, list[Tensor]]:
    """Norm and clipped gradients of one process that holds everything."""
    plain = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for _, shape in parameters]
    for parameter, gradient in zip(plain, _full_gradients(parameters), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(plain, clip_norm).item()
    return norm, [parameter.grad for parameter in plain]


MIXTURES: dict[str, tuple[list[Parameter], int]] = {
    "plain": ([("plain", (3, 2)), ("plain", ())], 0),
    "plain_and_sharded": ([("plain", (4,)), ("outer", (5, 3)), ("plain", (2, 2))], 1),
    "two_meshes": ([("outer", (5, 3)), ("inner", (3,)), ("outer", (4,)), ("plain", (2,))], 2),
    "hybrid": ([("hybrid", (3, 5)), ("hybrid_columns", (2, 3)), ("plain", (2,))], 1),
    "both_dimensions": ([("both", (5, 3)), ("outer", (3,)), ("inner", (4, 2)), ("hybrid", (7,))], 4),
    "one_dimension_twice": ([("rows_twice", (7, 2)), ("rows_twice", (3,)), ("inner", (1,))], 3),
    "empty_shards": ([("inner", (1, 4)), ("outer", (1,)), ("rows_twice", (1, 2)), ("both", (1, 1))], 4),
    "nothing_but_empty": ([("inner", (0, 4)), ("outer", (3,))], 2),
    "replicated": ([("replicated", (4, 2)), ("plain", (3,))], 0),
    "everything": (
        [
            (layout, (3, 2))
            for layout in ("plain", "outer", "inner", "hybrid", "both", "rows_twice", "replicated")
        ],
        4,
    ),
}


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("clip_norm", [0.5, 1e3])
@pytest.mark.parametrize(("parameters", "all_reduces"), MIXTURES.values(), ids=MIXTURES)
def test_mixtures(
    pool4: RankPool, parameters: list[Parameter], all_reduces: int, clip_norm: float, foreach: bool
) -> None:
    """Norm and gradients are those of one process; one all-reduce for each way of sharding and each of its groups."""
    norm, gradients = _expected(parameters, clip_norm)
    assert (norm > clip_norm) == (clip_norm == 0.5)
    for clipped in pool4.run(_clip, parameters, clip_norm, foreach, torch.float64):
        assert clipped.norm.dtype == torch.float64
        assert clipped.norm.item() == pytest.approx(norm, rel=TOLERANCE)
        assert clipped.all_reduces == all_reduces
        for gradient, expected in zip(clipped.gradients, gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=TOLERANCE, atol=0.0)


@pytest.mark.parametrize("without", [(1,), (0, 1, 2)])
def test_gradients_missing_on_one_rank(pool2: RankPool, without: tuple[int, ...]) -> None:
    """Ranks stay in step, and return the same norm to the last bit: that of the shards that have a gradient."""
    parameters: list[Parameter] = [("outer", (3, 2)), ("outer", (5,)), ("outer", (4, 2))]
    gradients = _full_gradients(parameters)
    held = [
        gradient.chunk(2)[0] if index in without else gradient  # rank 0 holds the first of two chunks
        for index, gradient in enumerate(gradients)
    ]
    expected = torch.cat([gradient.flatten() for gradient in held]).norm().item()
    first, second = pool2.run(_clip, parameters, 0.5, True, torch.float64, without)
    assert first.all_reduces == second.all_reduces == 1
    assert first.norm.item() == pytest.approx(expected, rel=TOLERANCE)
    assert (second.norm.dtype, second.norm.item()) == (first.norm.dtype, first.norm.item())


def _clip_sums_to_be_reduced() -> tuple[float, list[Tensor]]:
    """A replicated parameter whose gradient is still a partial sum on every rank, beside a sharded one."""
    grid = _grid()
    parameters = [
        nn.Parameter(_lay_out(torch.zeros(4).double(), layout, grid)) for layout in ("replicated", "outer")
    ]
    partial = torch.arange(4.0).double() * (1 + dist.get_rank())
    parameters[0].grad = DTensor.from_local(partial, grid, [Partial(), Replicate()])
    parameters[1].grad = _lay_out(torch.ones(4).double(), "outer", grid)
    norm = clip_gradients(parameters, 1.0)
    return norm.item(), [full(parameter.grad) for parameter in parameters]


def test_sums_to_be_reduced(pool2: RankPool) -> None:
    """The sum is completed before it is squared."""
    whole = [3 * torch.arange(4.0).double(), torch.ones(4).double()]
    norm = torch.cat(whole).norm().item()
    for returned, gradients in pool2.run(_clip_sums_to_be_reduced):
        assert returned == pytest.approx(norm, rel=TOLERANCE)
        for gradient, expected in zip(gradients, whole, strict=True):
            torch.testing.assert_close(gradient, expected / (norm + 1e-6), rtol=TOLERANCE, atol=0.0)
