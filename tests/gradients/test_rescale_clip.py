"""Rescaling, clipping and sums: in one process against torch's own functions, and over ranks."""

from __future__ import annotations

import functools
import math
import time
import unittest
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_automodel import barrier_and_log, clip_gradients, reduce_loss, rescale_gradients
from lightning_automodel.distributed.collectives import reduce_tensor
from lightning_automodel.gradients.rescale_clip import clip_gradient_values
from tests.rank_pool import RankPool
from tests.trainer.exactness import TOLERANCE, full
from tests.trainer.test_communication import OpCounts

SHAPES = [(3, 4), (5,), (), (0, 2)]


def _parameters(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[nn.Parameter]:
    """Parameters with random gradients, and a last one without."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return [*parameters, nn.Parameter(torch.zeros(2, dtype=dtype))]


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    return [parameter.grad for parameter in parameters]


def _module(parameters: list[nn.Parameter]) -> nn.Module:
    module = nn.Module()
    for index, parameter in enumerate(parameters):
        module.register_parameter(f"p{index}", parameter)
    return module


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("clip_norm", [0.1, 1, 100.0])
@pytest.mark.parametrize("wrap", [list, iter, _module], ids=["list", "iterator", "module"])
def test_clipping_equals_torch(wrap: Any, clip_norm: float, foreach: bool) -> None:
    """The norm before and the gradients after are torch's, for a module as for parameters; `.grad` stays in place."""
    ours = _parameters()
    theirs = _parameters()
    objects = [id(gradient) for gradient in _gradients(ours)]
    norm = clip_gradients(wrap(ours), clip_norm, foreach)
    expected = nn.utils.clip_grad_norm_(theirs, clip_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-15, atol=0.0)
    torch.testing.assert_close(_gradients(ours)[:-1], _gradients(theirs)[:-1], rtol=1e-15, atol=0.0)
    assert [id(gradient) for gradient in _gradients(ours)] == objects
    assert (norm > clip_norm).item() == (clip_norm < 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_gradients_have_a_wide_norm(dtype: torch.dtype) -> None:
    """Half precision neither overflows in the square nor rounds the norm, and gradients keep their dtype."""
    parameters = _parameters(dtype, scale=1000.0)
    exact = torch.cat([p.grad.double().flatten() for p in parameters[:-1]]).norm().item()
    norm = clip_gradients(parameters, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    assert {p.grad.dtype for p in parameters[:-1]} == {dtype}
    clipped = torch.cat([p.grad.double().flatten() for p in parameters[:-1]]).norm().item()
    assert clipped == pytest.approx(1.0, rel=4 * torch.finfo(dtype).eps)


def test_sparse_gradients() -> None:
    """An embedding's sparse gradient counts its repeated rows once summed, and is scaled."""
    sparse = nn.Embedding(4, 3, sparse=True)
    dense = nn.Embedding(4, 3)
    dense.weight = nn.Parameter(sparse.weight.detach().clone())
    for embedding in (sparse, dense):
        embedding(torch.tensor([1, 1, 3])).square().sum().backward()
    norms = [clip_gradients(embedding, 0.5).item() for embedding in (sparse, dense)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


@pytest.mark.parametrize("model", [[], nn.ReLU(), [nn.Parameter(torch.ones(2))], _parameters(scale=0.0)])
def test_nothing_to_clip(model: Any) -> None:
    """No parameters, none with a gradient, or gradients of zero: a norm of zero, by which nothing is divided."""
    assert clip_gradients(model, 1.0).item() == 0.0
    parameters = model if isinstance(model, list) else []
    assert not any(gradient.any() for gradient in _gradients(parameters) if gradient is not None)


@pytest.mark.parametrize("foreach", [True, False])
def test_complex_gradients(foreach: bool) -> None:
    """As torch clips them: the square of an element is that of its absolute value."""
    ours = _parameters(torch.complex128)
    theirs = _parameters(torch.complex128)
    for parameter in (*ours[:1], *theirs[:1]):
        parameter.grad *= 1 + 2j
    norm = clip_gradients(ours, 0.5, foreach)
    torch.testing.assert_close(norm.double(), nn.utils.clip_grad_norm_(theirs, 0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(_gradients(ours), _gradients(theirs), rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match=r"(?i)complex"):  # torch's own: they have no order
        clip_gradient_values(ours, 0.5)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, True, None, "1"])
@pytest.mark.parametrize("clip", [clip_gradients, clip_gradient_values])
def test_thresholds_that_are_not_positive(clip: Any, value: Any) -> None:
    """They raise before any gradient is touched."""
    parameters = _parameters()
    with pytest.raises(ValueError, match="positive number") as raised:
        clip(parameters, value)
    assert str(raised.value) == f"The value to clip gradients to must be a positive number, got {value!r}."
    torch.testing.assert_close(
        _gradients(parameters)[:-1], _gradients(_parameters())[:-1], rtol=0.0, atol=0.0
    )


@pytest.mark.parametrize(
    "count", [4, torch.tensor(4), torch.tensor([4]), torch.tensor(4, dtype=torch.uint8), torch.tensor(4.0)]
)
def test_rescaling_alone(count: int | Tensor) -> None:
    """Without a group: divided by the count, which stays as it was."""
    parameters = _parameters()
    rescale_gradients(parameters, count)
    for gradient, original in zip(_gradients(parameters)[:-1], _gradients(_parameters())[:-1], strict=True):
        assert gradient.equal(original / 4)
    assert parameters[-1].grad is None
    assert torch.equal(torch.as_tensor(count).reshape(()).long(), torch.tensor(4))


def test_a_count_of_python_is_not_rounded() -> None:
    """A sum of class weights, or more tokens than float32 can tell apart."""
    for count in (0.1, 2.0**25 + 1):
        parameter = nn.Parameter(torch.zeros((), dtype=torch.float64))
        parameter.grad = torch.ones_like(parameter)
        rescale_gradients(parameter, count)
        assert parameter.grad.item() == 1 / count
        assert reduce_loss([], count)[1].item() == count


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("largest", [3e19, 1e30, 1e38, 3e38])
def test_large_finite_gradients_are_clipped_not_zeroed(largest: float, foreach: bool) -> None:
    """The squares of float32 beyond 1.8e19 overflow, and in the end the norm that is returned does."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, largest)
    norm = clip_gradients(parameters, 1.0, foreach=foreach)
    exact = 5**0.5 * largest
    assert norm.item() == pytest.approx(
        exact if exact < torch.finfo(torch.float32).max else math.inf, rel=1e-6
    )
    assert torch.cat([parameter.grad for parameter in parameters]).norm().item() == pytest.approx(
        1.0, rel=1e-5
    )


# --- Sums over ranks --------------------------------------------------------------------------------------------------


def _reduce(
    losses: list[list[float]], counts: list[Any], dtype: torch.dtype, per_token_loss: bool
) -> tuple[Tensor, ...]:
    """Runs on every rank: its own losses and count, over the world."""
    rank = dist.get_rank()
    store = [torch.tensor(loss, dtype=dtype) for loss in losses[rank]]
    with OpCounts() as seen:
        loss, denominator = reduce_loss(store, counts[rank], per_token_loss, dist.group.WORLD)
    assert seen.ops["collectives"] == seen.ops["allreduce_"] == 1
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


def _means_of_integers() -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    alone = dist.new_group([rank], use_local_synchronization=True)
    groups = (dist.group.WORLD, alone)
    of_both, of_one = (
        reduce_tensor(torch.tensor(rank), group, "mean", torch.device("cpu")) for group in groups
    )
    return of_both, of_one


def test_mean_of_integers(pool2: RankPool) -> None:
    """Exact; of one rank it stays an integer, and Lightning's metrics float32."""
    for rank, (of_both, of_one) in enumerate(pool2.run(_means_of_integers)):
        assert of_both == 0.5
        assert (of_one, of_one.dtype) == (rank, torch.int64)


def _log_after_a_late_rank() -> float:
    """When the message was logged, on rank 0 alone; when this rank has arrived, on the other."""
    is_first = dist.get_rank() == 0
    expect = unittest.TestCase().assertLogs if is_first else unittest.TestCase().assertNoLogs
    with expect("lightning_automodel", "INFO") as logged:
        time.sleep(0.0 if is_first else 0.3)
        arrived = time.time()
        barrier_and_log("100 % of {ranks} are here")
    if not is_first:
        return arrived
    [record] = logged.records
    assert record.getMessage() == "100 % of {ranks} are here"
    return record.created


def test_barrier_and_log(pool2: RankPool) -> None:
    """Rank 0 alone logs the message as it stands, and not before the last rank has come."""
    logged, arrived = pool2.run(_log_after_a_late_rank)
    assert arrived <= logged


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
    with OpCounts() as seen:
        norm = clip_gradients(module, clip_norm, foreach=foreach)
    assert seen.ops["collectives"] == seen.ops["allreduce_"]
    shown = [None if index in without else full(p.grad) for index, p in enumerate(module.parameters())]
    return Clipped(norm, shown, seen.ops["allreduce_"])


def _expected(parameters: list[Parameter], clip_norm: float) -> tuple[float, list[Tensor]]:
    """Norm and clipped gradients of one process that holds everything."""
    plain = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for _, shape in parameters]
    for parameter, gradient in zip(plain, _full_gradients(parameters), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(plain, clip_norm).item()
    return norm, [parameter.grad for parameter in plain]


EVERY = ("plain", "outer", "inner", "hybrid", "hybrid_columns", "both", "rows_twice", "replicated")
MIXTURES: dict[str, tuple[list[Parameter], int]] = {
    "everything": ([(layout, (3, 2)) for layout in EVERY], 4),
    "empty shards": ([("inner", (1, 4)), ("outer", (1,)), ("rows_twice", (1, 2)), ("both", (1, 1))], 4),
    "nothing but empty": ([("inner", (0, 4)), ("outer", (3,))], 2),
    "nothing sharded": ([("replicated", (4, 2)), ("plain", (3,))], 0),
}


@pytest.mark.each_value
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
