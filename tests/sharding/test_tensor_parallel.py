"""Tensor parallelism beside FSDP2: ranks that compute one micro-batch together, and plain parameters beside theirs.

Four ranks are two data-parallel ones of two tensor-parallel ones. Widths and the vocabulary are odd, so that
all shards are uneven. Every run has a short last window.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, Logits, fit_module
from tests.trainer.cases import Case
from tests.trainer.exactness import (
    PLAN,
    VOCABULARY,
    WIDTH,
    Batch,
    Outcome,
    micro_batches,
    weight_error,
)
from tests.trainer.hugging_face import SIZES, filled
from tests.trainer.plain import ModelModule, plain_weights, prefixed
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import decoder, first_by_default, make_trainer

TENSOR = 2
TWO: dict[str, Any] = {"tensor_parallel_size": TENSOR}
CLIP = 0.05
CASE = Case(seed=31, telling="labels", num_batches=5, num_ranks=2, gap="micro_batches")


class TensorParallelModule(ModelModule):
    """Applies a plan of the user's; norms and biases of none stay plain."""

    def configure_model(self) -> None:
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)


def own_batches() -> list[Batch]:
    return micro_batches(CASE)[dist.get_rank() // TENSOR]


class Poisoned(TensorParallelModule):
    """One rank of all gets a gradient that is no number, in a parameter that all ranks hold a part of."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if dist.get_rank() == 3:
            self.model.norm.bias.grad.fill_(float("nan"))


class ShardedWithoutPlan(ModelModule):
    """Left to itself, every tensor-parallel rank would compute all of each micro-batch."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel_shard"])


class LeavesActivationOut(ModelModule):
    """Its plan leaves out what computes on a part of the features, between the layers of its head."""

    plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # noqa: RUF012

    def __init__(self, model: nn.Module) -> None:
        model.head = nn.Sequential(nn.Linear(WIDTH, 8), nn.PReLU(), nn.Linear(8, VOCABULARY)).double()
        super().__init__(model)

    def configure_model(self) -> None:
        parallelize_module(self.model.head, self.device_mesh["tensor_parallel"], self.plan)


class Differentiates(TensorParallelModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        gradient = torch.autograd.grad(loss, self.model.norm.weight, create_graph=True)[0]
        return loss + gradient.square().sum()


class Penalised(TensorParallelModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.model.head.weight.square().sum()


class Tied(TensorParallelModule):
    """Its head has the weights of its embedding, until the plan is applied."""

    def __init__(self, model: nn.Module) -> None:
        model.head.weight = model.embedding.weight
        super().__init__(model)


def refused(make_module: type[ModelModule], *sentences: str, **options: Any) -> Refused:
    return Refused(lambda: make_module(decoder()), sentences, own_batches, TWO | options)


REFUSED = {
    # Also by the peers of another tensor-parallel rank, whose own parts are finite.
    "not finite": refused(Poisoned, "gradient norm of this window is nan", error_if_nonfinite=True),
    "takes no part": refused(
        ShardedWithoutPlan,
        "tensor_parallel_size=2, but no parameter of ShardedWithoutPlan is distributed",
        "self.device_mesh['tensor_parallel'], plan) in configure_model, before any fully_shard",
    ),
    "gets a part of its gradient": refused(
        LeavesActivationOut,
        "different gradients of model.head.1.weight: 1 parameters",
        "SequenceParallel(sequence_dim=<that of the features>, use_local_output=True)",
    ),
    "second derivatives": refused(Differentiates, "through a tensor-parallel layer", "leave the layer out"),
    "tied": refused(Tied, "set self.model.head.weight = self.model.embedding.weight again"),
    "penalty": refused(Penalised, "take p.full_tensor() of it", "got mixed torch.Tensor and DTensor"),
}


def test_refused(pool4: RankPool) -> None:
    check_refused(pool4, __name__)


class Drops(nn.Dropout):
    """Turns what it leaves, by a complex parameter, which peers hold alike, too."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex128))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward((hidden * self.turn).real)


def dropping_decoder() -> nn.Module:
    """A decoder that drops out half of what comes from its first block, which peers hold alike."""
    model = decoder()
    model.blocks.insert(1, Drops())
    return model


class Remembers(torch.utils.data.Dataset):
    """Unlabelled but for the sampler that Lightning gives it."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.drawn.append(index)
        return {"input_ids": torch.tensor([index, 1]), "labels": torch.tensor([1, 2])}


def fit_with_dropout_and_own_seeds() -> tuple[dict[str, Tensor], list[int]]:
    """Ranks that were seeded differently, on data that Lightning shares out."""
    torch.manual_seed(dist.get_rank())
    module = TensorParallelModule(dropping_decoder())
    strategy = AutomodelStrategy(**TWO)
    trainer = make_trainer(strategy, accumulate_grad_batches=2, use_distributed_sampler=True)
    data = Remembers()
    trainer.fit(module, DataLoader(data, batch_size=1))
    local = {
        name: p.full_tensor().detach().clone() for name, p in module.named_parameters() if "norm" in name
    }
    return local, data.drawn


def test_peers_see_the_same_data_and_random_numbers(pool4: RankPool) -> None:
    """What peers hold alike stays alike to the last bit, though nobody averages it; data ranks see different data."""
    outcomes = pool4.run(fit_with_dropout_and_own_seeds)
    for first in (0, 2):
        (weights, drawn), (others_weights, others_drawn) = outcomes[first : first + 2]
        assert drawn == others_drawn
        assert all(torch.equal(weight, others_weights[name]) for name, weight in weights.items())
    assert sorted(outcomes[0][1] + outcomes[2][1]) == list(range(8))


class CountsSamples(TensorParallelModule):
    """Sums by TorchMetrics: logged, computed by hand, and of a copy made in mid-run, as trackers make."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.logged = SumMetric()
        self.computed = SumMetric()
        self.held = {"val": {"sum": SumMetric()}}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)
        value = batch["labels"].double().sum()
        self.logged(value)
        self.computed.update(value)
        self.held["val"]["sum"].update(value)
        self.late.update(value)
        self.trainer.datamodule.sum.update(value)
        self.log("logged", self.logged)
        weight = next(p for p in self.parameters() if isinstance(p, DTensor))
        whole = weight.full_tensor()
        with torch.enable_grad():
            numbers = float(weight.norm()), weight.abs().max().item()
        assert numbers == pytest.approx((float(whole.norm()), float(whole.abs().max())))

    def on_validation_epoch_start(self) -> None:
        self.late = SumMetric()

    def on_validation_epoch_end(self) -> None:
        computed = (self.computed, copy.deepcopy(self.computed), self.held["val"]["sum"], self.late)
        self.found = tuple(float(metric.compute()) for metric in computed)


class HasSum(LightningDataModule):
    """Holds a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = SumMetric()

    def val_dataloader(self) -> DataLoader:
        return DataLoader(own_batches(), batch_size=None)


class CountsBeside(Callback):
    """Sums in a callback, by a metric of its own."""

    def __init__(self) -> None:
        self.sums = {"val": SumMetric()}

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.sums["val"].update(batch["labels"].double().sum())

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = float(self.sums["val"].compute()), float(trainer.datamodule.sum.compute())


def _sums() -> tuple[float, ...]:
    module = CountsSamples(decoder())
    beside = CountsBeside()
    trainer = make_trainer(AutomodelStrategy(**TWO), callbacks=[beside])
    data = HasSum()
    trainer.validate(module, datamodule=data, verbose=False)
    metrics = (module.logged, module.computed, module.held["val"]["sum"], module.late, beside.sums["val"])
    assert [metric.dist_sync_fn for metric in (*metrics, data.sum)] == [None] * 6
    return float(trainer.callback_metrics["logged"]), *module.found, *beside.found


def test_metrics_count_each_sample_once(pool4: RankPool) -> None:
    """TorchMetrics gather over the ranks that hold different data, and are as they were afterwards."""
    expected = sum(float(batch["labels"].sum()) for batches in micro_batches(CASE) for batch in batches)
    assert pool4.run(_sums) == [(expected,) * 7] * 4


class AsksAllRanks(Callback):
    """Decides together with all ranks, and logs a sharded tensor, as a module may."""

    def __init__(self) -> None:
        self.decisions: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        rank = dist.get_rank()
        for decision in (True, rank != 3, rank == 3, False):
            self.decisions += [
                trainer.strategy.reduce_boolean_decision(decision, all=all) for all in (True, False)
            ]
        mesh = trainer.strategy.device_mesh["tensor_parallel"]
        self.log("peers", DTensor.from_local(torch.ones(()), mesh, [Partial()]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.num_peers = float(trainer.callback_metrics["peers"])


def _ask_all_ranks() -> tuple[list[bool], float]:
    """What all decide, and what a callback has logged."""
    asks = AsksAllRanks()
    fit_module(
        TensorParallelModule(decoder()), TWO, CASE, callbacks=[asks], max_steps=1, accumulate_grad_batches=1
    )
    return asks.decisions, asks.num_peers


def test_decisions_are_those_of_all_ranks(pool4: RankPool) -> None:
    """Tensor-parallel peers among them: `ModelCheckpoint` keeps the best of several by such decisions."""
    for decisions, num_peers in pool4.run(_ask_all_ranks):
        assert num_peers == TENSOR  # of a sharded tensor that a callback logs, all of it
        assert decisions == [True, True, False, True, False, True, False, False]


ROUNDING = 1e-7
"""These models normalise and take softmaxes in float32, where a last digit in float64 can flip one of 6e-8."""
HF_CASE = Case(seed=32, telling="labels", num_batches=4, num_ranks=1)
SIZES: dict[str, Any] = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def make_model(kind: str) -> nn.Module:
    """A tiny model of random weights."""
    import transformers

    config = getattr(transformers, f"{kind.removesuffix('-tied')}Config")(
        **SIZES, tie_word_embeddings="tied" in kind, use_cache=False
    )
    return filled(Logits(transformers.AutoModelForCausalLM.from_config(config)))


def fit_hugging_face(kind: str) -> tuple[Outcome, list[str]]:
    """Full weights, and which of them tensor parallelism has cut."""
    module = ModelModule(make_model(kind))
    weights = fit_module(module, TWO, HF_CASE, gradient_clip_val=CLIP).weights
    named = module.named_parameters()
    return weights, [name for name, p in named if isinstance(p, DTensor) and p.device_mesh.ndim == 2]


@pytest.mark.parametrize("kind", first_by_default(["Qwen3-tied", "Llama", "Llama-tied", "Qwen3"]))
def test_trains_like_one_process(pool2: RankPool, kind: str) -> None:
    """Norms of whole rows stay plain; Qwen3's norms of single heads are whole with gradients to be added up."""
    pytest.importorskip("transformers")
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=CLIP)
    expected = prefixed(plain_weights(make_model(kind), ACCUMULATE, HF_CASE, clip=clip))
    without = prefixed(plain_weights(make_model(kind), 1, HF_CASE))
    for weights, cut in pool2.run(fit_hugging_face, kind):
        assert weight_error(weights, expected) <= ROUNDING
        assert weight_error(weights, without) > 1e-4
        for part in ("q_proj", "embed_tokens"):
            assert any(part in name for name in cut)
        assert ("lm_head.weight" in " ".join(cut)) == ("tied" not in kind)
        assert any("q_norm" in name for name in cut) == ("Qwen3" in kind)
