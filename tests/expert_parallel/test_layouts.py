"""Spread experts beside tensor and context parallelism, precisions, and what user code does to parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.expert_parallel.mixtures import (
    ACCUMULATE,
    CASE,
    Experts,
    MixtureDecoder,
    SpreadModule,
    UnequalStart,
    error,
    fit,
    local,
)
from tests.rank_pool import RankError, RankPool
from tests.trainer.plain import ModelModule, fill, plain_weights
from tests.trainer.runs import TOLERANCE, by_default

PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
TWO_BATCHES = replace(CASE, num_ranks=2)


class BesideTensorParallel(UnequalStart):
    """Experts are the same on tensor-parallel ranks, which share the embedding and the head."""

    def configure_model(self) -> None:
        super().configure_model()
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)


def test_beside_tensor_parallelism(pool4: RankPool) -> None:
    expected = plain_weights(MixtureDecoder(), ACCUMULATE, TWO_BATCHES)
    for found in pool4.run(fit, {"tensor_parallel_size": 2}, BesideTensorParallel, case=TWO_BATCHES):
        assert error(found.weights, expected) <= TOLERANCE


@pytest.mark.parametrize("options", by_default({"whole": {"optimizer_step": "whole"}, "shards": {}}, "whole"))
def test_beside_context_parallelism(pool4: RankPool, options: dict[str, Any]) -> None:
    """Stepped whole too: the ranks that hold an expert's parts are in no order of the mesh."""
    expected = plain_weights(MixtureDecoder(), ACCUMULATE, TWO_BATCHES)
    for found in pool4.run(fit, {"context_parallel_size": 2, **options}, UnequalStart, case=TWO_BATCHES):
        assert error(found.weights, expected) <= TOLERANCE


# --- Parameters of experts --------------------------------------------------------------------------------------------


class AdaptedExperts(Experts):
    """A frozen base, and an adapter of low rank for each expert."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.requires_grad_(False)
        self.first = nn.Parameter(torch.empty(number, 2, self.up.shape[2]))
        self.second = nn.Parameter(torch.empty(number, self.up.shape[1], 2))

    def weights(self) -> tuple[Tensor, Tensor]:
        up, down = super().weights()
        return up + local(self.second) @ local(self.first), down


class AdaptedModule(SpreadModule):
    """Trains adapters alone."""

    def __init__(self, model: MixtureDecoder) -> None:
        super().__init__(adapted(model))


def adapted(model: MixtureDecoder) -> MixtureDecoder:
    """The model with adapters, and everything else frozen."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.experts = AdaptedExperts(len(block.gate.weight))
    fill(model)
    return model


def test_adapters_of_experts(pool4: RankPool) -> None:
    expected = plain_weights(adapted(MixtureDecoder()), ACCUMULATE, CASE)
    start = adapted(MixtureDecoder()).state_dict()
    for found in pool4.run(fit, {}, AdaptedModule):
        assert error(found.weights, expected) <= TOLERANCE
        changed = {name.rpartition(".")[2] for name, weight in found.weights.items() if not weight.equal(start[name])}
        assert changed == {"first", "second"}


class BatchedMuon(torch.optim.Optimizer):
    """Muon for stacks of matrices: each of the last two dimensions by itself; in the dtype of the weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "is_elementwise": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(parameter)
                    momentum = state["momentum"].lerp_(parameter.grad, 0.1)
                    direction = momentum if group["is_elementwise"] else orthogonal(momentum)
                    parameter.sub_(direction, alpha=group["lr"])
        return loss


def orthogonal(stack: Tensor) -> Tensor:
    """[e, r, c] the nearest matrices with orthogonal rows or columns, by Newton-Schulz."""
    matrices = stack / (stack.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        square = matrices @ matrices.transpose(1, 2)
        matrices = 3.4445 * matrices + (-4.7750 * square + 2.0315 * square @ square) @ matrices
    return matrices


def batched_muon(model: nn.Module) -> BatchedMuon:
    """Experts by their matrices, the rest by momentum."""
    stacks = [parameter for parameter in model.parameters() if parameter.ndim == 3]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 3]
    return BatchedMuon([{"params": stacks}, {"params": rest, "is_elementwise": True}])


class MuonModule(SpreadModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return batched_muon(self)


@pytest.mark.every_case
@pytest.mark.parametrize("choice", ["auto", "whole"])
def test_matrices_of_experts(pool4: RankPool, choice: str) -> None:
    """Each rank has whole experts, so that their matrices are whole on shards too: the trial finds that out."""
    expected = plain_weights(MixtureDecoder(), ACCUMULATE, CASE, make_optimizer=batched_muon)
    for found in pool4.run(fit, {"optimizer_step": choice}, MuonModule):
        assert error(found.weights, expected) <= 1e-9  # orthogonalisation enlarges the rounding of small gradients
        groups = found.described["optimizer_step"][0]["groups"]
        assert groups[0].startswith("shards" if choice == "auto" else "whole"), groups


# --- Units of the user ------------------------------------------------------------------------------------------------


class OwnUnits(SpreadModule):
    """Shards the model itself, the experts over the ranks that hold the same ones."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            fully_shard(block.experts, mesh=self.device_mesh["expert_data_parallel_shard"])
            fully_shard(block, mesh=self.device_mesh["data_parallel_shard"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel_shard"])


class UnitsOfBoth(SpreadModule):
    """The gate is averaged over the ranks that hold the same experts alone."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh["expert_data_parallel_shard"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel_shard"])


class OwnFactor(OwnUnits):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.blocks[0].experts.set_gradient_divide_factor(4.0)


def test_units_of_the_user(pool4: RankPool) -> None:
    expected = plain_weights(MixtureDecoder(), ACCUMULATE, CASE)
    for found in pool4.run(fit, {}, OwnUnits):
        assert error(found.weights, expected) <= TOLERANCE


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OwnFactor, r"divides gradients by 4\.0 \(set_gradient_divide_factor\)"),
        (UnitsOfBoth, "'model.blocks.0' averages its gradients over 2 ranks, but 4 hold different data"),
    ],
)
def test_wrong_units_of_the_user(pool4: RankPool, make: type[ModelModule], message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool4.run(fit, {}, make)
