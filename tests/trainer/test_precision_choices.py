"""What can be chosen for precision, what is refused, what is said: the same on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    FSDPPrecision,
    TransformerEnginePrecision,
)
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, Outcome, full_weights, weight_error
from tests.trainer.precisions import ACCUMULATE, WideLossModule, decoder, loop, precision_options
from tests.trainer.runs import loader, make_trainer

SAME = 16 * torch.finfo(torch.float32).eps
NAMES = "32-true, 64-true, bf16-mixed, bf16-true, 16-mixed, 16-true"
DDP = {"data_parallel": "ddp"}
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
PLUGINS = {"fsdp": FSDPPrecision, "engine": TransformerEnginePrecision}
OTHER = (
    ", or a precision that computes in it (torch.float16 needs the gradient scaler of '16-mixed'; under"
    " '32-true' mp_policy alone decides)."
)


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
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32, output_dtype=FP32)}


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        (
            "engine",
            {},
            "data_parallel='fsdp2' does not work with TransformerEnginePrecision: choose"
            f" Trainer(precision=...) from {NAMES}, or data_parallel='ddp'.",
        ),
        (
            "fsdp",
            DDP,
            "data_parallel='ddp' does not work with FSDPPrecision: choose Trainer(precision=...) from"
            f" {NAMES}.",
        ),
        (
            "64-true",
            policy(BF16),
            "precision='64-true' beside mp_policy with param_dtype=torch.bfloat16: pass"
            f" param_dtype=torch.float64 or None{OTHER}",
        ),
        (
            "32-true",
            policy(FP16),
            "precision='32-true' beside mp_policy with param_dtype=torch.float16: pass"
            f" param_dtype=None or torch.bfloat16 or torch.float32 or torch.float64{OTHER}",
        ),
        ("16-mixed", policy(FP16), "nothing"),
        ("bf16-true", policy(None), "nothing"),
    ],
)
def test_refused(pool2: RankPool, precision: str, options: dict[str, Any], message: str) -> None:
    """Whatever could not be brought about, with the valid ones; next to it what can."""
    assert pool2.run(_error, options, precision) == [message] * 2


class CountsMask(WideLossModule):
    """Counts a mask of 1001 ones that came in float32 with the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self(batch), "num_label_tokens": batch["mask"].sum()}


class ShardsItself(WideLossModule):
    """Sharded by `configure_model`, without a policy, as `ModelParallelStrategy` wants it."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def _said(
    make_module: type[WideLossModule], options: dict[str, Any], precision: str
) -> tuple[list[str], dict[str, Any], int, dict[str, Tensor]]:
    """Warnings, the description, label tokens of the last step, weights; two fits of one module."""
    module = make_module(decoder())
    strategy = AutomodelStrategy(**options)
    data = [{**batch, "mask": torch.ones(1001)} for batch in loader()]
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, **precision_options(precision))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    messages = [str(warning.message) for warning in told]
    return (
        messages,
        strategy.describe()["precision"],
        int(strategy.last_step.num_label_tokens),
        full_weights(module),
    )


COUNT = "The number of label tokens is a torch.bfloat16 tensor, which rounds numbers above 256"
NO_EFFECT = "mp_policy has no effect on a model that was sharded before, with another policy."


@pytest.mark.parametrize(
    ("make_module", "options", "precision", "said"),
    [
        (CountsMask, {}, "bf16-true", [COUNT]),
        (ShardsItself, policy(BF16), "bf16-mixed", [NO_EFFECT]),
        (
            WideLossModule,
            {**policy(BF16), "data_parallel": "ddp"},
            "bf16-mixed",
            ["mp_policy has no effect with"],
        ),
    ],
)
def test_said_once(
    pool2: RankPool,
    make_module: type[WideLossModule],
    options: dict[str, Any],
    precision: str,
    said: list[str],
) -> None:
    """What rounds or is without effect is said by rank 0, and nothing else is."""
    ours = ("The number of label tokens", "updates parameters in", "mp_policy")
    results = pool2.run(_said, make_module, options, precision)
    told, silent = ([m for m in result[0] if any(part in m for part in ours)] for result in results)
    assert [message.startswith(start) for message, start in zip(told, said, strict=True)] == [True] * len(
        said
    )
    assert silent == []


def test_a_policy_does_not_round_counts(pool2: RankPool) -> None:
    """The batch of a step stays as it was loaded: 4 micro-batches of 1001 tokens are 4004, not 4000."""
    for _, _, num_label_tokens, _ in pool2.run(_said, CountsMask, {}, "bf16-mixed"):
        assert num_label_tokens == 4004


def test_sharded_without_a_policy(pool2: RankPool) -> None:
    """Then autocast does what the precision says, in the units' place."""
    for _, described, _, weights in pool2.run(_said, ShardsItself, {}, "bf16-mixed"):
        assert described["computation"] == "torch.bfloat16 (torch.autocast)"
        assert weight_error(Outcome(weights, None), loop("bf16-mixed", "ddp")) <= SAME


def _described(options: dict[str, Any], precision: str) -> tuple[dict[str, str], bool]:
    module = WideLossModule(decoder())
    strategy = AutomodelStrategy(**options)
    trainer = make_trainer(strategy, limit_train_batches=1, **precision_options(precision))
    before = strategy.describe()
    trainer.fit(module, loader())
    trainer.validate(module, loader(), verbose=False)
    return strategy.describe()["precision"], "precision" in before


@pytest.mark.parametrize(
    ("precision", "options", "parameters", "computation", "reduction", "output"),
    [
        ("bf16-mixed", {}, "float32", "bfloat16 (the units' policy)", "float32", "torch.float32"),
        ("bf16-true", {}, "bfloat16", "bfloat16 (the parameters' own)", "float32", "as computed"),
        ("bf16-mixed", DDP, "float32", "bfloat16 (torch.autocast)", "float32", "as computed"),
        (
            "bf16-true",
            {"data_parallel": "ddp"},
            "bfloat16",
            "bfloat16 (the parameters' own)",
            "bfloat16",
            "as computed",
        ),
    ],
)
def test_described(
    pool2: RankPool,
    precision: str,
    options: dict[str, Any],
    parameters: str,
    computation: str,
    reduction: str,
    output: str,
) -> None:
    """The resolved dtypes, also after a second set-up of the same model."""
    expected = {
        "trainer": precision,
        "parameters": f"torch.{parameters}",
        "computation": f"torch.{computation}",
        "reduction": f"torch.{reduction}",
        "output": output,
    }
    assert pool2.run(_described, options, precision) == [(expected, False)] * 2


def _fit_again(first: str, second: str) -> tuple[str, list[str]]:
    """The error of a second run in another precision, and what is said in it about precision."""
    module = WideLossModule(decoder())
    for precision in (first, second):
        trainer = make_trainer(AutomodelStrategy(), limit_train_batches=1, **precision_options(precision))
        error = ""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                trainer.fit(module, loader())
            except ValueError as raised:
                error = str(raised)
    return error, [str(warning.message) for warning in told if "precision=" in str(warning.message)]


UNITS_OF_BEFORE = "has no effect on a model that was sharded before, with another policy."


@pytest.mark.parametrize(
    ("first", "second", "error", "said"),
    [
        ("bf16-mixed", "32-true", "", [f"precision='32-true' {UNITS_OF_BEFORE}"]),
        ("bf16-mixed", "bf16-mixed", "", []),
        (
            "32-true",
            "bf16-true",
            "precision='bf16-true' would convert the module to torch.bfloat16, but an",
            [],
        ),
    ],
)
def test_another_precision_in_a_second_run(
    pool2: RankPool, first: str, second: str, error: str, said: list[str]
) -> None:
    """Shards keep the policy and the dtype of the first: that is said, or refused."""
    (raised, told), (raised_too, silent) = pool2.run(_fit_again, first, second)
    assert raised == raised_too
    assert raised.startswith(error)
    assert bool(raised) == bool(error)
    assert (told, silent) == (said, [])
