"""Experts spread over ranks train as in one process that holds all of them, in every layout.

A rank's experts see the tokens of all ranks of their group, so that the average over the ranks that hold the
same experts is too large by the number of ranks in the group. Numbers of experts are chosen so that shards
are uneven, and empty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_automodel import ExactnessCheck
from tests.expert_parallel.mixtures import (
    ACCUMULATE,
    CASE,
    NUM_EXPERTS,
    WIDTH,
    Experts,
    Mixture,
    MixtureDecoder,
    SpreadModule,
    UnequalStart,
    fit,
    local,
)
from tests.gradients.test_whole_tensors import Looking
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import VOCABULARY, full_weights, weight_error
from tests.trainer.plain import fill, plain_weights
from tests.trainer.runs import TOLERANCE, by_default

PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
TWO_BATCHES = replace(CASE, num_ranks=2)


CLIP = 0.3

MODES: dict[str, dict[str, Any]] = {
    "kept": {},
    "all ranks": {"expert_parallel_size": 4},
    "hsdp": {"data_parallel_replicate_size": 2},
    "hsdp, all-reduce": {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"},
    "hsdp, undeferred": {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": False},
    "resharded": {"reshard_during_accumulation": True, "prefetch": 2},
    "undeferred": {"defer_fsdp_grad_sync": False},
    "recomputed": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": "selective"},
    "counted ahead": {"count_window_ahead": True},
    "offloaded": {"cpu_offload": True},
    "units of experts": {"auto_wrap_policy": {Experts}},
    "units of experts, recomputed": {"auto_wrap_policy": {Experts}, "activation_checkpointing": {Mixture}},
    "one unit": {"auto_wrap_policy": set()},
    "smaller groups": {"reshard_after_forward": 2, "reshard_during_accumulation": True},
}


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(MODES, "kept", "hsdp, all-reduce", "units of experts"))
def test_as_one_process(pool4: RankPool, options: dict[str, Any]) -> None:
    """Also the norm of all gradients, which clipping uses."""
    norms: list[Tensor] = []
    expected = plain_weights(
        MixtureDecoder(), ACCUMULATE, CASE, clip=lambda p: norms.append(nn.utils.clip_grad_norm_(p, CLIP))
    )
    for found in pool4.run(fit, options, gradient_clip_val=CLIP):
        assert weight_error(found.weights, expected) <= TOLERANCE
        assert found.grad_norm == pytest.approx(float(norms[-1]), rel=TOLERANCE)


class ClippedByTorch(SpreadModule):
    """Clips as in a plain loop, over the gradients of two meshes; shards of six experts are uneven."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), CLIP)


def test_clipped_by_torch(pool4: RankPool) -> None:
    clipped = plain_weights(
        MixtureDecoder(6),
        ACCUMULATE,
        CASE,
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, CLIP),
    )
    assert weight_error(plain_weights(MixtureDecoder(6), ACCUMULATE, CASE), clipped) > 1e-3, (
        "nothing was clipped"
    )
    for found in pool4.run(fit, {}, ClippedByTorch, number=6):
        assert weight_error(found.weights, clipped) <= TOLERANCE


def test_empty_shards(pool4: RankPool) -> None:
    expected = plain_weights(MixtureDecoder(2), ACCUMULATE, CASE)
    assert weight_error(pool4.run(fit, {}, number=2)[0].weights, expected) <= TOLERANCE


# --- Beside other layouts ---------------------------------------------------------------------------------------------


class BesideTensorParallel(UnequalStart):
    """Experts are the same on tensor-parallel ranks, which share the embedding and the head."""

    def configure_model(self) -> None:
        super().configure_model()
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)


def test_beside_tensor_parallelism(pool4: RankPool) -> None:
    expected = plain_weights(MixtureDecoder(), ACCUMULATE, TWO_BATCHES)
    for found in pool4.run(fit, {"tensor_parallel_size": 2}, BesideTensorParallel, case=TWO_BATCHES):
        assert weight_error(found.weights, expected) <= TOLERANCE


@pytest.mark.parametrize(
    "options", by_default({"whole": {"optimizer_step": "whole"}, "shards": {}}, "whole")
)
def test_beside_context_parallelism(pool4: RankPool, options: dict[str, Any]) -> None:
    """Stepped whole too."""
    expected = plain_weights(MixtureDecoder(), ACCUMULATE, TWO_BATCHES)
    for found in pool4.run(fit, {"context_parallel_size": 2, **options}, UnequalStart, case=TWO_BATCHES):
        assert weight_error(found.weights, expected) <= TOLERANCE


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
        assert weight_error(found.weights, expected) <= TOLERANCE
        changed = {
            name.rpartition(".")[2]
            for name, weight in found.weights.items()
            if not weight.equal(start[name])
        }
        assert changed == {"first", "second"}


class ByMatrix(Looking):
    """Normalises each of the last two dimensions by itself, as Muon treats stacks of matrices."""

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        if group.get("is_elementwise"):
            return parameter.grad
        return parameter.grad / (parameter.grad.norm(dim=(1, 2), keepdim=True) + 0.1)


def by_matrix(model: nn.Module) -> ByMatrix:
    """Experts by their matrices, the rest element by element."""
    stacks = [parameter for parameter in model.parameters() if parameter.ndim == 3]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 3]
    return ByMatrix([{"params": stacks}, {"params": rest, "is_elementwise": True}], lr=0.05)


class ByMatrixModule(SpreadModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return by_matrix(self)


@pytest.mark.parametrize("choice", ["whole", "shards"])
def test_matrices_of_experts(pool4: RankPool, choice: str) -> None:
    """Whole on their owners, and gathered from shards."""
    expected = plain_weights(MixtureDecoder(), ACCUMULATE, CASE, make_optimizer=by_matrix)
    for found in pool4.run(fit, {"optimizer_step": choice}, ByMatrixModule):
        assert weight_error(found.weights, expected) <= TOLERANCE
        groups = found.described["optimizer_step"][0]["groups"]
        assert groups == [choice, choice]


class InitialisedExperts(Experts):
    """Initialises itself, as torch's layers do."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.5)
        nn.init.normal_(self.down, std=0.5)


class InitialisedDecoder(MixtureDecoder):
    """Without values of its own."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = Mixture(NUM_EXPERTS)
            block.experts = InitialisedExperts(NUM_EXPERTS)
            self.blocks.append(block)
        self.head = nn.Linear(WIDTH, VOCABULARY)


class FromMeta(SpreadModule):
    """Creates its model on the meta device, from where experts are spread without values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(nn.Identity())
        torch.manual_seed(7 + dist.get_rank())

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            with torch.device("meta"):
                self.model = InitialisedDecoder()
        super().configure_model()


@pytest.mark.sweep
def test_initialised_from_the_meta_device(pool4: RankPool) -> None:
    """Each rank draws all experts from the first rank's random state, and keeps its own."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    model = InitialisedDecoder()
    torch.set_default_dtype(torch.float32)
    expected = plain_weights(model, ACCUMULATE, CASE)
    for found in pool4.run(fit, {}, FromMeta, precision="64-true"):
        assert weight_error(found.weights, expected) <= TOLERANCE


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
    for found in pool4.run(fit, {}, OwnFactor):
        assert weight_error(found.weights, expected) <= TOLERANCE


def test_wrong_units_of_the_user(pool4: RankPool) -> None:
    message = r"model\.blocks\.0 \(Mixture\) averages its gradients over 2 ranks, but 4 hold different data"
    with pytest.raises(RankError, match=message):
        pool4.run(fit, {}, UnitsOfBoth)


# --- Callbacks and hooks ----------------------------------------------------------------------------------------------


class Grouped(SpreadModule):
    """Keeps a process group on the module, which no copy of it can have."""

    def configure_model(self) -> None:
        super().configure_model()
        self.group = self.device_mesh["expert_parallel"].get_group()

    def __init__(self, model: MixtureDecoder) -> None:
        super().__init__(model)
        self.group = None


def _checked(options: dict[str, Any]) -> tuple[str | None, str]:
    check = ExactnessCheck(steps=1)
    fit(options, Grouped, callbacks=[check], accumulate=1, max_steps=2)
    return check.verdict, check.report


def test_exactness_check(pool4: RankPool) -> None:
    """Rank 0 replays with all experts, by the module before `configure_model`."""
    for verdict, report in pool4.run(_checked, {}):
        assert verdict == "exact", report


class LoadsWhole(SpreadModule):
    """Loads whole tensors into the sharded module before the first step."""

    def on_fit_start(self) -> None:
        self.model.load_state_dict(_scaled().state_dict())
        self.loaded = full_weights(self.model)

    def on_train_start(self) -> None:
        expected = _scaled().state_dict()
        assert all(weight.cpu().equal(expected[name]) for name, weight in self.loaded.items())


def _scaled() -> MixtureDecoder:
    model = MixtureDecoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def test_whole_states(pool4: RankPool) -> None:
    expected = plain_weights(_scaled(), ACCUMULATE, CASE)
    for found in pool4.run(fit, {}, LoadsWhole):
        assert weight_error(found.weights, expected) <= TOLERANCE
