"""Modules that load by themselves, convert what older versions of them have saved, or differ between the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

from tests.checkpoint.checkpoints import (
    FORMS,
    AdamModule,
    assert_equal,
    consolidated,
    forms,
    load_only,
    loaded,
    refused,
    save,
)
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE

SIZES = (1, 3, 5, 7, 11)


class Resizes(nn.Module):
    """A buffer with as many rows as were seen (a memory bank), as anomalib's Padim and PatchCore have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 2))
        self.register_buffer("mean", None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        bank = state_dict[f"{prefix}bank"]
        if bank.shape != self.bank.shape:
            self.bank.resize_(bank.shape)
        if f"{prefix}mean" in state_dict and self.mean is None:
            self.mean = torch.zeros_like(state_dict[f"{prefix}mean"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class RenamesOldKeys(nn.Module):
    """Was once built with another name for its weight, and still reads that."""

    def __init__(self, is_old: bool) -> None:
        super().__init__()
        self.is_old = is_old
        self.register_parameter(
            "old" if is_old else "weight",
            nn.Parameter(torch.full((3, 2), 1.0 + is_old), requires_grad=False),
        )
        self.register_load_state_dict_pre_hook(_rename)


def _rename(module: RenamesOldKeys, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}old" in state_dict and not module.is_old:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old")


class OnTheirOwn(AdamModule):
    def __init__(self, is_old: bool = False) -> None:
        super().__init__(CASE.seed if is_old else CASE.seed + 2)
        self.resizes = Resizes()
        self.renames = RenamesOldKeys(is_old)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.resizes.bank = torch.cat([self.resizes.bank, torch.full((1, 2), float(batch_idx))])
        self.resizes.mean = self.resizes.bank.mean(0)


def _load_on_their_own(options: dict[str, Any], path: str) -> list[list[Any]]:
    module = loaded(options, path, OnTheirOwn())
    weight = module.renames.weight
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return [value.tolist() for value in (module.resizes.bank, module.resizes.mean, whole)]


@pytest.mark.every_case
@pytest.mark.parametrize("form", ["shards", "replicated"])
def test_modules_that_load_by_themselves(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """They resize buffers, make ones that were None, and rename old keys."""
    path = tmp_path / "last.ckpt"
    pool2.run(save, FORMS[form], str(path), OnTheirOwn, (True,))
    expected = _load_on_their_own({"plain": True}, consolidated(path))
    assert len(expected[0]) == 4
    assert pool2.run(_load_on_their_own, FORMS[form], str(path)) == [expected] * 2


# --- Versions ---------------------------------------------------------------------------------------------------------


class Converting(nn.Linear):
    """Its first version kept weights that were half as large."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Converts(AdamModule):
    """Has a converting layer in a block, and one in the root."""

    def __init__(self, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.model.head.__class__ = Converting
        self.model.blocks[0].linear.__class__ = Converting


@pytest.mark.parametrize("form", forms("shards", "one_file_of_shards", "replicated"))
def test_current_weights_are_not_converted(pool2: RankPool, form: str, tmp_path: Path) -> None:
    """In every form, saved below wrappers, by Lightning's ``load_from_checkpoint``, and consolidated."""
    path = tmp_path / "one.ckpt"
    saved = pool2.run(save, {**FORMS[form], "activation_checkpointing": True}, str(path), Converts)[0]
    assert_equal(pool2.run(load_only, FORMS[form], str(path), Converts), saved)
    for each in {str(path), consolidated(path)}:
        for place in (None, "cpu"):
            module = Converts.load_from_checkpoint(each, map_location=place, weights_only=True)
            assert_equal([full_weights(module.model)], saved)


@pytest.mark.parametrize("version", [None, 1])
def test_older_weights_are_converted(pool2: RankPool, version: int | None, tmp_path: Path) -> None:
    """Of a file that an older version has saved, which notes that, or nothing."""
    path = tmp_path / "old.ckpt"
    options = FORMS["one_file_of_shards"]
    expected = pool2.run(save, options, str(path), Converts)[0]
    checkpoint = torch.load(path, weights_only=True)
    for name in ("head", "blocks.0.linear"):
        noted = checkpoint["state_dict"]._metadata[f"model.{name}"]
        assert noted["version"] == 2
        noted["version"] = version
        expected[f"{name}.weight"] = 2 * expected[f"{name}.weight"]
    torch.save(checkpoint, path)
    assert_equal(pool2.run(load_only, options, str(path), Converts), expected)


# --- States of each rank ----------------------------------------------------------------------------------------------


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


def _load_kept(options: dict[str, Any], path: str) -> set[float]:
    return loaded(options, path, Differing(CASE.seed + 2)).kept()


@pytest.mark.parametrize("form", forms("shards", "replicated_directory"))
@pytest.mark.every_case
def test_one_rank_is_saved(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Rank 0, as in one file: torch would take some of each rank."""
    path = str(tmp_path / "last.ckpt")
    pool2.run(save, FORMS[form], path, Differing)
    assert pool2.run(_load_kept, FORMS[form], path) == [{1.0}, {1.0}]


# --- Names ------------------------------------------------------------------------------------------------------------


class RenamedCopies(AdamModule):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name.replace("model.", "net.", 1): value.clone() for name, value in state.items()}


class KnowsItsNames(RenamedCopies):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = {name.replace("net.", "model.", 1): value for name, value in state_dict.items()}
        return super().load_state_dict(state, *args, **kwargs)


@pytest.mark.parametrize("form", forms("shards", "replicated"))
@pytest.mark.every_case
def test_state_dicts_of_renamed_copies(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Load if the class loads them, as in plain Lightning; otherwise nothing is loaded in silence."""
    path = str(tmp_path / "last.ckpt")
    saved = pool2.run(save, FORMS[form], path, KnowsItsNames)[0]
    assert_equal(pool2.run(load_only, FORMS[form], path, KnowsItsNames), saved)
    with pytest.raises(RankError, match=r"CheckpointError(.|\n)*Missing key\(s\) in state_dict"):
        pool2.run(load_only, FORMS[form], path, RenamedCopies)


class Colliding(AdamModule):
    """Has the name that torch.compile gives to what it wraps."""

    def __init__(self, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.model.part = torch.nn.Module()
        self.model.part._orig_mod = torch.nn.Module()
        self.model.part.register_buffer("value", torch.full((2,), 1.0 * seed))
        self.model.part._orig_mod.register_buffer("value", torch.full((2,), 2.0 * seed))


@pytest.mark.parametrize("form", forms("shards", "replicated"))
@pytest.mark.every_case
def test_names_that_collide(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Are refused, as wrappers are left out of names in every form."""
    for found in pool2.run(refused, FORMS[form], str(tmp_path / "last.ckpt"), Colliding):
        assert "two entries of the state have one name" in found
