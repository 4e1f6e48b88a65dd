"""Lightning's callbacks that change how or what is trained: learning rates, frozen modules, pruned parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, BatchSizeFinder, LearningRateFinder, ModelPruning
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    Outcome,
    TinyDecoder,
    full_weights,
    weight_error,
)
from tests.trainer.plain import ModelModule, sgd, train_model_plainly
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, loader
from tests.trainer.test_lightning_callbacks import ACCUMULATE, ENGINES, GAPLESS, trainer_with


class Rated(ModelModule):
    """Has a learning rate that can be found."""

    def __init__(self) -> None:
        super().__init__(TinyDecoder(CASE.seed).double())
        self.lr = LEARNING_RATE
        self.batch_size = 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=MOMENTUM)


SEARCH = {"min_lr": 1e-3, "max_lr": 0.5, "early_stop_threshold": None}


def _resume_with_finder(engine: str, folder: str) -> tuple[list[int], dict[str, Tensor], dict[str, Tensor]]:
    """The batches of a resumed run that searches first, its weights, and those of a run that was not stopped."""
    path = f"{folder}/at_2.ckpt"

    class Noting(Callback):
        def __init__(self) -> None:
            self.batches: list[int] = []

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            self.batches.append(index)
            if index == 1 and trainer.ckpt_path is None:
                trainer.save_checkpoint(path)

    weights = []
    settings = {"accumulate_grad_batches": 1, "max_epochs": 1, "default_root_dir": folder}
    for ckpt_path in (None, path):
        module = Rated()
        noting = Noting()
        callbacks: list[Callback] = [noting]
        if ckpt_path is not None:
            callbacks.append(LearningRateFinder(num_training_steps=4, update_attr=False, **SEARCH))
        trainer_with(engine, callbacks, **settings).fit(module, loader(GAPLESS), ckpt_path=ckpt_path)
        weights.append(full_weights(module.model))
    return noting.batches, weights[1], weights[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_resume_with_learning_rate_finder(pool2: RankPool, tmp_path: Path, engine: str) -> None:
    """The run goes on where it was saved, though the search has trained before the checkpoint is loaded."""
    for batches, weights, undisturbed in pool2.run(_resume_with_finder, engine, str(tmp_path)):
        assert batches == list(range(2, GAPLESS.num_batches))
        assert weight_error(Outcome(weights, None), Outcome(undisturbed, None)) <= TOLERANCE


def _scale_batch_size(engine: str) -> tuple[str, str]:
    with pytest.raises(ValueError, match="distributed") as by_tuner:
        Tuner(trainer_with(engine, [])).scale_batch_size(Rated(), loader())
    with pytest.raises(MisconfigurationException, match="distributed") as by_callback:
        trainer_with(engine, [BatchSizeFinder()]).fit(Rated(), loader())
    return str(by_tuner.value), str(by_callback.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_batch_size_finder_is_refused_by_lightning(pool2: RankPool, engine: str) -> None:
    for by_tuner, by_callback in pool2.run(_scale_batch_size, engine):
        assert by_tuner == "Tuning the batch size is currently not supported with distributed strategies."
        assert by_callback == "The Batch size finder is not supported with distributed strategies."


BACKBONE_RATE = 0.02
GROWTH = 1.5


class WithBackbone(ModelModule):
    def __init__(self) -> None:
        super().__init__(TinyDecoder(CASE.seed).double())

    @property
    def backbone(self) -> nn.Module:
        return self.model.blocks


def _unfreeze(engine: str) -> dict[str, Tensor]:
    module = WithBackbone()
    finetuning = BackboneFinetuning(1, lambda epoch: GROWTH, backbone_initial_lr=BACKBONE_RATE)
    trainer_with(engine, [finetuning], max_epochs=3).fit(module, loader())
    return full_weights(module.model)


@pytest.mark.parametrize("engine", ENGINES)
def test_backbone_finetuning(pool2: RankPool, engine: str) -> None:
    """Blocks that were frozen when the model was sharded train from the second epoch on, at their own rates."""
    model = TinyDecoder(CASE.seed).double()
    model.blocks.requires_grad_(False)
    optimizer = sgd(model)
    for epoch in range(3):
        if epoch == 1:
            model.blocks.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": BACKBONE_RATE})
        elif epoch == 2:
            optimizer.param_groups[-1]["lr"] = BACKBONE_RATE * GROWTH
        train_model_plainly(model, ACCUMULATE, make_optimizer=lambda _: optimizer)
    for weights in pool2.run(_unfreeze, engine):
        assert weight_error(Outcome(weights, None), Outcome(full_weights(model), None)) <= TOLERANCE


def _prune(engine: str) -> Any:
    module = LabelledModule()
    pruning = ModelPruning("l1_unstructured", amount=0.4, use_lottery_ticket_hypothesis=False)
    trainer = trainer_with(engine, [pruning], max_epochs=2)
    if engine == "fsdp2":
        with pytest.raises(ValueError, match="ModelPruning") as raised:
            trainer.fit(module, loader())
        return str(raised.value)
    trainer.fit(module, loader())
    return full_weights(module.model)


def test_model_pruning(pool2: RankPool) -> None:
    """Exact under DDP; where parameters are sharded it is refused before anything is."""
    model = TinyDecoder(CASE.seed).double()
    optimizer = sgd(model)
    leaves = [
        module for module in model.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    names = [
        (module, name)
        for name in ("weight", "bias")
        for module in leaves
        if getattr(module, name, None) is not None
    ]
    for _ in range(2):
        train_model_plainly(model, ACCUMULATE, make_optimizer=lambda _: optimizer)
        prune.global_unstructured(names, pruning_method=prune.L1Unstructured, amount=0.4)
    for module, name in names:
        prune.remove(module, name)
    for weights in pool2.run(_prune, "ddp"):
        assert weight_error(Outcome(weights, None), Outcome(full_weights(model), None)) <= TOLERANCE
        assert any((weight == 0).any() for weight in weights.values())
    for message in pool2.run(_prune, "fsdp2"):
        assert "which FSDP2 would not gather" in message
        assert "data_parallel='ddp'" in message
