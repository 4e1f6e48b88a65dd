"""Optimizers that look at whole tensors train sharded models as one process does. The reference knows no shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_automodel import AutomodelStrategy
from lightning_automodel.gradients.whole_tensors import WholeSteps
from tests.gradients.whole_steps import KINDS, WholeModule
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import Outcome, full_weights, weight_error
from tests.trainer.plain import filled_decoder, plain_weights, prefixed
from tests.trainer.runs import CASE, TOLERANCE, by_default, loader, make_trainer

ACCUMULATE = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "offload": (2, {"cpu_offload": True}),
    "four ranks": (4, {"defer_fsdp_grad_sync": False}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "tensor parallel": (4, {"tensor_parallel_size": 2}),
}


def _fit(kinds: Sequence[str], options: dict[str, Any], case: Case) -> list[tuple[dict[str, Tensor], Any]]:
    """Runs on every rank: weights after a fit with each kind, and how the strategy says that it steps."""
    found = []
    for kind in kinds:
        tensor = options.get("tensor_parallel_size", 1)
        module = WholeModule(kind, tensor > 1)
        seen: list[Any] = []

        class Look(Callback):
            def on_train_end(self, trainer: Any, module: Any, seen: list[Any] = seen) -> None:
                seen.append(trainer.strategy.describe()["optimizer_step"])

        trainer = make_trainer(
            AutomodelStrategy(**options),
            precision="64-true",
            accumulate_grad_batches=ACCUMULATE,
            gradient_clip_val=0.1,
            callbacks=[Look()],
        )
        batches = loader(case).dataset[:]
        if tensor > 1:
            from tests.trainer.exactness import micro_batches  # noqa: PLC0415

            batches = micro_batches(case)[dist.get_rank() // tensor]
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        found.append((full_weights(module), seen[0]))
    return found


@pytest.mark.parametrize("layout", by_default(LAYOUTS, "fsdp2", "tensor parallel"))
def test_steps_are_those_of_one_process(
    layout: tuple[int, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    """Two groups of one optimizer, nested late state, the loss of the closure; ragged windows, clipping."""
    num_ranks, options = layout
    pool: RankPool = request.getfixturevalue(f"pool{num_ranks}")
    case = dataclasses.replace(CASE, num_ranks=num_ranks // options.get("tensor_parallel_size", 1))
    kinds = list(KINDS)
    by_rank = pool.run(_fit, kinds, options, case)
    for number, kind in enumerate(kinds):
        expected = prefixed(
            plain_weights(filled_decoder(), ACCUMULATE, case, clip=_clip, make_optimizer=KINDS[kind])
        )
        for found in by_rank:
            weights, described = found[number]
            assert weight_error(Outcome(weights, None), expected) <= TOLERANCE, kind
            starts = [group.split()[0] for group in described[0]["groups"]]
            assert starts == {"muon": ["whole", "shards"], "by loss": ["shards"]}.get(kind, ["whole"])
            if starts == ["whole"]:
                owned = described[0]["elements_by_owner"]
                assert sum(owned) == sum(weight.numel() for weight in expected.weights.values())
                assert max(owned) < 0.8 * sum(owned)


def _clip(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.1)


# --- Bits -------------------------------------------------------------------------------------------------------------

SHAPES = ((5, 24), (1, 16), (3, 3), (33, 7), (24, 5))


def _steps(dtype: torch.dtype, replicas: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Runs on every rank: weights and momentum of torch's Muon on shards with owners, and in one process."""
    mesh_shape = (replicas, dist.get_world_size() // replicas) if replicas > 1 else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    sharded, whole = _model(dtype), _model(dtype)
    fully_shard(sharded, mesh=mesh)
    optimizers = [
        torch.optim.Muon(model.parameters(), lr=0.05, weight_decay=0.1) for model in (sharded, whole)
    ]
    steps = WholeSteps(torch.device("cpu"))
    steps.take(optimizers[0], {0})
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        for index, (mine, reference) in enumerate(zip(sharded.parameters(), whole.parameters(), strict=True)):
            gradient = torch.randn(reference.shape, generator=generator).to(dtype)
            is_used = number % 2 == 0 or index != 1  # one has a gradient every second step
            reference.grad = gradient if is_used else None
            mine.grad = _sharded_like(mine, gradient) if is_used else None
        steps.begin(optimizers[0])
        optimizers[0].step()
        steps.end(optimizers[0])
        optimizers[1].step()
    weights = full_weights(sharded)
    owned = steps.of(optimizers[0])
    momentum = {
        name: optimizers[0].state[parameter]["momentum_buffer"]
        for name, parameter in sharded.named_parameters()
        if owned[parameter]
    }
    assert all(parameter not in optimizers[0].state for parameter, is_own in owned.items() if not is_own)
    expected = dict(zip(weights, (optimizers[1].state[p]["momentum_buffer"] for p in whole.parameters()), strict=True))
    return [(weights, full_weights(whole)), (momentum, {name: expected[name] for name in momentum})]


def _sharded_like(parameter: Tensor, gradient: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in SHAPES)


@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.sweep), (4, 1)])
def test_the_same_bits(num_ranks: int, replicas: int, request: pytest.FixtureRequest) -> None:
    """The same function of the same gradients: fewer rows than ranks, uneven rows, wide and tall, in two dtypes."""
    pool: RankPool = request.getfixturevalue(f"pool{num_ranks}")
    for dtype in (torch.float32, torch.bfloat16):
        for pairs in pool.run(_steps, dtype, replicas):
            for found, expected in pairs:
                assert found.keys() == expected.keys()
                for name in found:
                    assert torch.equal(found[name], expected[name]), (dtype, name)
