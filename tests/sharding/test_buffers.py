"""What each rank has a copy of: buffers and parameters.

Running statistics are each rank's own within a window, rank 0's at its start, in evaluation and in checkpoints.
Parameters that ranks write differently raise on every rank, at the latest when training ends.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.checkpoint.checkpoints import Saves
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch
from tests.trainer.runs import CASE, LabelledModule, loader, make_trainer

WIDTH = 3
STEPS = 6
ONES = torch.ones(8, WIDTH, dtype=torch.float64)


class Normalised(LightningModule):
    """Notes its running mean at the start and the end of each training step, and in each validation step."""

    def __init__(self, wraps: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        self.model = nn.Sequential(checkpoint_wrapper(norm) if wraps else norm, nn.Linear(WIDTH, 1)).double()
        self.seen: dict[str, list[Tensor]] = {"start": [], "end": [], "validation": [], "saved": []}

    def note(self, when: str) -> None:
        self.seen[when].append(self.model[0].running_mean.detach().clone())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.note("start")
        loss = self.model(batch).square().mean()
        self.note("end")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("validation")
        self.model(batch)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:  # behind a callback that saves in the middle of a window of three micro-batches
            self.note("saved")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(module: Any, options: dict[str, Any], rows: Tensor, validates: bool = True, **settings: Any) -> Any:
    """Train on batches of four rows; the trained module."""
    data = DataLoader(rows, batch_size=4)
    trainer = make_trainer(AutomodelStrategy(count="samples", **options), **settings)
    trainer.fit(module, data, data if validates else None)
    return module


def _train(options: dict[str, Any], folder: Path, wraps: bool = False) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(4 * STEPS, WIDTH, generator=generator, dtype=torch.float64)
    settings = {"accumulate_grad_batches": 3, "val_check_interval": 5, "limit_val_batches": 1}
    callbacks = [Saves("on_train_batch_end", 2, folder / "saved"), WeightAveraging(use_buffers=True)]
    return _fit(Normalised(wraps), options, rows, **settings, callbacks=callbacks).seen


LAYOUTS: dict[str, dict[str, Any]] = {"fsdp2": {}, "ddp": {"data_parallel": "ddp"}}


@pytest.mark.every_case
@pytest.mark.parametrize(("layout", "wraps"), [("fsdp2", False), ("ddp", False), ("ddp", True)])
def test_all_ranks_evaluate_one_model(pool2: RankPool, layout: str, wraps: bool, tmp_path: Path) -> None:
    """In the middle of a window too, as docs/layouts.md has it; an average of weights is what validation sees.

    Also in torch's wrapper for activation checkpointing, which state dicts do not name. A save there leaves each rank
    its own; `tests/checkpoint/test_module_states.py` has what is in a checkpoint.
    """
    first, second = pool2.run(_train, LAYOUTS[layout], tmp_path, wraps)
    assert first["validation"]
    assert all(map(torch.equal, first["validation"], second["validation"]))
    for seen in (first, second):
        assert wraps or torch.equal(seen["saved"][0], seen["end"][1])  # the wrapper's second forward goes on
    equal = [torch.equal(one, other) for one, other in zip(first["start"], second["start"], strict=True)]
    assert equal[0]
    assert equal[3]  # a window has three micro-batches
    assert not any(torch.equal(one, other) for one, other in zip(first["end"], second["end"], strict=True))


def test_whoever_switches_broadcasts_off_gets_none(pool2: RankPool, tmp_path: Path) -> None:
    options = {"data_parallel": "ddp", "ddp_kwargs": {"broadcast_buffers": False}}
    first, second = pool2.run(_train, options, tmp_path)
    for when in ("validation", "saved"):
        assert not any(torch.equal(one, other) for one, other in zip(first[when], second[when], strict=True))


class Collects(Normalised):
    """Keeps rows of each batch, more of them on each further rank, or less."""

    def __init__(self, persistent: bool, sign: int) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, WIDTH), persistent)
        self.sign = sign

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        rows = 2 + self.sign * dist.get_rank()
        self.bank = torch.cat([self.bank, batch[:rows].float()])


def _collect(persistent: bool, sign: int, options: dict[str, Any], validates: bool) -> str | torch.Size:
    try:
        return _fit(Collects(persistent, sign), options, ONES, validates).bank.shape
    except ValueError as error:
        return str(error)


def _collect_all(layout: str) -> tuple[list[Any], list[Any]]:
    """Caches that grow and shrink with the rank; and statistics, where the fit validates and where it does not."""
    options = LAYOUTS[layout]
    return (
        [_collect(False, sign, options, validates=True) for sign in (1, -1)],
        [_collect(True, 1, options, validates) for validates in (True, False)],
    )


@pytest.mark.every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_of_another_shape_on_each_rank(pool2: RankPool, layout: str) -> None:
    """A cache outside of the state dict is each rank's own; what a checkpoint would hold is refused.

    In a validation, or else where the fit ends: gloo would copy a part of rank 0's over it.
    """
    for rank, (caches, refusals) in enumerate(pool2.run(_collect_all, layout)):
        assert caches == [torch.Size([4 + 2 * sign * rank, WIDTH]) for sign in (1, -1)]
        for message in refusals:
            assert message.startswith(
                "A buffer of Collects differs on the ranks that hold different data: bank is [4, 3] of"
                " torch.float32 on rank 0 and [6, 3] of torch.float32 on rank 1 of these. All ranks must"
            )


class Late(Collects):
    """Its statistic is None until the first batch."""

    def __init__(self) -> None:
        super().__init__(persistent=True, sign=0)
        self.register_buffer("largest", None)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.largest = batch.amax() + dist.get_rank()
        self.bank = None if batch_idx else self.bank


def _note_late(options: dict[str, Any]) -> Tensor:
    return _fit(Late(), options, ONES).largest


@pytest.mark.every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_may_come_and_go(pool2: RankPool, layout: str) -> None:
    """One that was None when the module was built is made equal too."""
    first, second = pool2.run(_note_late, LAYOUTS[layout])
    assert first == second == 1


# --- Parameters -------------------------------------------------------------------------------------------------------

ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel": "ddp"}),
    "fsdp2": (2, {}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "local sgd": (
        2,
        {"data_parallel": "ddp", "ddp_comm_hook": debugging_hooks.noop_hook, "count_window_ahead": True},
    ),
}


class DrawsByRank(LabelledModule):
    """Resets its head in mid-training, from random numbers that are each rank's own, or the same."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike = alike

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            torch.manual_seed(0 if self.alike else dist.get_rank())
            with torch.no_grad():
                self.model.head.weight.normal_()


def _draw(alike: bool, options: dict[str, Any], validates: bool) -> tuple[str, int]:
    """What is raised, and after how many batches."""
    settings = {"val_check_interval": 4, "limit_val_batches": int(validates)}
    trainer = make_trainer(AutomodelStrategy(**options), **settings)
    data = loader(replace(CASE, num_ranks=dist.get_world_size()))
    message = ""
    try:
        trainer.fit(DrawsByRank(alike), data, data if validates else None)
    except RuntimeError as error:
        message = str(error)
    return message, trainer.fit_loop.total_batch_idx + 1


@pytest.mark.every_case
@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("engine", ["ddp", pytest.param("hsdp", marks=pytest.mark.sweep)])
def test_drifting_copies_raise(pool2: RankPool, pool4: RankPool, engine: str, validates: bool) -> None:
    """At the next validation, or at the end."""
    num_ranks, options = ENGINES[engine]
    pool = pool2 if num_ranks == 2 else pool4
    for message, num_batches in pool.run(_draw, False, options, validates):
        assert message.startswith("Ranks hold different values of model.head.weight: 1 of ")
        assert num_batches == (4 if validates else 8)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "engine", ["ddp", "fsdp2", "local sgd", pytest.param("hsdp", marks=pytest.mark.sweep)]
)
def test_equal_copies_do_not(pool2: RankPool, pool4: RankPool, engine: str) -> None:
    """Drawn alike, or held in parts; nor do those that a communication hook lets drift."""
    num_ranks, options = ENGINES[engine]
    pool = pool2 if num_ranks == 2 else pool4
    assert [message for message, _ in pool.run(_draw, True, options, True)] == [""] * num_ranks
