"""The public functions in a plain PyTorch loop, without Lightning: what communicates when, and whole windows."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_automodel import get_sync_ctx, rescale_gradients
from tests.gradients.ragged import (
    WIDTH,
    Counts,
    Holder,
    micro_batch,
    train_on_ranks,
    train_plainly,
)
from tests.rank_pool import RankPool
from tests.trainer.exactness import TOLERANCE, full, weight_error

CLIP = 0.2
# One window is ragged, in the next a rank has nothing, then nobody has anything, then it is long on one rank
# only.
RAGGED: Counts = [
    [[3, 0, 5], [1, 7, 2]],
    [[0, 0], [4, 1]],
    [[0, 0, 0], [0, 0, 0]],
    [[0], [6]],
    [[2, 2, 2, 2], [0, 13, 0, 1]],
]
RAGGED4: Counts = [[[3, 0], [1, 7], [0, 0], [2, 5]], [[0, 0], [0, 0], [0, 0], [0, 0]], [[4], [0], [1], [9]]]


def _assert_exact(outcomes: list[Any], counts: Counts) -> None:
    expected = train_plainly(counts, CLIP)
    assert min(expected.norms[0], expected.norms[-1]) > CLIP
    for outcome in outcomes:
        assert weight_error(outcome.weights, expected.weights) <= TOLERANCE
        assert outcome.norms == pytest.approx(expected.norms, rel=TOLERANCE, abs=0.0)
        assert outcome.losses == [pytest.approx(loss, rel=TOLERANCE, abs=0.0) for loss in expected.losses]
        assert [norm == 0.0 for norm in outcome.norms] == [sum(map(sum, by_rank)) == 0 for by_rank in counts]


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("layout", ["one_root", "nested", "several_roots", "ddp"])
def test_windows_equal_one_process(pool2: RankPool, layout: str, defer: bool) -> None:
    """Deferral, rescaling, clipping and SGD give one process's weights, norms and losses, with gaps anywhere."""
    _assert_exact(pool2.run(train_on_ranks, layout, RAGGED, CLIP, defer), RAGGED)


@pytest.mark.parametrize("defer", [True, False, "all_reduce"])
def test_windows_of_replicas_equal_one_process(pool4: RankPool, defer: bool | str) -> None:
    """The same for two sharded replicas, in each mode of deferral."""
    _assert_exact(pool4.run(train_on_ranks, "hybrid", RAGGED4, CLIP, defer), RAGGED4)


@pytest.mark.parametrize("defer", [None, "allreduce", 1, "true"])
def test_unknown_deferral_raises_at_the_call(defer: Any) -> None:
    """A wrong argument raises where it was passed, not later where the context is entered."""
    with pytest.raises(ValueError, match="must be True, False or 'all_reduce', got " + repr(defer)):
        get_sync_ctx(nn.Linear(1, 1), True, defer)


def test_nothing_distributed() -> None:
    """On an ordinary module the context does nothing, so a loop needs no second version for one process."""
    model = nn.Linear(2, 1)
    with get_sync_ctx(model, False):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name.removeprefix("inner.net.").removeprefix("module."): None
        if p.grad is None
        else full(p.grad).clone()
        for name, p in model.named_parameters()
    }


def _gradients_in_mid_window(layout: str, defer: bool | str) -> set[bool]:
    """Whether there are any after the first of two micro-batches."""
    model = Holder(layout)
    features, _ = micro_batch(0, dist.get_rank(), 0, 3)
    with get_sync_ctx(model, False, defer):
        model(features).sum().backward()
    return {gradient is not None for gradient in _gradients(model).values()}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("layout", "defer"), [("several_roots", True), ("nested", False), ("hybrid", "all_reduce")]
)
def test_what_is_reduced_when(pool2: RankPool, pool4: RankPool, layout: str, defer: bool | str) -> None:
    """Nothing before the end of a window, unless it is not deferred; what is there at its end is compared above."""
    pool = pool4 if layout == "hybrid" else pool2
    assert pool.run(_gradients_in_mid_window, layout, defer) == [{defer is False}] * pool.num_ranks


def _give_up_a_window() -> list[bool]:
    """What deferred gradients leave behind, of a window that is given up as the docstring says.

    The last backward runs outside of any context, after another exception in one.
    """
    model = Holder("several_roots")
    features = torch.ones((2, WIDTH), dtype=torch.float64)
    with contextlib.suppress(KeyError), get_sync_ctx(model, False):
        sum(block(features).sum() for block in model.inner["net"].blocks).backward()
        raise KeyError
    with get_sync_ctx(model, True):
        pass
    model.zero_grad()
    with contextlib.suppress(KeyError), get_sync_ctx(model, False):
        raise KeyError
    sum(block(0 * features).sum() for block in model.inner["net"].blocks).backward()
    weights = [
        gradient for gradient in _gradients(model).values() if gradient is not None and gradient.ndim > 1
    ]
    return [bool(gradient.any()) for gradient in weights]


def test_a_window_that_is_given_up(pool2: RankPool) -> None:
    """FSDP2's deferred gradients outlive `zero_grad`, until they are reduced."""
    for left_behind in pool2.run(_give_up_a_window):
        assert left_behind
        assert not any(left_behind)


class Optional(nn.Module):
    """Runs its second layer only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False).double() for _ in range(2))

    def forward(self, features: Tensor, both: bool) -> Tensor:
        hidden = self.layers[0](features)
        return hidden + self.layers[1](features) if both else hidden


def _optional_unit(defer: bool | str, used_in: int, has_root: bool) -> dict[str, Tensor | None]:
    model = Optional()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (*model.layers, model) if has_root else model.layers:
        fully_shard(module, mesh=mesh)
    features = torch.full((1, 3), 1.0 + dist.get_rank(), dtype=torch.float64)
    for step in range(3):
        with get_sync_ctx(model, step == 2, defer):
            model(features, both=step == used_in).sum().backward()
    return _gradients(model)


@pytest.mark.each_value
@pytest.mark.parametrize("has_root", [True, False])
@pytest.mark.parametrize(("defer", "used_in"), [(True, 0), ("all_reduce", 1), (False, 0)])
def test_unit_without_part_in_the_last_micro_batch(
    pool4: RankPool, defer: bool | str, used_in: int, has_root: bool
) -> None:
    """A unit below a root, or a root itself, is reduced with the window, whichever micro-batch used it."""
    mean = (1.0 + 2.0 + 3.0 + 4.0) / 4
    for gradients in pool4.run(_optional_unit, defer, used_in, has_root):
        assert gradients["layers.0.weight"].equal(torch.full((3, 3), 3 * mean, dtype=torch.float64))
        assert gradients["layers.1.weight"].equal(torch.full((3, 3), mean, dtype=torch.float64))


def _rescaled(count: int | Tensor, pairs: bool) -> tuple[Tensor, Tensor | int]:
    """A gradient of ones, rescaled by local counts `count + rank` over the world or over {0, 2} and {1, 3}."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.ones(3, dtype=torch.float64)
    group = (
        {index: dist.new_group([index, index + 2]) for index in (0, 1)}[rank % 2]
        if pairs
        else dist.group.WORLD
    )
    local = count + rank
    rescale_gradients([parameter], local, group)
    return parameter.grad, local


@pytest.mark.parametrize(
    ("count", "pairs", "totals"),
    [
        (5, False, [26] * 4),
        (torch.tensor(5), False, [26] * 4),
        (torch.tensor([5], dtype=torch.int32), False, [26] * 4),
        (torch.tensor(5.0, dtype=torch.float64), True, [12, 14, 12, 14]),
        (2**24 + 1, False, [4 * (2**24 + 1) + 6] * 4),
    ],
)
def test_rescaling_sums_counts_over_the_group(
    pool4: RankPool, count: int | Tensor, pairs: bool, totals: list[int]
) -> None:
    """Gradients become D / N of what they were, N summed over the group and D its size; the count stays as it was."""
    divisor = 2 if pairs else 4
    for rank, (gradient, local) in enumerate(pool4.run(_rescaled, count, pairs)):
        assert gradient.equal(torch.full((3,), divisor / totals[rank], dtype=torch.float64))
        assert torch.equal(torch.as_tensor(local), torch.as_tensor(count + rank))
