"""States of optimizers of every form come back, or are refused at the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.optimizers import OPTIMIZER_STATES, PARAMETER_NAMES
from tests.checkpoint import optimizers
from tests.checkpoint.checkpoints import FORMS, AdamModule, fit, forms
from tests.checkpoint.optimizers import KINDS, Module
from tests.rank_pool import RankPool
from tests.trainer.exactness import Outcome, full_weights, weight_error
from tests.trainer.runs import CASE, TOLERANCE


def deviation(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return weight_error(Outcome(weights, None), Outcome(expected, None))


def _save(options: dict[str, Any], kind: Any, path: str) -> dict[str, Tensor]:
    """Weights of a run that is not stopped, of which a checkpoint is saved half-way."""
    trainer, _ = fit(options, Module(kind))
    trainer.save_checkpoint(path)
    return full_weights(fit(options, Module(kind), max_epochs=2)[1].model)


def _resume(options: dict[str, Any], kind: Any, path: str) -> dict[str, Tensor]:
    _, module = fit(options, Module(kind, CASE.seed + 2), ckpt_path=path, max_epochs=2)
    return full_weights(module.model)


def _assert_resumes(
    pool: RankPool, saving: dict[str, Any], resuming: dict[str, Any], kind: Any, path: Path
) -> None:
    expected = pool.run(_save, saving, kind, str(path))[0]
    for weights in pool.run(_resume, resuming, kind, str(path)):
        assert deviation(weights, expected) <= TOLERANCE


@pytest.mark.parametrize("form", forms("shards", "one_file_of_shards", "replicated_directory"))
@pytest.mark.every_case
def test_everything_comes_back(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Keys that are no tensors, own entries, names with dots, nesting, lists, whole and local tensors."""
    _assert_resumes(pool2, FORMS[form], FORMS[form], optimizers.Everything, tmp_path / "last.ckpt")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_each_kind_comes_back(pool2: RankPool, tmp_path: Path, form: str, kind: str) -> None:
    """Alone, which shows what is wrong with the test of all."""
    _assert_resumes(pool2, FORMS[form], FORMS[form], KINDS[kind], tmp_path / "last.ckpt")


BOTH_ENGINES = [name for name in KINDS if name not in ("WholeMomentum", "LocalMomentum")]


@pytest.mark.parametrize(
    ("saving", "resuming", "kind"),
    [
        ("shards", "replicated", "InGroups"),
        ("replicated", "shards", "Lookahead"),
        *(
            pytest.param(saving, resuming, kind, marks=pytest.mark.sweep)
            for saving, resuming in (
                ("shards", "replicated"),
                ("one_file_of_shards", "replicated"),
                ("replicated", "shards"),
                ("replicated_directory", "one_file_of_shards"),
            )
            for kind in BOTH_ENGINES
        ),
    ],
)
@pytest.mark.every_case
def test_under_the_other_engine(
    pool2: RankPool, tmp_path: Path, saving: str, resuming: str, kind: str
) -> None:
    """Whole tensors become shards, and the reverse."""
    _assert_resumes(pool2, FORMS[saving], FORMS[resuming], KINDS[kind], tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    "kind", ["Lookahead", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in BOTH_ENGINES)]
)
@pytest.mark.every_case
def test_consolidated(pool2: RankPool, tmp_path: Path, kind: str) -> None:
    """One file that is made of a directory holds the same."""
    path = tmp_path / "last.ckpt"
    whole = tmp_path / "whole.ckpt"
    expected = pool2.run(_save, FORMS["shards"], KINDS[kind], str(path))[0]
    assert main(["consolidate", str(path), str(whole)]) == 0
    for weights in pool2.run(_resume, FORMS["one_file_of_shards"], KINDS[kind], str(whole)):
        assert deviation(weights, expected) <= TOLERANCE


def _refused(options: dict[str, Any], kind: Any, path: str) -> str:
    trainer, _ = fit(options, Module(kind))
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(path)
    return str(raised.value)


@pytest.mark.parametrize("form", ["shards", pytest.param("one_file_of_shards", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("kind", "entry"), [(optimizers.InObjects, "hidden.objects"), (optimizers.OtherOnEachRank, "scale")]
)
@pytest.mark.every_case
def test_what_could_not_be_loaded_is_refused(
    pool2: RankPool, tmp_path: Path, form: str, kind: Any, entry: str
) -> None:
    """At the first save, with the entry and the way out, on every rank."""
    path = tmp_path / "last.ckpt"
    for message in pool2.run(_refused, FORMS[form], kind, str(path)):
        assert f"state.model.embedding.weight.{entry}" in message
        assert "data_parallel='ddp'" in message
    assert not path.exists()


def _save_as_adam(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    trainer, _ = fit(options, AdamModule())
    trainer.save_checkpoint(path)
    return full_weights(fit(options, AdamModule(), max_epochs=2)[1].model)


def _resume_as_adam(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    return full_weights(fit(options, AdamModule(CASE.seed + 2), ckpt_path=path, max_epochs=2)[1].model)


@pytest.mark.parametrize("form", forms("shards"))
def test_checkpoints_of_earlier_releases(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Directories were without the optimizers' trees, and files of a replicated model without names."""
    path = tmp_path / "last.ckpt"
    expected = pool2.run(_save_as_adam, FORMS[form], str(path))[0]
    file = path / "meta.pt" if path.is_dir() else path
    content = torch.load(file, weights_only=False)
    content.pop(OPTIMIZER_STATES, None)
    content.pop(PARAMETER_NAMES, None)
    torch.save(content, file)
    for other in ("shards", "replicated"):
        for weights in pool2.run(_resume_as_adam, FORMS[other], str(path)):
            assert deviation(weights, expected) <= TOLERANCE
