"""Optimizers that train other parameters than when they were saved are refused; an order or a name may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel.checkpoint import CheckpointError
from tests.checkpoint.checkpoints import FORMS, AdamModule, fit
from tests.checkpoint.test_optimizer_states import deviation
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, TOLERANCE

PAIRS = [("shards", "shards"), ("replicated", "replicated")]
OTHER_PAIRS = [
    ("one_file_of_shards", "replicated"),
    ("replicated", "shards"),
    ("shards", "replicated"),
    ("replicated_directory", "one_file_of_shards"),
]


class Choosing(AdamModule):
    """Groups of parameters by a function of all names."""

    def __init__(self, groups: Any, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.groups = groups

    def configure_optimizers(self) -> Any:
        named = dict(self.model.named_parameters())
        chosen = [{"params": [named[name] for name in group]} for group in self.groups(list(named))]
        return torch.optim.AdamW(chosen, lr=0.01, eps=1e-3)


def everything(names: list[str]) -> list[list[str]]:
    return [names[:4], names[4:]]


def swapped(names: list[str]) -> list[list[str]]:
    return [names[:3] + names[4:5], names[3:4] + names[5:]]


def fewer(names: list[str]) -> list[list[str]]:
    return [names[:3], names[4:]]


def reordered(names: list[str]) -> list[list[str]]:
    return [names[:4][::-1], names[4:][::-1]]


def _save(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    trainer, _ = fit(options, Choosing(everything))
    trainer.save_checkpoint(path)
    return full_weights(fit(options, Choosing(everything), max_epochs=2)[1].model)


def _refused(options: dict[str, Any], groups: Any, path: str) -> tuple[str, bool]:
    module = Choosing(groups, CASE.seed + 2)
    before = {name: weight.clone() for name, weight in full_weights(module.model).items()}
    with pytest.raises(CheckpointError) as raised:
        fit(options, module, ckpt_path=path, max_epochs=2)
    after = full_weights(module.model)
    return str(raised.value), all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("saving", "resuming"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.sweep) for pair in OTHER_PAIRS)]
)
@pytest.mark.every_case
def test_other_parameters_are_named(pool2: RankPool, tmp_path: Path, saving: str, resuming: str) -> None:
    """A subset, and two that changed their groups; nothing was loaded."""
    path = str(tmp_path / "last.ckpt")
    pool2.run(_save, FORMS[saving], path)
    only_saved = {swapped: "none", fewer: "model.blocks.0.linear.weight"}
    for groups, names in only_saved.items():
        for message, is_unchanged in pool2.run(_refused, FORMS[resuming], groups, path):
            assert (
                "optimizer 0 trains other parameters, or in other groups, than when it was saved" in message
            )
            assert f"only saved: {names}; only here: none" in message
            assert is_unchanged


def _resume(options: dict[str, Any], module: Any, path: str) -> dict[str, Tensor]:
    _, module = fit(options, module, ckpt_path=path, max_epochs=2)
    return full_weights(module.model)


def _resume_reordered(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    return _resume(options, Choosing(reordered, CASE.seed + 2), path)


class Renamed(Choosing):
    """Has another name for its network than the checkpoint, which a hook changes."""

    def __init__(self) -> None:
        super().__init__(everything, CASE.seed + 2)
        self.network = self.model
        del self.model

    @property
    def model(self) -> Any:
        return self.network

    @model.deleter
    def model(self) -> None:
        del self._modules["model"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (optimizer,) = checkpoint["optimizer_states"]
        for state in (checkpoint["state_dict"], optimizer["state"]):
            for name in list(state):
                state[_network(name)] = state.pop(name)
        for group in optimizer["param_groups"]:
            group["params"] = [_network(name) for name in group["params"]]


def _network(name: str) -> str:
    return name.replace("model.", "network.", 1)


def _resume_renamed(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    return _resume(options, Renamed(), path)


@pytest.mark.parametrize("resume", [_resume_reordered, _resume_renamed])
@pytest.mark.parametrize(
    ("saving", "resuming"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.sweep) for pair in OTHER_PAIRS)]
)
@pytest.mark.every_case
def test_parameters_are_followed(
    pool2: RankPool, tmp_path: Path, saving: str, resuming: str, resume: Any
) -> None:
    """Each gets its own state in another order; and under other names, which a hook has changed everywhere."""
    path = str(tmp_path / "last.ckpt")
    expected = pool2.run(_save, FORMS[saving], path)[0]
    for weights in pool2.run(resume, FORMS[resuming], path):
        assert deviation(weights, expected) <= TOLERANCE
