"""Every Trainer precision under both engines, against a loop that rounds alike and against one in float64.

Errors are relative to the largest weight of a tensor, in units of `eps`, the spacing of a dtype at 1. Mixed
precisions round activations and gradients in half precision exactly as the loop does, and sum in float32:
what is left between the two is float32 rounding, a few `eps` of float32. True precisions also round each
gradient and weight to half precision; there a last bit may fall to the other side: one `eps` of it. Against
float64, three steps cost up to 2 `eps` of the dtype that is computed in.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, TransformerEnginePrecision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, TinyDecoder, full_weights, relative_error, weight_error
from tests.trainer.precisions import (
    ACCUMULATE,
    DTYPES,
    WideLossModule,
    decoder,
    fit,
    loop,
    precision_options,
)
from tests.trainer.runs import CASE, STRATEGIES, by_default, first_by_default, loader, make_trainer
from tests.trainer.test_layouts import PartlyUsed

DDP = {"data_parallel": "ddp"}
PRECISIONS = list(DTYPES)
FOUR_RANKS = replace(CASE, num_ranks=4)
TWO_WINDOWS = replace(CASE, num_batches=2 * ACCUMULATE)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def tolerances(precision: str) -> tuple[float, float]:
    """How far weights may be from the loop in the same precision, and from the one in float64."""
    dtype = DTYPES[precision]
    if precision == "64-true":
        return 1e-12, 1e-12
    if precision in ("bf16-true", "16-true"):
        return eps(dtype), 2 * eps(dtype)
    return 16 * eps(torch.float32), 2 * eps(dtype) if dtype != torch.float32 else 16 * eps(dtype)


@cache
def in_double() -> dict[str, Tensor]:
    """The loop that everything is compared with."""
    return loop("64-true", "fsdp2")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", STRATEGIES.values(), ids=list(STRATEGIES))
def test_equals_one_process(pool2: RankPool, precision: str, options: dict[str, Any]) -> None:
    """Ragged data, windows of three and a short last one, micro-batches without labels: only roundings are left."""
    same, exact = tolerances(precision)
    own = loop(precision, options.get("data_parallel", "fsdp2"))
    for weights, _, loss in pool2.run(fit, precision, options):
        assert weight_error(weights, own) <= same
        assert weight_error(weights, in_double()) <= exact
        assert math.isfinite(loss)


BF16_REDUCTION = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32
)


def test_reduction_in_half_precision_is_farther_off(pool2: RankPool) -> None:
    """Reducing in bfloat16 is the user's to choose, and 100 times as far off as the default may be."""
    same, exact = tolerances("bf16-mixed")
    for weights, described, _ in pool2.run(fit, "bf16-mixed", {"mp_policy": BF16_REDUCTION}):
        assert described["precision"]["reduction"] == "torch.bfloat16"
        assert 100 * same < weight_error(weights, loop("bf16-mixed", "fsdp2")) <= exact


@pytest.mark.every_case
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_hsdp(pool4: RankPool, precision: str) -> None:
    """Gradients wait in float32 and are reduced in it, across replicas too, also where parameters are half."""
    options = {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"}
    own = loop(precision, "fsdp2", case=FOUR_RANKS)
    for weights, described, _ in pool4.run(fit, precision, options, WideLossModule, decoder, FOUR_RANKS):
        assert described["precision"]["reduction"] == "torch.float32"
        assert weight_error(weights, own) <= tolerances(precision)[0]


@pytest.mark.parametrize("policy", first_by_default([frozenset({nn.Linear, nn.LayerNorm}), {TinyDecoder}]))
def test_any_units(pool2: RankPool, policy: set[type[nn.Module]]) -> None:
    """A unit right below the LightningModule answers in float32 too, and small ones pass on what they get."""
    for weights, _, _ in pool2.run(fit, "bf16-mixed", {"auto_wrap_policy": policy}):
        assert weight_error(weights, loop("bf16-mixed", "fsdp2")) <= tolerances("bf16-mixed")[0]


def used_late() -> nn.Module:
    """A layer of a block, and parameters of the root, are used by the last micro-batch of each of two windows alone."""
    return PartlyUsed(set(range(6)), {2, 5}, {2, 5}).float()


@pytest.mark.every_case
@pytest.mark.parametrize("precision", first_by_default(["bf16-mixed", "bf16-true", "16-mixed"]))
@pytest.mark.parametrize("options", by_default(STRATEGIES, "kept", "undeferred")[:3])
def test_unused_beside_used(pool2: RankPool, precision: str, options: dict[str, Any]) -> None:
    """In a unit whose other parameters have a float32 gradient already: FSDP2 alone refuses two dtypes."""
    own = loop(precision, "fsdp2", used_late(), TWO_WINDOWS, kept=("gain",))
    for weights, _, _ in pool2.run(fit, precision, options, WideLossModule, used_late, TWO_WINDOWS):
        assert weight_error(weights, own) <= tolerances(precision)[0]


class WithEncoder(nn.Module):
    """A head on an encoder: both of them compute in the same dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(input_ids))


class TwoNames(WideLossModule):
    """Holds the encoder by a name of its own as well, and calls it by that in validation.

    Under manual optimization, where the children of the module are FSDP roots of their own, it has one name.
    """

    def __init__(self, is_manual: bool) -> None:
        super().__init__(WithEncoder())
        self.automatic_optimization = not is_manual
        if not is_manual:
            self.encoder = self.model.encoder
        self.seen: set[torch.dtype] = set()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.seen.add(self.model(batch["input_ids"]).dtype)
        loss = self(batch)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        called = self.encoder if self.automatic_optimization else self.model
        self.seen.add(called(batch["input_ids"]).dtype)


def _fit_two_names(precision: str, is_manual: bool) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    module = TwoNames(is_manual)
    trainer = make_trainer(AutomodelStrategy(), limit_val_batches=1, **precision_options(precision))
    trainer.fit(module, loader(), loader())
    return full_weights(module), module.seen


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("precision", "is_manual"),
    first_by_default(
        [("bf16-mixed", False), ("bf16-mixed", True), ("16-mixed", False), ("16-mixed", True)], 2
    ),
)
def test_what_roots_return(
    pool2: RankPool, precision: str, is_manual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 to the LightningModule, also of a module that it holds twice, and what it computes in to others."""
    monkeypatch.setattr("tests.trainer.precisions.ACCUMULATE", 1)
    own = loop(precision, "fsdp2", WithEncoder())
    for weights, seen in pool2.run(_fit_two_names, precision, is_manual):
        assert seen == {torch.float32}
        assert weight_error(weights, own) <= tolerances(precision)[0]


class Normalised(nn.Module):
    """A decoder with running statistics, a scalar that FSDP2 cannot shard, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = TinyDecoder(CASE.seed)
        self.norm = nn.BatchNorm1d(11, momentum=0.0)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.linspace(0, 1, 11))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.norm.eval()  # statistics of a batch would depend on who holds it
        logits = self.decoder(input_ids)
        return self.norm(logits.flatten(0, 1)).view_as(logits) * self.scale + self.shift


def _fit_normalised(precision: str) -> tuple[dict[str, Tensor], dict[str, Any], set[torch.dtype]]:
    module = WideLossModule(Normalised())
    strategy = AutomodelStrategy()
    grads: set[torch.dtype] = set()
    module.on_before_optimizer_step = lambda optimizer: grads.update(
        p.grad.dtype for p in (module.model.norm.weight, module.model.scale)
    )
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, **precision_options(precision)).fit(
        module, loader()
    )
    weights = full_weights(module)
    return weights, strategy.describe()["replicated"], grads | {module.model.shift.dtype}


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_what_no_unit_casts(pool2: RankPool, precision: str) -> None:
    """Batch normalisation, scalars and buffers stay in float32, with float32 gradients that ranks average."""
    own = loop(precision, "fsdp2", Normalised(), kept=("norm.weight", "norm.bias", "scale"))
    for weights, replicated, dtypes in pool2.run(_fit_normalised, precision):
        assert dtypes == {torch.float32}
        assert replicated == ["model.scale", "model.norm.weight", "model.norm.bias"]
        assert weight_error(weights, own) <= tolerances(precision)[0]
    assert relative_error(torch.tensor(0.7), own["model.scale"]) > 1


# --- What can be chosen, what is refused, what is said: the same on every rank

BF16 = torch.bfloat16
FP16 = torch.float16
PLUGINS = {"fsdp": FSDPPrecision, "engine": TransformerEnginePrecision}


def policy(dtype: torch.dtype | None) -> dict[str, Any]:
    wide = torch.float32
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=wide)}


class CountsMask(WideLossModule):
    """Counts a mask of 1001 ones that came in float32 with the batch, by a product, which autocast would round."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self(batch), "num_label_tokens": batch["mask"] @ batch["mask"]}


class ShardsItself(WideLossModule):
    """Sharded by `configure_model`, without a policy, as `ModelParallelStrategy` wants it."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def _said(
    make_module: type[WideLossModule], options: dict[str, Any], precisions: list[str]
) -> tuple[list[str], str, dict[str, str], int, dict[str, Tensor]]:
    """What is said of precisions in fits of one module, the error that ends them, and what the last one left.

    Plugins whose libraries are absent are made without their constructors.
    """
    module = make_module(decoder())
    data = DataLoader([{**batch, "mask": torch.ones(1001)} for batch in loader()], batch_size=None)
    error = ""
    for precision in precisions:
        strategy = AutomodelStrategy(**options)
        settings = {} if precision in PLUGINS else precision_options(precision)
        trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, **settings)
        if precision in PLUGINS:
            strategy.precision_plugin = object.__new__(PLUGINS[precision])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                trainer.fit(module, data)
            except ValueError as raised:
                error = str(raised)
                break
    ours = ("updates parameters in", "mp_policy", "precision=")
    said = [text for text in (str(each.message) for each in told) if any(part in text for part in ours)]
    count = 0 if strategy.last_step is None else int(strategy.last_step.num_label_tokens)
    return said, error, strategy.describe().get("precision", {}), count, full_weights(module)


ANY = "choose Trainer(precision=...) from 32-true"
OF_BEFORE = "mp_policy=None beside precision='32-true' has no effect on a model that was sharded before"
SAID = [
    # What is trained, with which options and in which precisions; what is said, and what is refused, with the valid
    # ones.
    (WideLossModule, policy(BF16), ["64-true"], "", "bfloat16: pass param_dtype=torch.float64 or None"),
    (WideLossModule, {}, ["engine"], "", f"does not work with TransformerEnginePrecision: {ANY}"),
    (WideLossModule, {}, ["32-true", "bf16-true"], "", "would convert the module to torch.bfloat16, but"),
    (WideLossModule, {}, ["bf16-mixed", "32-true"], OF_BEFORE, ""),
    (ShardsItself, policy(BF16), ["bf16-mixed"], "mp_policy=MixedPrecisionPolicy(", ""),
    (WideLossModule, {**policy(BF16), **DDP}, ["bf16-mixed"], "mp_policy has no effect with", ""),
    (WideLossModule, policy(FP16), ["32-true"], "", "needs the gradient scaler of '16-mixed'"),
    (WideLossModule, DDP, ["fsdp"], "", f"'ddp' does not work with FSDPPrecision: {ANY}"),
    (WideLossModule, {}, ["bf16-mixed", "bf16-mixed"], "", ""),
    (WideLossModule, policy(FP16), ["16-mixed"], "", ""),
    (WideLossModule, policy(None), ["bf16-true"], "", ""),
]


@pytest.mark.parametrize(
    ("make_module", "options", "precisions", "said", "error"), first_by_default(SAID, 5)
)
@pytest.mark.every_case
def test_said_once(
    pool2: RankPool,
    make_module: type[WideLossModule],
    options: dict[str, Any],
    precisions: list[str],
    said: str,
    error: str,
) -> None:
    """What is without effect, by rank 0; what cannot be brought about, or on shards of an earlier fit, is refused."""
    (told, raised, *_), (silent, raised_too, *_) = pool2.run(_said, make_module, options, precisions)
    assert raised == raised_too
    assert bool(raised) == bool(error)
    assert error in raised
    assert len(told) == bool(said)
    assert all(said in text for text in told)
    assert silent == []


def test_a_policy_does_not_round_counts(pool2: RankPool) -> None:
    """Nor does autocast, in a step whose units cast: 4 micro-batches of 1001 tokens are 4004, not 4000."""
    for *_, count, _ in pool2.run(_said, CountsMask, {}, ["bf16-mixed"]):
        assert count == 4004


def test_sharded_without_a_policy(pool2: RankPool) -> None:
    """Then autocast does what the precision says, in the units' place."""
    same = 16 * torch.finfo(torch.float32).eps
    for _, _, described, _, weights in pool2.run(_said, ShardsItself, {}, ["bf16-mixed"]):
        assert described["computation"] == "torch.bfloat16"
        assert weight_error(weights, loop("bf16-mixed", "ddp")) <= same
