"""Every public error and warning that a Trainer can bring about says what is wrong, the value, and what to do."""

from __future__ import annotations

import copy
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, TinyDecoder, full_weights, micro_batches
from tests.trainer.plain import ModelModule
from tests.trainer.runs import CASE, first_by_default, loader, make_trainer, mean_loss

DDP = {"data_parallel": "ddp"}


def decoder() -> nn.Module:
    return TinyDecoder(CASE.seed).double()


class CountsNothing(ModelModule):
    """Its batches hide their labels from the strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = (
            batch if isinstance(batch, (list, tuple)) else (batch["input_ids"], batch["targets"])
        )
        return mean_loss(self.model, {"input_ids": inputs, "labels": targets})


class ReturnsAuxLoss(ModelModule):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = self(batch)
        return {"loss": loss, "aux_loss": 0.1 * loss}


class Returns(ModelModule):
    """Tells a given count."""

    count: Any = None

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self(batch), "num_label_tokens": self.count}


class ShardsItself(ModelModule):
    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class HalfPrecisionLoss(ModelModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch).bfloat16()


class BackwardOfAVector(ModelModule):
    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        losses = self(batch).expand(3)
        self.manual_backward(losses, gradient=torch.ones_like(losses))


def _vector_error(options: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="must be one number") as raised:
        make_trainer(AutomodelStrategy(**options)).fit(BackwardOfAVector(decoder()), loader())
    return str(raised.value)


@pytest.mark.parametrize("options", [{}, DDP])
def test_a_loss_of_several_numbers(pool2: RankPool, options: dict[str, Any]) -> None:
    for message in pool2.run(_vector_error, options):
        assert message.startswith("The loss of a backward has the shape [3], but must be one number: pass")


def hidden_labels(kind: str) -> DataLoader:
    batches = micro_batches(CASE)[dist.get_rank()]
    if kind == "tuple":
        return DataLoader([(b["input_ids"], b["labels"]) for b in batches], batch_size=None)
    return DataLoader(
        [{"input_ids": b["input_ids"], "targets": b["labels"]} for b in batches], batch_size=None
    )


def _no_count_found(options: dict[str, Any], kind: str, accumulate: int) -> tuple[str, bool, int]:
    module = CountsNothing(decoder())
    with pytest.raises(ValueError, match="label tokens") as raised:
        make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=accumulate).fit(
            module, hidden_labels(kind)
        )
    before = full_weights(decoder())
    after = full_weights(module.model)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return str(raised.value), unchanged, len(traceback.extract_tb(raised.value.__traceback__))


@pytest.mark.parametrize("options", first_by_default([{}, DDP]), ids=["fsdp2", "ddp"])
@pytest.mark.parametrize(
    ("kind", "accumulate", "found"),
    [("tuple", 1, "a list"), ("dict", 3, "a dict with the keys ['input_ids', 'targets']")],
)
def test_no_count_found(
    pool2: RankPool, kind: str, accumulate: int, found: str, options: dict[str, Any]
) -> None:
    """At the first step, on every rank, before any weight has changed: what was found, three ways, and the way out."""
    for message, unchanged, num_frames in pool2.run(_no_count_found, options, kind, accumulate):
        assert unchanged
        assert num_frames <= 6  # of the script, and of `fit` down to the launcher
        assert f"found no count (the batch is {found})" in message
        assert "return {'loss': loss, 'num_label_tokens': n} from training_step" in message
        assert "self.manual_backward(loss, num_label_tokens=n)" in message
        assert "pass count_label_tokens=<function of the batch>" in message
        assert "put labels under batch['labels'] with -100" in message
        assert "pass per_token_loss=False" in message


def _error(
    make_module: type[ModelModule],
    options: dict[str, Any],
    trainer_options: dict[str, Any],
    count: Any = None,
) -> tuple[str, str]:
    """Kind and text of what a fit raises."""
    module = make_module(decoder())
    module.count = count
    try:
        make_trainer(AutomodelStrategy(**options), **trainer_options).fit(module, loader())
    except (ValueError, TypeError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("make_module", "options", "trainer_options", "kind", "parts"),
    [
        pytest.param(
            ReturnsAuxLoss,
            {},
            {},
            "ValueError",
            [
                "returned 'aux_loss'",
                "not known at its first backward",
                "Pass count_window_ahead=True, or per_token_loss=False",
            ],
            id="aux_loss",
        ),
        pytest.param(
            ShardsItself,
            DDP,
            {},
            "ValueError",
            ["ShardsItself is already sharded by FSDP2", "data_parallel='fsdp2'"],
            id="sharded-ddp",
        ),
    ],
)
def test_error(
    pool2: RankPool,
    make_module: type[ModelModule],
    options: dict[str, Any],
    trainer_options: dict[str, Any],
    kind: str,
    parts: list[str],
) -> None:
    """Raised on every rank."""
    for found, message in pool2.run(_error, make_module, options, trainer_options):
        assert found == kind, message
        assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("count", "kind", "parts"),
    [
        (-3, "ValueError", ["num_label_tokens that training_step returned", "not", "negative", "-3"]),
        (torch.ones(2), "TypeError", ["tensor of one element", "shape (2,)"]),
    ],
)
def test_error_of_a_count(pool2: RankPool, count: Any, kind: str, parts: list[str]) -> None:
    """A count that is none names where it came from and what it is."""
    for found, message in pool2.run(_error, Returns, {}, {}, count):
        assert found == kind, message
        assert all(part in message for part in parts), message


def test_error_of_a_mesh_that_is_not_there_yet() -> None:
    """The mesh needs processes that have joined."""
    with pytest.raises(RuntimeError) as raised:
        _ = AutomodelStrategy().device_mesh
    assert "AutomodelStrategy.device_mesh exists once the processes have joined" in str(raised.value)
    assert "from configure_model() on" in str(raised.value)


class CountsStepsInSetup(ModelModule):
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.steps = self.trainer.estimated_stepping_batches


def _error_of_steps_in_setup(validates: bool) -> str:
    trainer = make_trainer(AutomodelStrategy())
    module = CountsStepsInSetup(decoder())
    module.validation_step = lambda batch, index: None
    if validates:
        trainer.validate(module, loader())
    with pytest.raises(RuntimeError, match="estimated_stepping_batches") as raised:
        trainer.fit(module, loader())
    return str(raised.value)


@pytest.mark.parametrize("validates", [False, True])
def test_error_of_steps_in_setup(pool2: RankPool, validates: bool) -> None:
    """Loaders need the run, and that of a validation before the fit is not taken for it."""
    for message in pool2.run(_error_of_steps_in_setup, validates):
        assert "take it in configure_optimizers or on_fit_start" in message


def _error_of_storage_options(folder: str) -> str:
    trainer = make_trainer(AutomodelStrategy())
    trainer.fit(ModelModule(decoder()), loader())
    with pytest.raises(TypeError, match="storage_options") as raised:
        trainer.save_checkpoint(Path(folder) / "some.ckpt", storage_options={"some": "option"})
    return str(raised.value)


def test_error_of_storage_options(pool2: RankPool, tmp_path: Path) -> None:
    """They would go to a CheckpointIO of the user's, and there is none; says where file systems are configured."""
    for message in pool2.run(_error_of_storage_options, str(tmp_path)):
        assert "would have no effect" in message
        assert "fsspec" in message
        assert "{'some': 'option'}" in message


WRONG_CLIPPING = {
    "must be a positive number, got 0.0": (0.0, "norm"),
    "must be a positive number, got -1": (-1, "value"),
    "must be a positive number, got nan": (float("nan"), "norm"),
    "algorithm must be 'norm' or 'value', got 'L2'": (1.0, "L2"),
}


def _errors_of_clipping() -> list[str]:
    trainer = make_trainer(AutomodelStrategy())
    trainer.fit(ModelModule(decoder()), loader())
    messages = []
    for clip_val, algorithm in WRONG_CLIPPING.values():
        with pytest.raises(ValueError, match="must be") as raised:
            trainer.strategy.clip_gradients(trainer.optimizers[0], clip_val, algorithm)
        messages.append(str(raised.value))
    return messages


def test_errors_of_clipping(pool2: RankPool) -> None:
    """The offending value and the valid ones."""
    for messages in pool2.run(_errors_of_clipping):
        assert all(
            expected in message for expected, message in zip(WRONG_CLIPPING, messages, strict=True)
        ), messages


def _warnings(make_module: type[ModelModule], options: dict[str, Any], fits: int = 1) -> list[str]:
    strategy = AutomodelStrategy(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy)
        for _ in range(fits):
            trainer.fit(make_module(decoder()), loader())
            trainer.fit_loop.max_epochs += 1
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("options", first_by_default([{}, DDP]), ids=["fsdp2", "ddp"])
def test_a_half_precision_loss_warns_once(pool2: RankPool, options: dict[str, Any]) -> None:
    """Rank 0 says so, for eight micro-batches once, and not for a loss in full precision."""
    told, silent = pool2.run(_warnings, HalfPrecisionLoss, options)
    about = [message for message in told if "torch.bfloat16 loss" in message]
    assert len(about) == 1
    assert "compute the loss in float32" in about[0]
    assert not any("bfloat16" in message for message in silent)
    assert not any("float32" in message for message in pool2.run(_warnings, ModelModule, options)[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {**DDP, "cpu_offload": True, "reshard_during_accumulation": False},
            [
                f"{name} has no effect with data_parallel='ddp'."
                for name in ("reshard_during_accumulation", "cpu_offload")
            ],
        ),
    ],
)
def test_options_without_effect_are_told_once(
    pool2: RankPool, options: dict[str, Any], expected: list[str]
) -> None:
    """By rank 0, one sentence for each, for two fits once."""
    told, silent = pool2.run(_warnings, ModelModule, options, 2)
    assert [message for message in told if "no effect" in message] == expected
    assert not any("no effect" in message for message in silent)


class CollectsOthers(ModelModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.collected = list(copy.deepcopy(model).parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.collected, lr=0.1)


class OrdersByRank(ModelModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        if dist.get_rank() == 1:
            parameters.reverse()
        return torch.optim.SGD(parameters, lr=0.1)


class SecondOrder(ModelModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class SpreadsItsStates(ModelModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


def _error_of_optimizer(make_module: type[ModelModule], options: dict[str, Any]) -> str:
    with pytest.raises((ValueError, RuntimeError), match=r"SGD|LBFGS|Zero") as raised:
        make_trainer(AutomodelStrategy(**options)).fit(make_module(decoder()), loader())
    return str(raised.value)


def test_an_optimizer_of_another_model_raises(pool2: RankPool) -> None:
    """It would never train this one."""
    for message in pool2.run(_error_of_optimizer, CollectsOthers, {}):
        assert "13 parameters of SGD are not those of CollectsOthers" in message
        assert "configure_optimizers, from self.parameters()" in message


@pytest.mark.parametrize("options", first_by_default([{}, DDP]), ids=["fsdp2", "ddp"])
def test_an_order_for_each_rank_raises(pool2: RankPool, options: dict[str, Any]) -> None:
    """As `list(set(parameters))` has it. What is exchanged in this order would be another parameter's."""
    for message in pool2.run(_error_of_optimizer, OrdersByRank, options):
        assert "their parameters in another order on each rank: number 0 of SGD 0 is model." in message
        assert " on rank 0 and model." in message


@pytest.mark.parametrize("options", first_by_default([{}, DDP]), ids=["fsdp2", "ddp"])
def test_lbfgs_raises(pool2: RankPool, options: dict[str, Any]) -> None:
    """A line search on each rank's own loss would let the ranks drift apart."""
    for message in pool2.run(_error_of_optimizer, SecondOrder, options):
        assert "LBFGS chooses its step from the loss of each rank alone, so 2 ranks would diverge" in message


def test_spread_states_raise(pool2: RankPool) -> None:
    """They would be missing in the first checkpoint."""
    for message in pool2.run(_error_of_optimizer, SpreadsItsStates, DDP):
        assert "ZeroRedundancyOptimizer spreads its states" in message
        assert "data_parallel='fsdp2'" in message
