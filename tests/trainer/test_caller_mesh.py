"""Training over a mesh that the caller built is exact, and the module sees that mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import PLAN, full_weights, micro_batches
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import TOLERANCE, make_trainer
from tests.trainer.test_layouts import ACCUMULATE, CASE2, CASE4, decoder, deviation


class OwnNames(ModelModule):
    """Applies its plan over the dimension as the caller called it."""

    def configure_model(self) -> None:
        if "tp" in (self.device_mesh.mesh_dim_names or ()):
            parallelize_module(self.model, self.device_mesh["tp"], PLAN)


def fit_over(
    shape: tuple[int, ...], names: tuple[str, ...] | None, **options: Any
) -> tuple[dict[str, Tensor], Any]:
    """Train over a mesh of this shape; twice, as meshes of the caller's outlive a fit."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    by_rank = micro_batches(CASE4 if "tp" not in (names or ()) else CASE2)
    data_rank = dist.get_rank() // (shape[-1] if "tp" in (names or ()) else 1)
    for _ in range(2):
        module = OwnNames(decoder())
        strategy = AutomodelStrategy(device_mesh=mesh, **options)
        trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
        trainer.fit(module, DataLoader(by_rank[data_rank], batch_size=None))
        assert strategy.device_mesh is mesh
    return full_weights(module.model), strategy.describe()["mesh"]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("shape", "names", "options", "sizes"),
    [
        pytest.param((4,), None, {}, {"data_parallel": 4}, marks=pytest.mark.sweep),
        ((2, 2), ("dp_replicate", "dp_shard"), {"defer_fsdp_grad_sync": "all_reduce"}, {"dp_shard": 2}),
        ((2, 2), ("dp", "tp"), {}, {"dp": 2, "tp": 2, "data_parallel": 2}),
        pytest.param(
            (2, 2),
            ("replicate", "shard"),
            {"data_parallel": "ddp"},
            {"data_parallel": 4},
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["unnamed", "hsdp", "tensor_parallel", "ddp"],
)
def test_trains_like_one_process(
    pool4: RankPool, shape: tuple[int, ...], names: Any, options: dict[str, Any], sizes: dict[str, int]
) -> None:
    expected = plain_weights(decoder(), ACCUMULATE, CASE4 if "tp" not in (names or ()) else CASE2)
    for weights, described in pool4.run(fit_over, shape, names, **options):
        assert deviation(weights, expected) <= TOLERANCE
        assert sizes.items() <= described.items()
