"""What happens in the middle of a window changes nothing, and never sees stale gathered parameters.

Every run accumulates four of eight micro-batches; its weights must equal those of the plain loop, which
knows nothing of the validation, checkpoint, swap or forward in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding.shards import Shard
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    TinyDecoder,
    full_weights,
    micro_batches,
    relative_error,
    weight_error,
)
from tests.trainer.runs import (
    CASE,
    STRATEGIES,
    TOLERANCE,
    LabelledModule,
    loader,
    make_trainer,
    mean_loss,
    train_plainly,
)

WINDOWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
SWAPPED_BY = 1.5


class MidWindow(Callback, ABC):
    """Acts after every micro-batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.act(trainer, pl_module)

    @abstractmethod
    def act(self, trainer: Trainer, module: Any) -> None:
        """Do it."""


class Checkpoints(MidWindow):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def act(self, trainer: Trainer, module: Any) -> None:
        index = trainer.fit_loop.epoch_loop.batch_idx
        trainer.save_checkpoint(Path(self.directory) / f"{index}.ckpt")


class Forwards(MidWindow):
    def act(self, trainer: Trainer, module: Any) -> None:
        with torch.no_grad():
            module(micro_batches(CASE)[dist.get_rank()][0])


class Swaps(MidWindow):
    """Swaps other weights in, runs a forward with them, and swaps back, as exponential moving averages do."""

    def __init__(self, through_data: bool) -> None:
        self.through_data = through_data
        self.losses: list[float] = []

    def act(self, trainer: Trainer, module: Any) -> None:
        backup = [parameter.detach().clone() for parameter in module.parameters()]
        self._write(module, [SWAPPED_BY * weight for weight in backup])
        with torch.no_grad():
            self.losses.append(float(module(micro_batches(CASE)[0][0])))
        self._write(module, backup)

    def _write(self, module: Any, weights: list[Tensor]) -> None:
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            if self.through_data:
                parameter.data.copy_(weight)
            else:
                with torch.no_grad():
                    parameter.copy_(weight)


class LooksAtParameters(MidWindow):
    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def act(self, trainer: Trainer, module: Any) -> None:
        self.kinds |= {type(parameter).__name__ for parameter in module.parameters()}


def _callbacks(event: str, directory: str) -> list[Callback]:
    by_event: dict[str, list[Callback]] = {
        "validation": [],
        "validation_with_swap": [SwapsForValidation()],
        "checkpoint": [Checkpoints(directory)],
        "forward": [Forwards()],
        "swap": [Swaps(through_data=False)],
        "swap_data": [Swaps(through_data=True)],
    }
    return by_event[event]


class SwapsForValidation(Callback):
    """Validates with averaged weights."""

    backup: list[Tensor]

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.backup = [parameter.detach().clone() for parameter in pl_module.parameters()]
        for parameter in pl_module.parameters():
            parameter.data.mul_(SWAPPED_BY)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        for parameter, weight in zip(pl_module.parameters(), self.backup, strict=True):
            parameter.data.copy_(weight)


class ShardedByHand(LabelledModule):
    """Shards its decoder itself, so that the strategy finds a root that it did not make."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel_shard"]
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh)


def _fit_with(
    event: str, options: dict[str, Any], directory: str, make_module: type[LabelledModule] = LabelledModule
) -> tuple[dict[str, Tensor], list[float]]:
    module = make_module()
    callbacks = _callbacks(event, directory)
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=4,
        callbacks=callbacks,
        val_check_interval=1 if event.startswith("validation") else 1.0,
    )
    validation = loader() if event.startswith("validation") else None
    trainer.fit(module, loader(), validation)
    losses = next((callback.losses for callback in callbacks if isinstance(callback, Swaps)), [])
    return full_weights(module.model), losses


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize(
    "event", ["validation", "validation_with_swap", "checkpoint", "forward", "swap", "swap_data"]
)
def test_changes_nothing(pool2: RankPool, tmp_path: Path, event: str, options: dict[str, Any]) -> None:
    """Training goes on as if nothing had happened; a forward with swapped weights really uses them."""
    expected = train_plainly(WINDOWS)
    for weights, losses in pool2.run(_fit_with, event, options, str(tmp_path)):
        assert weight_error(weights, expected) <= TOLERANCE
        if event.startswith("swap"):
            first = _loss_with_swapped_initial_weights()
            assert relative_error(losses[0], first) <= TOLERANCE
            assert losses[:3] == [losses[0]] * 3, "weights do not change within a window"
            assert losses[3] != losses[2], "the optimizer steps after the fourth micro-batch"


@pytest.mark.parametrize("name", ["kept", "resharded"])
@pytest.mark.parametrize("event", ["validation_with_swap", "swap", "swap_data"])
def test_model_sharded_by_hand(pool2: RankPool, tmp_path: Path, event: str, name: str) -> None:
    """A root of the user's own is not left gathered by a forward without gradients either."""
    expected = train_plainly(WINDOWS)
    for weights, losses in pool2.run(_fit_with, event, STRATEGIES[name], str(tmp_path), ShardedByHand):
        assert weight_error(weights, expected) <= TOLERANCE
        if event.startswith("swap"):
            assert relative_error(losses[0], _loss_with_swapped_initial_weights()) <= TOLERANCE


def _loss_with_swapped_initial_weights() -> float:
    model = TinyDecoder(CASE.seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SWAPPED_BY)
        return float(mean_loss(model, micro_batches(CASE)[0][0]))


def _kinds_of_parameters(options: dict[str, Any]) -> set[str]:
    looks = LooksAtParameters()
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=4, callbacks=[looks])
    trainer.fit(LabelledModule(), loader())
    return looks.kinds


@pytest.mark.parametrize("name", ["kept", "resharded", "undeferred"])
def test_callbacks_meet_sharded_parameters(pool2: RankPool, name: str) -> None:
    """Between micro-batches the module shows its sharded parameters, also while gathered ones are kept."""
    assert pool2.run(_kinds_of_parameters, STRATEGIES[name]) == [{Shard.__name__}] * 2
