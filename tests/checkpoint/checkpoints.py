"""Short runs that save and resume, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import paths
from tests.trainer.exactness import Outcome, TinyDecoder, full_weights, micro_batches, weight_error
from tests.trainer.plain import ModelModule
from tests.trainer.runs import CASE, make_trainer

FORMS: dict[str, dict[str, Any]] = {
    "shards": {},
    "one_file_of_shards": {"save_distributed_checkpoint": False},
    "replicated": {"data_parallel": "ddp"},
    "replicated_directory": {"data_parallel": "ddp", "save_distributed_checkpoint": True},
}
ACCUMULATE = 2
NUM_BATCHES = 4


def forms(*by_default: str) -> list[Any]:
    """All forms of checkpoints as parameters of a test; those that are not named are a sweep."""
    return [form if form in by_default else pytest.param(form, marks=pytest.mark.sweep) for form in FORMS]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose epsilon drowns the rounding noise of gradients that are exactly zero."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


class AdamModule(ModelModule):
    """Adam's moments, and a schedule that depends on the steps made so far."""

    def __init__(self, seed: int = CASE.seed) -> None:
        super().__init__(TinyDecoder(seed).double())

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Saves(Callback):
    """Saves in a hook, when it is called for the ``when``-th time."""

    def __init__(self, hook: str, when: int, path: str | Path) -> None:
        self.when = when
        self.path = path
        setattr(self, hook, self._called)

    def _called(self, trainer: Trainer, *args: Any) -> None:
        self.when -= 1
        if self.when == 0:
            trainer.save_checkpoint(self.path)


def batches() -> DataLoader:
    """The same micro-batches on every rank and for any number of ranks, so that all shapes train alike."""
    return DataLoader(micro_batches(CASE)[0][:NUM_BATCHES], batch_size=None)


def fit(
    options: dict[str, Any], module: ModelModule | None = None, seed: int = CASE.seed, **kwargs: Any
) -> tuple[Trainer, ModelModule]:
    """Train for two optimizer steps an epoch."""
    module = AdamModule(seed) if module is None else module
    ckpt_path = kwargs.pop("ckpt_path", None)
    weights_only = kwargs.pop("weights_only", None)
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, **kwargs)
    trainer.fit(module, batches(), ckpt_path=ckpt_path, weights_only=weights_only)
    return trainer, module


def save(options: dict[str, Any], path: str, **kwargs: Any) -> dict[str, Tensor]:
    """Train an epoch and save; the whole weights."""
    trainer, module = fit(options, **kwargs)
    trainer.save_checkpoint(path)
    return full_weights(module.model)


def resume(options: dict[str, Any], path: str, epochs: int = 2, **kwargs: Any) -> dict[str, Tensor]:
    """Go on from a checkpoint, with other weights in memory; the whole weights."""
    _, module = fit(options, seed=CASE.seed + 2, ckpt_path=path, max_epochs=epochs, **kwargs)
    return full_weights(module.model)


def uninterrupted(options: dict[str, Any], epochs: int = 2, **kwargs: Any) -> dict[str, Tensor]:
    """Whole weights after training that never stopped."""
    return full_weights(fit(options, max_epochs=epochs, **kwargs)[1].model)


def load_only(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    module = AdamModule(CASE.seed + 2)
    make_trainer(AutomodelStrategy(**options)).validate(module, batches(), ckpt_path=path, verbose=False)
    return full_weights(module.model)


def deviation(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return weight_error(Outcome(weights), Outcome(expected))


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def leftovers(folder: Path) -> list[Path]:
    """What saves and removals that have not ended left in a folder."""
    return sorted(folder.glob(f"{paths.TEMPORARY}*"))


def rank() -> int:
    return dist.get_rank()
