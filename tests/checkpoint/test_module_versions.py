"""Modules that convert what older versions of them have saved are told which version has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint.__main__ import main
from tests.checkpoint.checkpoints import FORMS, AdamModule, batches, fit, forms
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, make_trainer


class Converting(nn.Linear):
    """Its first version kept weights that were half as large."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Module(AdamModule):
    """Has a converting layer in a block, and one in the root."""

    def __init__(self, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.model.head.__class__ = Converting
        self.model.blocks[0].linear.__class__ = Converting


def _save(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    trainer, module = fit(options, Module())
    trainer.save_checkpoint(path)
    return full_weights(module.model)


def _load(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    module = Module(CASE.seed + 2)
    make_trainer(AutomodelStrategy(**options)).validate(module, batches(), ckpt_path=path, verbose=False)
    return full_weights(module.model)


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("form", forms("shards", "one_file_of_shards", "replicated"))
def test_current_weights_are_not_converted(pool2: RankPool, form: str, tmp_path: Path) -> None:
    """In every form, below wrappers, by Lightning's ``load_from_checkpoint``, and consolidated."""
    path = tmp_path / "one.ckpt"
    options = {**FORMS[form], "activation_checkpointing": True}
    saved = pool2.run(_save, options, str(path))[0]
    for loaded in pool2.run(_load, options, str(path)):
        _assert_equal(loaded, saved)
    alone = [path]
    if path.is_dir():
        alone.append(tmp_path / "consolidated.ckpt")
        main(["consolidate", *map(str, alone)])
    for each in alone:
        for place in (None, "cpu"):
            module = Module.load_from_checkpoint(each, map_location=place, weights_only=True)
            _assert_equal(full_weights(module.model), saved)


@pytest.mark.parametrize("version", [None, 1])
def test_older_weights_are_converted(pool2: RankPool, version: int | None, tmp_path: Path) -> None:
    """Of a file that an older version has saved, which notes that, or nothing."""
    path = tmp_path / "old.ckpt"
    options = FORMS["one_file_of_shards"]
    saved = pool2.run(_save, options, str(path))[0]
    checkpoint = torch.load(path, weights_only=True)
    for name, noted in checkpoint["state_dict"]._metadata.items():
        if name in ("model.head", "model.blocks.0.linear"):
            assert noted["version"] == 2
            noted["version"] = version
    torch.save(checkpoint, path)
    expected = dict(saved)
    for name in ("head.weight", "blocks.0.linear.weight"):
        expected[name] = 2 * saved[name]
    for loaded in pool2.run(_load, options, str(path)):
        _assert_equal(loaded, expected)
