"""Every Trainer precision under both engines, against a loop that rounds alike and against one in float64.

Errors are relative to the largest weight of a tensor, in units of `eps`, the spacing of a dtype at 1. Mixed
precisions round activations and gradients in half precision exactly as the loop does, and sum in float32:
what is left between the two is float32 rounding, a few `eps` of float32. True precisions also round each
gradient and weight to half precision; there a last bit may fall to the other side: one `eps` of it. Against
float64, three steps cost up to 2 `eps` of the dtype that is computed in.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel import AutomodelStrategy
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.dtensor import GRAD
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
    wide_loss,
)
from tests.trainer.runs import CASE, STRATEGIES, by_default, first_by_default, loader, make_trainer

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


@pytest.mark.parametrize(
    "precision", first_by_default(["bf16-mixed", *(p for p in PRECISIONS if p != "bf16-mixed")])
)
def test_wrong_weighting_is_farther_off(pool2: RankPool, precision: str) -> None:
    """What the tolerances would have to catch is five times as far away as the widest of them."""
    for weights, _, _ in pool2.run(fit, precision, {"per_token_loss": False}):
        assert weight_error(weights, in_double()) > 5 * tolerances("bf16-true")[1]


BF16_REDUCTION = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32
)


def test_reduction_in_half_precision_is_farther_off(pool2: RankPool) -> None:
    """Reducing in bfloat16 is the user's to choose, and 100 times as far off as the default may be."""
    same, exact = tolerances("bf16-mixed")
    for weights, described, _ in pool2.run(fit, "bf16-mixed", {"mp_policy": BF16_REDUCTION}):
        assert described["precision"]["reduction"] == "torch.bfloat16"
        assert 100 * same < weight_error(weights, loop("bf16-mixed", "fsdp2")) <= exact


@pytest.mark.parametrize("defer", first_by_default(["all_reduce", True, False]))
def test_hsdp(pool4: RankPool, defer: Any) -> None:
    """Partial sums across replicas are kept in float32 too."""
    options = {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": defer}
    own = loop("bf16-mixed", "fsdp2", case=FOUR_RANKS)
    for weights, _, _ in pool4.run(fit, "bf16-mixed", options, WideLossModule, decoder, FOUR_RANKS):
        assert weight_error(weights, own) <= tolerances("bf16-mixed")[0]


@pytest.mark.parametrize("policy", first_by_default([{nn.Linear, nn.LayerNorm}, {TinyDecoder}]))
def test_any_units(pool2: RankPool, policy: set[type[nn.Module]]) -> None:
    """A unit right below the LightningModule answers in float32 too, and small ones pass on what they get."""
    for weights, _, _ in pool2.run(fit, "bf16-mixed", {"auto_wrap_policy": policy}):
        assert weight_error(weights, loop("bf16-mixed", "fsdp2")) <= tolerances("bf16-mixed")[0]


def _unreduced(precision: str) -> set[tuple[torch.dtype | None, bool]]:
    """Dtype of the gradients that wait in mid-window, and whether any is left in the dtype of the computation."""
    module = WideLossModule(decoder())
    seen = set()

    def look(batch: Batch, batch_idx: int) -> None:
        if batch_idx % ACCUMULATE == 1:
            params = [param for group in fsdp2.fsdp_param_groups(module) for param in group.fsdp_params]
            if fsdp2.ACCUMULATES_IN_LEAF:
                # `.grad` of a gathered copy is that of the shard; torch's own attribute has what waits.
                seen.update((GRAD.__get__(p.unsharded_param).dtype, True) for p in params)
            else:
                seen.update(
                    (p.unsharded_accumulated_grad.dtype, p.unsharded_param.grad is None) for p in params
                )

    module.on_train_batch_start = look
    settings = {"accumulate_grad_batches": ACCUMULATE, **precision_options(precision)}
    make_trainer(AutomodelStrategy(), **settings).fit(module, loader())
    return seen


@pytest.mark.parametrize(
    "precision", first_by_default(["bf16-mixed", "bf16-true", "16-mixed", "16-true"], 2)
)
def test_gradients_wait_in_float32(pool2: RankPool, precision: str) -> None:
    """Also where parameters are half: what several micro-batches add up to is rounded once, after the reduction."""
    assert pool2.run(_unreduced, precision) == [{(torch.float32, True)}] * 2


class Probe(WideLossModule):
    """Writes down the dtypes that its step meets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.seen: dict[str, str] = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen["autocast"] = str(torch.is_autocast_enabled("cpu"))
        self.seen["weight"] = str(self.model.head.weight.dtype)
        logits = self.model(batch["input_ids"])
        self.seen["logits"] = str(logits.dtype)
        return wide_loss(logits, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen["validation"] = (
            f"{torch.is_autocast_enabled('cpu')} {self.model(batch['input_ids']).dtype}"
        )


def _probe(precision: str, options: dict[str, Any]) -> tuple[dict[str, str], set[torch.dtype], bool]:
    module = Probe(decoder())
    settings = precision_options(precision)
    trainer = make_trainer(
        AutomodelStrategy(**options), limit_train_batches=1, limit_val_batches=1, **settings
    )
    trainer.fit(module, loader(), loader())
    plugin = trainer.precision_plugin
    patched = any(name in vars(plugin) for name in ("forward_context", "clip_gradients"))
    return module.seen, {parameter.dtype for parameter in module.parameters()}, patched


@pytest.mark.parametrize(
    ("precision", "options", "weight", "logits", "master", "autocast"),
    [
        ("bf16-mixed", {}, "torch.bfloat16", "torch.float32", torch.float32, "False"),
        ("16-mixed", {}, "torch.float16", "torch.float32", torch.float32, "False"),
        ("bf16-true", {}, "torch.bfloat16", "torch.bfloat16", torch.bfloat16, "False"),
        ("bf16-mixed", DDP, "torch.float32", "torch.bfloat16", torch.float32, "True"),
        (
            "32-true",
            {"mp_policy": BF16_REDUCTION},
            "torch.bfloat16",
            "torch.float32",
            torch.float32,
            "False",
        ),
    ],
)
def test_who_casts(
    pool2: RankPool,
    precision: str,
    options: dict[str, Any],
    weight: str,
    logits: str,
    master: torch.dtype,
    autocast: str,
) -> None:
    """Units cast under FSDP2 and autocast does not run; under DDP it does; the plugin comes back as it was."""
    for seen, masters, patched in pool2.run(_probe, precision, options):
        assert (seen["weight"], seen["logits"], seen["autocast"]) == (weight, logits, autocast)
        assert seen["validation"] == f"{autocast} {logits}"
        assert masters == {master}
        assert not patched


class Manual(WideLossModule):
    """Steps by hand, once for each micro-batch: its children are FSDP roots of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False
        self.seen: set[torch.dtype] = set()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen.add(self.model(batch["input_ids"]).dtype)
        optimizer = self.optimizers()
        self.manual_backward(self(batch))
        optimizer.step()
        optimizer.zero_grad()


def _manual(precision: str) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    module = Manual(decoder())
    make_trainer(AutomodelStrategy(), **precision_options(precision)).fit(module, loader())
    return full_weights(module), module.seen


@pytest.mark.parametrize("precision", first_by_default(["bf16-mixed", "16-mixed"]))
def test_manual_optimization(pool2: RankPool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots below the LightningModule give float32 back as well."""
    monkeypatch.setattr("tests.trainer.precisions.ACCUMULATE", 1)
    own = loop(precision, "fsdp2")
    for weights, seen in pool2.run(_manual, precision):
        assert seen == {torch.float32}
        assert weight_error(weights, own) <= tolerances(precision)[0]


class UsedLate(nn.Module):
    """A decoder with one more parameter in a block, which only the last micro-batch of a window uses."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = TinyDecoder(CASE.seed)
        self.late = nn.ModuleList([LateBlock()])
        self.step = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.late[0](self.decoder(input_ids), self.step % ACCUMULATE == ACCUMULATE - 1)


class LateBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.full((11,), 0.9))
        self.late = nn.Parameter(torch.full((11,), 0.3))

    def forward(self, logits: Tensor, use_late: bool) -> Tensor:
        return logits * self.always + (logits.tanh() * self.late if use_late else 0.0)


class NeverUsed(UsedLate):
    """No micro-batch uses the parameter."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.late[0](self.decoder(input_ids), False)


@pytest.mark.every_case
@pytest.mark.parametrize("precision", first_by_default(["bf16-mixed", "bf16-true", "16-mixed"]))
@pytest.mark.parametrize("options", by_default(STRATEGIES, "kept", "undeferred")[:3])
@pytest.mark.parametrize("make_model", [UsedLate, NeverUsed])
def test_unused_beside_used(
    pool2: RankPool, precision: str, options: dict[str, Any], make_model: type[nn.Module]
) -> None:
    """In a unit whose other parameters have a float32 gradient already: FSDP2 alone refuses two dtypes."""
    own = loop(precision, "fsdp2", make_model(), TWO_WINDOWS)
    for weights, _, _ in pool2.run(fit, precision, options, WideLossModule, make_model, TWO_WINDOWS):
        assert weight_error(weights, own) <= tolerances(precision)[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.linear(self.embedding(input_ids))


class WithEncoder(nn.Module):
    """A head on an encoder: both of them compute in the same dtype."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = encoder or Encoder()
        self.head = nn.Linear(8, 11)
        self.step = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(input_ids))


class TwoNames(WideLossModule):
    """Holds the encoder by a name of its own as well, and calls it by that in validation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.encoder = model.encoder
        self.seen: set[torch.dtype] = set()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen.add(self.encoder(batch["input_ids"]).dtype)


def _fit_two_names(precision: str) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    module = TwoNames(WithEncoder())
    settings = {
        "accumulate_grad_batches": ACCUMULATE,
        "limit_val_batches": 1,
        **precision_options(precision),
    }
    make_trainer(AutomodelStrategy(), **settings).fit(module, loader(), loader())
    return full_weights(module), module.seen


@pytest.mark.parametrize("precision", first_by_default(["bf16-mixed", "16-mixed"]))
def test_module_under_two_names(pool2: RankPool, precision: str) -> None:
    """It gives float32 to the LightningModule, and what it computes in to the module around it."""
    own = loop(precision, "fsdp2", WithEncoder())
    for weights, seen in pool2.run(_fit_two_names, precision):
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
