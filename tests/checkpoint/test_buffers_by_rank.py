"""What differs between the ranks in a state dict, such as statistics and metrics, is saved as one rank has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError
from tests.checkpoint.checkpoints import FORMS, AdamModule, batches, fit, forms
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, make_trainer

SIZES = (1, 3, 5, 7, 11)


class Differing(AdamModule):
    """Buffers that each rank fills by itself, and a metric that is saved."""

    def __init__(self, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        for size in SIZES:
            self.register_buffer(f"of_{size}", torch.zeros(size))
        self.metrics = torch.nn.ModuleList(MeanMetric() for _ in range(4))
        for metric in self.metrics:
            metric.persistent(True)

    def on_train_end(self) -> None:
        for size in SIZES:
            self.get_buffer(f"of_{size}").fill_(dist.get_rank() + 1)
        for metric in self.metrics:
            metric.update(dist.get_rank() + 1.0)

    def kept(self) -> set[float]:
        values = [self.get_buffer(f"of_{size}") for size in SIZES]
        return {float(value.max()) for value in [*values, *(metric.mean_value for metric in self.metrics)]}


def _load(options: dict[str, Any], module: Any, path: str) -> None:
    make_trainer(AutomodelStrategy(**options)).validate(module, batches(), ckpt_path=path, verbose=False)


def _save_and_load(options: dict[str, Any], path: str) -> set[float]:
    trainer, _ = fit(options, Differing())
    trainer.save_checkpoint(path)
    loaded = Differing(CASE.seed + 2)
    _load(options, loaded, path)
    return loaded.kept()


@pytest.mark.parametrize("form", forms("shards", "replicated_directory"))
@pytest.mark.every_case
def test_one_rank_is_saved(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Rank 0, as in one file: torch would take some of each rank."""
    assert pool2.run(_save_and_load, FORMS[form], str(tmp_path / "last.ckpt")) == [{1.0}, {1.0}]


class RenamedCopies(AdamModule):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name.replace("model.", "net.", 1): value.clone() for name, value in state.items()}


class KnowsItsNames(RenamedCopies):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = {name.replace("net.", "model.", 1): value for name, value in state_dict.items()}
        return super().load_state_dict(state, *args, **kwargs)


def _copies(options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Weights that were saved and loaded, and the error where the class does not know its names."""
    trainer, module = fit(options, KnowsItsNames())
    trainer.save_checkpoint(path)
    loaded = KnowsItsNames(CASE.seed + 2)
    _load(options, loaded, path)
    with pytest.raises(CheckpointError) as raised:
        _load(options, RenamedCopies(), path)
    return full_weights(module.model), full_weights(loaded.model), str(raised.value)


@pytest.mark.parametrize("form", forms("shards", "replicated"))
@pytest.mark.every_case
def test_state_dicts_of_renamed_copies(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Load if the class loads them, as in plain Lightning; otherwise nothing is loaded in silence."""
    for saved, loaded, message in pool2.run(_copies, FORMS[form], str(tmp_path / "last.ckpt")):
        assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())
        assert "Missing key(s) in state_dict" in message


class Colliding(AdamModule):
    """Has the name that torch.compile gives to what it wraps."""

    def __init__(self, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.model.part = torch.nn.Module()
        self.model.part._orig_mod = torch.nn.Module()
        self.model.part.register_buffer("value", torch.full((2,), 1.0 * seed))
        self.model.part._orig_mod.register_buffer("value", torch.full((2,), 2.0 * seed))


def _collide(options: dict[str, Any], path: str) -> str:
    trainer, _ = fit(options, Colliding())
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(path)
    return str(raised.value)


@pytest.mark.parametrize("form", forms("shards", "replicated"))
@pytest.mark.every_case
def test_names_that_collide(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Are refused, as wrappers are left out of names in every form."""
    for found in pool2.run(_collide, FORMS[form], str(tmp_path / "last.ckpt")):
        assert "two entries of the state have one name" in found
