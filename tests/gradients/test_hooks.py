"""What hooks and callbacks see of a step, and what clipping does with it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    Batch,
    full,
    full_weights,
    local,
    relative_error,
    weight_error,
)
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, decoder, loader, make_trainer, mean_loss

ACCUMULATE = 3
WITHOUT_GAPS = replace(CASE, gap="none")
CLIP = 0.05
CLIP_VALUE = 0.005
ENGINES = {"fsdp2": STRATEGIES["kept"], "ddp": STRATEGIES["ddp"]}


def fit(module: ModelModule, options: dict[str, Any], **trainer_options: Any) -> Trainer:
    trainer = make_trainer(
        AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, **trainer_options
    )
    trainer.fit(module, loader())
    return trainer


def _halve(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad.mul_(0.5)


class ClipsValues(ModelModule):
    """Overrides the hook that clips."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.trainer.strategy.clip_gradients(optimizer, CLIP_VALUE, "value")


class HalvingPrecision(Precision):
    """Clips in a way of its own, whatever it is asked for."""

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        _halve(optimizer.param_groups[0]["params"])


class TorchClippingPrecision(Precision):
    """Calls what it has inherited, with a limit of its own."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        super().clip_grad_by_norm(optimizer, CLIP)


CLIPPING: dict[str, tuple[type[ModelModule], list[type[Precision]], Any]] = {
    "hook": (ClipsValues, [], functools.partial(nn.utils.clip_grad_value_, clip_value=CLIP_VALUE)),
    "halving": (ModelModule, [HalvingPrecision], _halve),
    "by torch": (
        ModelModule,
        [TorchClippingPrecision],
        functools.partial(nn.utils.clip_grad_norm_, max_norm=CLIP),
    ),
}
"""Who clips for himself; `tests/search` draws other hooks."""


def _clip_in_every_way(options: dict[str, Any]) -> list[dict[str, Tensor]]:
    found = []
    for make, plugins, _ in CLIPPING.values():
        module = make(decoder())
        made = [LightningEnvironment(), *(plugin() for plugin in plugins)]
        fit(module, options, plugins=made, gradient_clip_val=1e-3)
        found.append(full_weights(module.model))
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_who_clips_for_himself(pool2: RankPool, options: dict[str, Any]) -> None:
    """An overridden hook, or a precision plugin, has the last word, on gradients that are rescaled already."""
    expected = [plain_weights(decoder(), ACCUMULATE, clip=clip) for *_, clip in CLIPPING.values()]
    for found in pool2.run(_clip_in_every_way, options):
        for weights, wanted in zip(found, expected, strict=True):
            assert weight_error(weights, wanted) <= TOLERANCE


class HookedStrategy(AutomodelStrategy):
    """Notes what the hooks of a strategy around its backward find: the loss, shards, and gradients."""

    noted: tuple[tuple[str, bool, bool, bool], ...] = ()

    def pre_backward(self, closure_loss: Tensor, hook: str = "pre_backward") -> None:
        parameters = list(self.lightning_module.parameters())
        are_shards = all(isinstance(parameter, DTensor) for parameter in parameters)
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        self.noted += ((hook, closure_loss.requires_grad, are_shards, has_gradients),)

    def post_backward(self, closure_loss: Tensor) -> None:
        self.pre_backward(closure_loss, "post_backward")


def _hooked(options: dict[str, Any]) -> list[Any]:
    strategy = HookedStrategy(**options)
    trainer = make_trainer(strategy, accumulate_grad_batches=2, limit_train_batches=2)
    trainer.fit(ModelModule(decoder()), loader())
    return list(strategy.noted)


@pytest.mark.every_case
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_hooks_of_a_strategys_subclass(pool2: RankPool, options: dict[str, Any]) -> None:
    """As under Lightning's strategies, with the gradients that hooks of the module find."""
    are_shards = options != STRATEGIES["ddp"]
    before = ("pre_backward", True, are_shards, False)
    expected = [before, ("post_backward", False, are_shards, False)]
    expected += [before, ("post_backward", False, are_shards, True)]
    assert pool2.run(_hooked, options) == [expected, expected]


def local_weights(module: nn.Module) -> list[Tensor]:
    """Copies of what this rank holds."""
    return [local(parameter).detach().clone() for parameter in module.parameters()]


class Explodes(ModelModule):
    """Puts an infinity into the gradients of rank 1 in the second step: through the loss, or in a hook."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__(model)
        self.where = where
        self.before: list[Tensor] = []

    def _is_due(self) -> bool:
        return dist.get_rank() == 1 and self.trainer.global_step == 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = local_weights(self)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.inf if self.where == "loss" and self._is_due() else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "hook" and self._is_due():
            grad = next(local(p.grad) for p in self.parameters() if local(p.grad).numel())
            grad.view(-1)[0] = math.inf


def _explode(where: str, options: dict[str, Any], trainer_options: dict[str, Any]) -> tuple[str, bool, int]:
    module = Explodes(decoder(), where)
    with pytest.raises(RuntimeError, match="gradient norm") as raised:
        fit(module, {**options, "error_if_nonfinite": True}, **trainer_options)
    unchanged = all(map(torch.equal, module.before, local_weights(module)))
    return str(raised.value), unchanged, module.trainer.global_step


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(
    ("where", "trainer_options"),
    [
        ("hook", {}),
        ("hook", {"gradient_clip_val": CLIP}),
        ("loss", {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"}),
    ],
    ids=["hook", "hook-norm", "loss-value"],
)
def test_error_if_nonfinite(
    pool2: RankPool, where: str, trainer_options: dict[str, Any], options: dict[str, Any]
) -> None:
    """One rank's infinity stops all of them before any weight has changed in the slightest."""
    for message, unchanged, global_step in pool2.run(
        _explode, where, options, trainer_options, timeout_s=20
    ):
        assert unchanged
        assert global_step == 1
        assert "no parameter has been changed by it" in message


class SeesOutputs(Callback):
    """What callbacks get of the value that `training_step` returned, of its loss, and of what was logged."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.losses: list[Tensor] = []

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        assert loss.requires_grad
        self.losses.append(loss.detach().clone())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)


class Returns(ModelModule):
    """Returns a dict with more than the loss in it."""

    def __init__(self, model: nn.Module, reduction: str) -> None:
        super().__init__(model)
        self.reduction = reduction

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = mean_loss(self.model, batch, self.reduction)
        count = (batch["labels"] != -100).sum()
        return {"loss": loss, "num_label_tokens": count, "rows": len(batch["labels"]), "twice": 2 * loss}


def _outputs_seen(engine: str, reduction: str) -> tuple[list[Any], list[Tensor]]:
    strategy: Any = DDPStrategy()
    if engine != "lightning":
        strategy = AutomodelStrategy(data_parallel=engine, loss_reduction=reduction)
    sees = SeesOutputs()
    settings = {"accumulate_grad_batches": ACCUMULATE, "limit_train_batches": 2, "callbacks": [sees]}
    make_trainer(strategy, **settings).fit(Returns(decoder(), reduction), loader(WITHOUT_GAPS))
    return sees.outputs, sees.losses


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_callbacks_see_what_they_see_under_ddp_strategy(
    pool2: RankPool, engine: str, reduction: str
) -> None:
    """Keys, types, graph and values of outputs, and the loss before backward, are Lightning's."""
    expected_by_rank = pool2.run(_outputs_seen, "lightning", reduction)
    found_by_rank = pool2.run(_outputs_seen, engine, reduction)
    for (outputs, losses), (wanted, wanted_losses) in zip(found_by_rank, expected_by_rank, strict=True):
        assert [list(output) for output in outputs] == [list(output) for output in wanted]
        for output, expected in zip(outputs, wanted, strict=True):
            for name, value in expected.items():
                assert type(output[name]) is type(value)
                assert relative_error(output[name], value) <= TOLERANCE
                if isinstance(value, Tensor):
                    assert output[name].requires_grad == value.requires_grad
                    assert output[name].dtype == value.dtype
        assert len(losses) == len(wanted_losses) == 2
        assert max(map(relative_error, losses, wanted_losses)) <= TOLERANCE


class Logs(ModelModule):
    """Logs 1 on rank 0 and 4 on rank 1, from batches of 1 and of 2, in training and in validation; and norms."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._log("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("validation")

    def _log(self, name: str) -> None:
        rank = dist.get_rank()
        settings = {"sync_dist": True, "batch_size": 1 + rank, "on_step": False, "on_epoch": True}
        self.log(name, torch.tensor(1.0 + 3 * rank), **settings)
        self.log(f"{name}_constant", 1.0, **settings)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = next(iter(self.model.parameters())).grad.norm()
        self.log("norm", norm)
        self.log("mean_norm", norm, sync_dist=True)
        self.log_dict({"summed": norm, "other": 1.0}, sync_dist=True, reduce_fx="sum")
        self.reduced = self.trainer.strategy.reduce(norm, reduce_op="sum")
        self.norm = full(norm)


def _logged(options: dict[str, Any]) -> tuple[dict[str, float], float, float]:
    module = Logs(decoder())
    trainer = make_trainer(AutomodelStrategy(**options), limit_train_batches=1, limit_val_batches=2)
    trainer.fit(module, loader(), loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, float(module.reduced), float(module.norm)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_logged_values(pool2: RankPool, options: dict[str, Any]) -> None:
    """Means weigh batch sizes: (1 x 1 + 2 x 4) / 3, and a constant is itself. Norms are those of all shards.

    Lightning floors the mean of the batch sizes 1 and 2 to 1.
    """
    for metrics, reduced, norm in pool2.run(_logged, options):
        means = {
            name: metrics.pop(name) for name in list(metrics) if name.startswith(("train", "validation"))
        }
        assert means == pytest.approx(
            {"train": 3, "validation": 3, "train_constant": 1, "validation_constant": 1}
        )
        assert norm > 0
        assert metrics | {"reduced": reduced} == pytest.approx(
            {"norm": norm, "mean_norm": norm, "summed": 2 * norm, "other": 2, "reduced": 2 * norm}
        )
