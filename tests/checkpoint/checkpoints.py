"""Short runs that save and resume, for the tests of checkpoints."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError, paths
from lightning_automodel.checkpoint.__main__ import main
from tests.trainer.exactness import SILENT, TinyDecoder, full_weights, micro_batches
from tests.trainer.plain import ModelModule
from tests.trainer.runs import CASE, make_trainer, sampled

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
    return sampled(FORMS, by_default)


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


Made = Callable[..., ModelModule]


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


def save(
    options: dict[str, Any], path: str, make: Made = AdamModule, args: tuple[Any, ...] = (), **kwargs: Any
) -> dict[str, Tensor]:
    """Train an epoch and save; the whole weights."""
    trainer, module = fit(options, make(*args), **kwargs)
    trainer.save_checkpoint(path)
    return full_weights(module.model)


def refused(options: dict[str, Any], path: str, make: Made = AdamModule, args: tuple[Any, ...] = ()) -> str:
    """Train an epoch; what saving raises."""
    trainer, _ = fit(options, make(*args))
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(path)
    return str(raised.value)


def resume(
    options: dict[str, Any],
    path: str,
    make: Made = AdamModule,
    args: tuple[Any, ...] = (CASE.seed + 2,),
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Go on from a checkpoint to a second epoch, with other weights in memory; the whole weights."""
    return full_weights(fit(options, make(*args), ckpt_path=path, **{"max_epochs": 2, **kwargs})[1].model)


def uninterrupted(
    options: dict[str, Any], make: Made = AdamModule, args: tuple[Any, ...] = ()
) -> dict[str, Tensor]:
    """Whole weights after two epochs of training that never stopped."""
    return full_weights(fit(options, make(*args), max_epochs=2)[1].model)


def loaded(options: dict[str, Any], path: str, module: Any) -> Any:
    """The module, into which a checkpoint is loaded; under plain Lightning with ``{"plain": True}``."""
    trainer = plain_trainer() if options.get("plain") else make_trainer(AutomodelStrategy(**options))
    trainer.validate(module, batches(), ckpt_path=path, verbose=False)
    return module


def load_only(
    options: dict[str, Any], path: str, make: Made = AdamModule, args: tuple[Any, ...] = (CASE.seed + 2,)
) -> dict[str, Tensor]:
    """Whole weights that are loaded."""
    return full_weights(loaded(options, path, make(*args)).model)


def consolidated(path: Path) -> str:
    """One file of a directory, for plain Lightning."""
    if path.is_file():
        return str(path)
    assert main(["consolidate", str(path), f"{path}.whole"]) == 0
    return f"{path}.whole"


def plain_trainer(**kwargs: Any) -> Trainer:
    """One of Lightning alone, in one process."""
    return Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **SILENT, **kwargs)


def assert_equal(by_rank: Iterable[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    """The weights of every rank are the expected ones, bit for bit."""
    for weights in by_rank:
        assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []


@contextmanager
def no_space_for_files(num_bytes: int) -> Iterator[None]:
    """The operating system refuses this process to write beyond so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def are_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(weights[name], value) for name, value in expected.items())


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def leftovers(folder: Path) -> list[Path]:
    """What saves and removals that have not ended left in a folder."""
    return sorted(folder.glob(f"{paths.TEMPORARY}*"))
