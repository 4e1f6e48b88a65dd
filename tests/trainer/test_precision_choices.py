"""What can be chosen for precision, what is refused, what is said: the same on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, TransformerEnginePrecision
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, full_weights, weight_error
from tests.trainer.precisions import ACCUMULATE, WideLossModule, decoder, loop, precision_options
from tests.trainer.runs import first_by_default, loader, make_trainer

DDP = {"data_parallel": "ddp"}
BF16 = torch.bfloat16
FP16 = torch.float16
PLUGINS = {"fsdp": FSDPPrecision, "engine": TransformerEnginePrecision}


def _error(options: dict[str, Any], precision: str) -> str:
    """What a fit raises. Plugins whose libraries are absent are made without their constructors."""
    settings = {} if precision in PLUGINS else precision_options(precision)
    trainer = make_trainer(AutomodelStrategy(**options), **settings)
    if precision in PLUGINS:
        trainer.strategy.precision_plugin = object.__new__(PLUGINS[precision])
    try:
        trainer.fit(WideLossModule(decoder()), loader())
    except ValueError as error:
        return str(error)
    return "nothing"


def policy(dtype: torch.dtype | None) -> dict[str, Any]:
    wide = torch.float32
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=wide)}


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    first_by_default(
        [
            ("64-true", policy(BF16), "bfloat16: pass param_dtype=torch.float64 or None"),
            ("32-true", policy(FP16), "needs the gradient scaler of '16-mixed'"),
            (
                "engine",
                {},
                "does not work with TransformerEnginePrecision: choose Trainer(precision=...) from",
            ),
            (
                "fsdp",
                DDP,
                "'ddp' does not work with FSDPPrecision: choose Trainer(precision=...) from 32-true",
            ),
            ("16-mixed", policy(FP16), "nothing"),
            ("bf16-true", policy(None), "nothing"),
        ],
        2,
    ),
)
@pytest.mark.every_case
def test_refused(pool2: RankPool, precision: str, options: dict[str, Any], message: str) -> None:
    """Whatever could not be brought about, with the valid ones; next to it what can."""
    assert all(message in found for found in pool2.run(_error, options, precision))


class CountsMask(WideLossModule):
    """Counts a mask of 1001 ones that came in float32 with the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self(batch), "num_label_tokens": batch["mask"].sum()}


class ShardsItself(WideLossModule):
    """Sharded by `configure_model`, without a policy, as `ModelParallelStrategy` wants it."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def _said(
    make_module: type[WideLossModule], options: dict[str, Any], precisions: list[str]
) -> tuple[list[str], str, dict[str, str], int, dict[str, Tensor]]:
    """What is said of precisions in fits of one module, the error that ends them, and what the last one left."""
    module = make_module(decoder())
    data = DataLoader([{**batch, "mask": torch.ones(1001)} for batch in loader()], batch_size=None)
    error = ""
    for precision in precisions:
        strategy = AutomodelStrategy(**options)
        trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, **precision_options(precision))
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


OF_BEFORE = "has no effect on a model that was sharded before, with another policy."


@pytest.mark.parametrize(
    ("make_module", "options", "precisions", "said", "error"),
    first_by_default(
        [
            (
                WideLossModule,
                {},
                ["32-true", "bf16-true"],
                "",
                "would convert the module to torch.bfloat16, but",
            ),
            (
                WideLossModule,
                {},
                ["bf16-mixed", "32-true"],
                f"mp_policy=None beside precision='32-true' {OF_BEFORE}",
                "",
            ),
            (ShardsItself, policy(BF16), ["bf16-mixed"], "mp_policy=MixedPrecisionPolicy(", ""),
            (WideLossModule, {**policy(BF16), **DDP}, ["bf16-mixed"], "mp_policy has no effect with", ""),
            (WideLossModule, {}, ["bf16-mixed", "bf16-mixed"], "", ""),
        ],
        3,
    ),
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
    """What is without effect, by rank 0; what shards of an earlier fit cannot follow is refused."""
    (told, raised, *_), (silent, raised_too, *_) = pool2.run(_said, make_module, options, precisions)
    assert raised == raised_too
    assert bool(raised) == bool(error)
    assert error in raised
    assert len(told) == bool(said)
    assert all(said in text for text in told)
    assert silent == []


def test_a_policy_does_not_round_counts(pool2: RankPool) -> None:
    """The batch of a step stays as it was loaded: 4 micro-batches of 1001 tokens are 4004, not 4000."""
    for *_, count, _ in pool2.run(_said, CountsMask, {}, ["bf16-mixed"]):
        assert count == 4004


def test_sharded_without_a_policy(pool2: RankPool) -> None:
    """Then autocast does what the precision says, in the units' place."""
    same = 16 * torch.finfo(torch.float32).eps
    for _, _, described, _, weights in pool2.run(_said, ShardsItself, {}, ["bf16-mixed"]):
        assert described["computation"] == "torch.bfloat16"
        assert weight_error(weights, loop("bf16-mixed", "ddp")) <= same


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        ("bf16-mixed", {}, ["float32", "bfloat16", "float32"]),
        ("bf16-true", {}, ["bfloat16", "bfloat16", "float32"]),
        ("bf16-mixed", DDP, ["float32", "bfloat16", "float32"]),
        ("bf16-true", DDP, ["bfloat16", "bfloat16", "bfloat16"]),
    ],
)
def test_described(pool2: RankPool, precision: str, options: dict[str, Any], expected: list[str]) -> None:
    """The resolved dtypes, also after a second set-up of the same model."""
    parameters, computation, reduction = expected
    for _, _, described, _, _ in pool2.run(_said, WideLossModule, options, [precision, precision]):
        assert described == {
            "trainer": precision,
            "parameters": f"torch.{parameters}",
            "computation": f"torch.{computation}",
            "reduction": f"torch.{reduction}",
        }
