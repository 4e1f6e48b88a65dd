"""What can be chosen for precision, what is refused, what is said: the same on every rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, Outcome, full_weights, weight_error
from tests.trainer.precisions import ACCUMULATE, WideLossModule, decoder, loop, precision_options
from tests.trainer.runs import loader, make_trainer
from tests.trainer.test_selection import COMMON

SAME = 16 * torch.finfo(torch.float32).eps
NAMES = "32-true, 64-true, bf16-mixed, bf16-true, 16-mixed, 16-true"
DDP = {"data_parallel": "ddp"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLUGINS = {"fsdp": FSDPPrecision, "engine": TransformerEnginePrecision, "bits": BitsandbytesPrecision}


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
            "data_parallel='fsdp2' does not work with TransformerEnginePrecision: choose Trainer(precision=...) from"
            f" {NAMES}, or data_parallel='ddp'.",
        ),
        (
            "bits",
            {},
            "data_parallel='fsdp2' does not work with BitsandbytesPrecision: choose Trainer(precision=...) from"
            f" {NAMES}, or data_parallel='ddp'.",
        ),
        (
            "fsdp",
            DDP,
            f"data_parallel='ddp' does not work with FSDPPrecision: choose Trainer(precision=...) from {NAMES}.",
        ),
        (
            "64-true",
            policy(BF16),
            "precision='64-true' computes in torch.float64, but mp_policy says param_dtype=torch.bfloat16: pass"
            " param_dtype=torch.float64 or None, or precision='32-true', under which mp_policy alone decides.",
        ),
        (
            "bf16-mixed",
            policy(None),
            "precision='bf16-mixed' computes in torch.bfloat16, but mp_policy says param_dtype=None: pass"
            " param_dtype=torch.bfloat16, or precision='32-true', under which mp_policy alone decides.",
        ),
        (
            "32-true",
            policy(FP16),
            "mp_policy computes in torch.float16, whose small gradients vanish without a gradient scaler: pass"
            " Trainer(precision='16-mixed') beside it, or param_dtype=torch.bfloat16.",
        ),
        ("16-mixed", policy(FP16), "nothing"),
        ("bf16-true", policy(None), "nothing"),
    ],
)
def test_refused(pool2: RankPool, precision: str, options: dict[str, Any], message: str) -> None:
    """Whatever could not be brought about, with the valid ones; next to it what can."""
    assert pool2.run(_error, options, precision) == [message] * 2


class Loads(WideLossModule):
    """A module without arguments, with its own data."""

    def __init__(self) -> None:
        super().__init__(decoder())

    def train_dataloader(self) -> Any:
        return loader()


MIXED = """
  precision: bf16-mixed
  strategy:
    class_path: lightning_automodel.AutomodelStrategy
    init_args:
      mp_policy:
        param_dtype: torch.bfloat16
        reduce_dtype: torch.float32
        output_dtype: torch.float32
"""
AS_CLASS = """
  strategy:
    class_path: lightning_automodel.AutomodelStrategy
    init_args:
      mp_policy:
        class_path: torch.distributed.fsdp.MixedPrecisionPolicy
        init_args: {param_dtype: torch.bfloat16, reduce_dtype: torch.float32, output_dtype: torch.float32}
"""


def _fit_from_yaml(text: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = Path(folder) / f"{dist.get_rank()}.yaml"
    path.write_text(COMMON + text)
    cli = LightningCLI(Loads, args=["fit", "--config", str(path)], save_config_callback=None)
    return full_weights(cli.model), cli.trainer.strategy.describe()


@pytest.mark.parametrize("text", [MIXED, AS_CLASS], ids=["fields", "class"])
def test_policy_from_yaml(pool2: RankPool, tmp_path: Path, text: str) -> None:
    """Both ways of writing it, beside bf16-mixed and in its place."""
    for weights, described in pool2.run(_fit_from_yaml, text, str(tmp_path)):
        assert described["precision"]["computation"] == "torch.bfloat16 (the units' policy)"
        assert weight_error(Outcome(weights, None), loop("bf16-mixed", "fsdp2")) <= SAME


class CountsMask(WideLossModule):
    """Counts a mask of 1001 ones that came in float32 with the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self(batch), "num_label_tokens": batch["mask"].sum()}


class HalfModel(WideLossModule):
    """Was loaded in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.bfloat16())


class ShardsItself(WideLossModule):
    """Sharded by `configure_model`, without a policy, as `ModelParallelStrategy` wants it."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def _said(
    make_module: type[WideLossModule], options: dict[str, Any], precision: str
) -> tuple[list[str], dict[str, Any], int, dict[str, Tensor]]:
    """Warnings, the description, label tokens of the last step, weights; two fits of one module."""
    module, strategy = make_module(decoder()), AutomodelStrategy(**options)
    data = [{**batch, "mask": torch.ones(1001)} for batch in loader()]
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, **precision_options(precision))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    messages = [str(warning.message) for warning in told]
    return messages, strategy.describe()["precision"], int(strategy.last_step.num_label_tokens), full_weights(module)


COUNT = "The number of label tokens is a torch.bfloat16 tensor, which rounds what is above 256"
MASTER = "precision='bf16-mixed' updates parameters in the dtype that they have, and 13 trainable ones are"
NO_EFFECT = "mp_policy has no effect on a model that was sharded before, with another policy."


@pytest.mark.parametrize(
    ("make_module", "options", "precision", "said"),
    [
        (CountsMask, {}, "bf16-mixed", []),
        (CountsMask, {}, "bf16-true", [COUNT]),
        (HalfModel, {}, "bf16-mixed", [MASTER]),
        (HalfModel, {}, "bf16-true", []),
        (ShardsItself, policy(BF16), "bf16-mixed", [NO_EFFECT]),
        (WideLossModule, {**policy(BF16), "data_parallel": "ddp"}, "bf16-mixed", ["mp_policy has no effect with"]),
    ],
)
def test_said_once(
    pool2: RankPool, make_module: type[WideLossModule], options: dict[str, Any], precision: str, said: list[str]
) -> None:
    """What rounds or is without effect is said by rank 0, and nothing else is."""
    ours = ("The number of label tokens", "updates parameters in", "mp_policy")
    results = pool2.run(_said, make_module, options, precision)
    told, silent = ([m for m in result[0] if any(part in m for part in ours)] for result in results)
    assert [message.startswith(start) for message, start in zip(told, said, strict=True)] == [True] * len(said)
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
    module, strategy = WideLossModule(decoder()), AutomodelStrategy(**options)
    trainer = make_trainer(strategy, limit_train_batches=1, **precision_options(precision))
    before = strategy.describe()
    trainer.fit(module, loader())
    trainer.validate(module, loader(), verbose=False)
    return strategy.describe()["precision"], "precision" in before


@pytest.mark.parametrize(
    ("precision", "options", "parameters", "computation", "reduction", "output"),
    [
        ("64-true", {}, "float64", "float64 (the parameters' own)", "float64", "as computed"),
        ("bf16-mixed", {}, "float32", "bfloat16 (the units' policy)", "float32", "torch.float32"),
        ("16-mixed", {}, "float32", "float16 (the units' policy)", "float32", "torch.float32"),
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
