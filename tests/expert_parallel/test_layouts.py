"""Experts spread over ranks train as in one process that holds all of them, in every layout.

A rank's experts see the tokens of all ranks of their group, so that the average over the ranks that hold the
same experts is too large by the number of ranks in the group. Numbers of experts are chosen so that shards
are uneven, and empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_automodel import ExactnessCheck
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.expert_parallel.dispatch import dispatch_tokens
from tests.checkpoint.checkpoints import adamw, resume, save, uninterrupted
from tests.expert_parallel.mixtures import (
    ACCUMULATE,
    CASE,
    CHOSEN,
    NUM_EXPERTS,
    WIDTH,
    Experts,
    Mixture,
    MixtureDecoder,
    SpreadModule,
    UnequalStart,
    fit,
)
from tests.gradients.test_whole_tensors import Looking
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.plain import plain_weights
from tests.trainer.runs import TOLERANCE, by_default

PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
TWO_BATCHES = replace(CASE, num_ranks=2)
CLIP = 0.3
MODES: dict[str, dict[str, Any]] = {
    "kept": {},
    "hsdp, all-reduce": {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"},
    "units of experts": {"auto_wrap_policy": {Experts}},
    "units of experts, recomputed": {"auto_wrap_policy": {Experts}, "activation_checkpointing": {Mixture}},
    "one unit": {"auto_wrap_policy": set()},
    "smaller groups": {"reshard_after_forward": 2, "reshard_during_accumulation": True},
}
"""`tests/search` draws the others."""


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


# --- Modules of many kinds --------------------------------------------------------------------------------------------


class BesideTensorParallel(UnequalStart):
    """Experts are the same on tensor-parallel ranks, which share the embedding and the head."""

    def configure_model(self) -> None:
        super().configure_model()
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)


class OwnFactor(SpreadModule):
    """Shards the model itself, the experts over the ranks that hold the same ones, and has a factor of its own."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            fully_shard(block.experts, mesh=self.device_mesh["expert_data_parallel_shard"])
            fully_shard(block, mesh=self.device_mesh["data_parallel_shard"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel_shard"])
        self.model.blocks[0].experts.set_gradient_divide_factor(4.0)


class LoadsWhole(SpreadModule):
    """Loads whole tensors into the sharded module before the first step."""

    def on_fit_start(self) -> None:
        self.model.load_state_dict(_scaled().state_dict())
        loaded = full_weights(self.model)
        assert all(weight.cpu().equal(loaded[name]) for name, weight in _scaled().state_dict().items())


def _scaled() -> MixtureDecoder:
    model = MixtureDecoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


class FromMeta(SpreadModule):
    """Creates its model on the meta device, from where experts are spread without values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(nn.Identity())
        torch.manual_seed(7 + dist.get_rank())

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            with torch.device("meta"):
                self.model = MixtureDecoder(has_values=False)
        super().configure_model()


def _drawn() -> MixtureDecoder:
    """As rank 0 draws it, from whose random state each rank draws all experts and keeps its own."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    model = MixtureDecoder(has_values=False)
    torch.set_default_dtype(torch.float32)
    return model


Kind = tuple[type[SpreadModule], dict[str, Any], Callable[[], MixtureDecoder]]
KINDS: dict[str, Kind] = {
    "empty shards": (SpreadModule, {"number": 2}, partial(MixtureDecoder, 2)),
    "tensor": (BesideTensorParallel, {"options": {"tensor_parallel_size": 2}}, MixtureDecoder),
    "context": (UnequalStart, {"options": {"context_parallel_size": 2}}, MixtureDecoder),
    "context, whole": (
        UnequalStart,
        {"options": {"context_parallel_size": 2, "optimizer_step": "whole"}},
        MixtureDecoder,
    ),
    "units of the user": (OwnFactor, {}, MixtureDecoder),
    "whole states": (LoadsWhole, {}, _scaled),
    "from the meta device": (FromMeta, {"precision": "64-true"}, _drawn),
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "kind", by_default(KINDS, *(name for name in KINDS if name not in ("context", "from the meta device")))
)
def test_kinds(pool4: RankPool, kind: Kind) -> None:
    make, settings, make_model = kind
    settings = {"options": {}, **settings}
    shares = "tensor_parallel_size" in settings["options"] or "context_parallel_size" in settings["options"]
    case = TWO_BATCHES if shares else CASE
    expected = plain_weights(make_model(), ACCUMULATE, case)
    for found in pool4.run(fit, make=make, case=case, **settings):
        assert weight_error(found.weights, expected) <= TOLERANCE


class UnitsOfBoth(SpreadModule):
    """The gate is averaged over the ranks that hold the same experts alone."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh["expert_data_parallel_shard"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel_shard"])


def test_wrong_units_of_the_user(pool4: RankPool) -> None:
    message = r"model\.blocks\.0 \(Mixture\) averages its gradients over 2 ranks, but 4 hold different data"
    with pytest.raises(RankError, match=message):
        pool4.run(fit, {}, UnitsOfBoth)


# --- Parameters of experts --------------------------------------------------------------------------------------------


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


# --- A callback -------------------------------------------------------------------------------------------------------


def _checked(options: dict[str, Any]) -> tuple[str | None, str]:
    check = ExactnessCheck(steps=1)
    fit(options, callbacks=[check], accumulate=1, max_steps=2)
    return check.verdict, check.report


def test_exactness_check(pool4: RankPool) -> None:
    """Windows of spread experts are replayed too."""
    for verdict, report in pool4.run(_checked, {}):
        assert verdict == "exact", report


# --- Checkpoints: all ranks get the same micro-batches, so that every layout follows the same gradients ---------------

ONE_FILE: dict[str, Any] = {"save_distributed_checkpoint": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two": {"expert_parallel_size": 2},
    "four": {"expert_parallel_size": 4},
    "replicas": {"expert_parallel_size": 2, "data_parallel_replicate_size": 2},
    "none": {},
}


class AdamMixture(SpreadModule):
    """Trained by AdamW; started elsewhere if it will be loaded."""

    def __init__(self, is_loaded: bool = False) -> None:
        super().__init__(MixtureDecoder())
        if is_loaded:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


@pytest.fixture(scope="module")
def expected(pool4: RankPool) -> dict[str, Tensor]:
    """Weights after two epochs without a stop, without expert parallelism."""
    return pool4.run(uninterrupted, {}, AdamMixture)[0]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("saving", "resuming", "form"),
    [
        pytest.param("two", "four", {}, marks=pytest.mark.sweep),  # experts in shards
        ("four", "none", {}),
        ("none", "replicas", {}),
        ("replicas", "four", ONE_FILE),
    ],
)
def test_another_layout(
    pool4: RankPool,
    tmp_path: Path,
    expected: dict[str, Tensor],
    saving: str,
    resuming: str,
    form: dict[str, Any],
) -> None:
    """Consolidated, it is one file with whole experts."""
    path = tmp_path / "saved.ckpt"
    saved = pool4.run(save, {**LAYOUTS[saving], **form}, str(path), AdamMixture)[0]
    for weights in pool4.run(resume, {**LAYOUTS[resuming], **form}, str(path), AdamMixture, (True,)):
        assert weight_error(weights, expected) <= TOLERANCE
        assert weight_error(weights, saved) > 1e-6, "nothing was trained"
    if path.is_dir():
        assert main(["consolidate", str(path), str(tmp_path / "whole.ckpt")]) == 0
        found = torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"]
        assert {name.removeprefix("model.") for name in found} == saved.keys()
        assert all(found[f"model.{name}"].equal(weight) for name, weight in saved.items())


# --- Tokens are computed where their experts are: results and gradients -----------------------------------------------

ROUNDING = {"rtol": 0.0, "atol": 1e-13}
"""Sums of the same few dozen numbers in another order, in float64."""
ROUTINGS = {
    "spread": list(range(NUM_EXPERTS)),
    "two experts": [1, 2],  # which one rank holds of four: the others compute nothing
}


def routed(num_tokens: list[int], routing: str) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Tokens, the experts of each and their weights by rank, and the experts' [E, d, d] weights."""
    generator = torch.Generator().manual_seed(3)
    allowed = torch.tensor(ROUTINGS[routing])
    tokens = []
    chosen = []
    weights = []
    for number in num_tokens:
        tokens.append(torch.randn(number, WIDTH, generator=generator, dtype=torch.float64))
        scores = torch.rand(number, len(allowed), generator=generator)
        chosen.append(allowed[scores.topk(CHOSEN).indices])
        weights.append(torch.rand(number, CHOSEN, generator=generator, dtype=torch.float64))
    matrices = torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return tokens, chosen, weights, matrices


def objective(output: Tensor, rank: int) -> Tensor:
    """[] a number that depends on each element of a rank's output in a way of its own."""
    factors = (
        torch.arange(output.numel(), dtype=output.dtype, device=output.device).view_as(output) - 7.5 * rank
    )
    return (output * factors).sum()


def of_one_process(num_tokens: list[int], routing: str) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """Output and gradients of tokens and weights by rank, and the gradient of the experts."""
    tokens, chosen, weights, matrices = routed(num_tokens, routing)
    leaves = [*tokens, *weights, matrices]
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = []
    for own_tokens, own_chosen, own_weights in zip(tokens, chosen, weights, strict=True):
        by_choice = torch.einsum("nkde,ne->nkd", matrices[own_chosen], own_tokens).tanh()
        outputs.append((by_choice * own_weights.unsqueeze(-1)).sum(1))
    torch.stack([objective(output, rank) for rank, output in enumerate(outputs)]).sum().backward()
    of_ranks = [
        (output.detach(), own_tokens.grad, own_weights.grad)
        for output, own_tokens, own_weights in zip(outputs, tokens, weights, strict=True)
    ]
    return of_ranks, matrices.grad


def dispatched(num_tokens: list[int], routing: str, size: int) -> tuple[Tensor, ...]:
    """The same on this rank, whose experts see the tokens of the ``size`` ranks of its group; and the rows computed."""
    shape = (dist.get_world_size() // size, size)
    both = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "expert_parallel"))
    rank = dist.get_rank()
    mesh = both["expert_parallel"]
    all_tokens, all_chosen, all_weights, matrices = routed(num_tokens, routing)
    tokens = all_tokens[rank]
    chosen = all_chosen[rank]
    weights = all_weights[rank]
    own = matrices.chunk(size)[mesh.get_local_rank()].clone()
    for leaf in (tokens, weights, own):
        leaf.requires_grad_()

    computed_rows: list[int] = []

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        computed_rows.append(len(rows))
        parts = [(part @ matrix.T).tanh() for part, matrix in zip(rows.split(counts), own, strict=True)]
        return torch.cat(parts)

    output = dispatch_tokens(tokens, chosen, weights, NUM_EXPERTS, compute, mesh)
    objective(output, rank).backward()
    dist.all_reduce(own.grad, group=both["copies"].get_group())
    return output.detach(), tokens.grad, weights.grad, own.grad, torch.tensor(computed_rows)


def test_what_one_rank_computes() -> None:
    """Without a mesh this rank holds all experts; one that does not exist, and a result of another length, raise."""
    [tokens], [chosen], [weights], matrices = routed([6], "spread")

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat(
            [(part @ own.T).tanh() for part, own in zip(rows.split(counts), matrices, strict=True)]
        )

    [(expected, *_)], _ = of_one_process([6], "spread")
    found = dispatch_tokens(tokens, chosen, weights, NUM_EXPERTS, compute, None)
    torch.testing.assert_close(found, expected, **ROUNDING)
    with pytest.raises(RuntimeError, match="out of bounds"):
        dispatch_tokens(tokens, chosen + NUM_EXPERTS, weights, NUM_EXPERTS, compute, None)
    with pytest.raises(ValueError, match="compute got 12 rows and returned 11; return one row for each"):
        dispatch_tokens(tokens, chosen, weights, NUM_EXPERTS, lambda rows, _: rows[1:], None)


@pytest.mark.every_case
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize(
    ("num_tokens", "routing"),
    [([5, 0, 3, 1], "spread"), ([4, 4, 0, 7], "two experts"), ([0, 0, 0, 0], "spread")],
    ids=["ragged", "two experts", "no tokens"],
)
def test_any_number_of_tokens(pool4: RankPool, num_tokens: list[int], routing: str, size: int) -> None:
    """A rank may have no tokens, and its experts may get none; it takes part in the backward all the same."""
    expected, of_experts = of_one_process(num_tokens, routing)
    results = pool4.run(dispatched, num_tokens, routing, size)
    for rank, (*of_tokens, own_gradient, _) in enumerate(results):
        for actual, wanted in zip(of_tokens, expected[rank], strict=True):
            torch.testing.assert_close(actual, wanted, **ROUNDING)
        torch.testing.assert_close(own_gradient, of_experts.chunk(size)[rank % size], **ROUNDING)
    assert sum(int(computed_rows) for *_, computed_rows in results) == CHOSEN * sum(num_tokens)
