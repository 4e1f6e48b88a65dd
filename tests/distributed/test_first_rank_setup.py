"""Who prepares and sets up first, and that a failure there reaches every rank before the next hook."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, destroy_global_state
from tests.failure.faults import Model
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import micro_batches
from tests.trainer.runs import CASE, SILENT, LabelledModule, make_trainer

SLOW_S = 0.3


class Prepares(Model):
    """Notes its hooks in a file, one line each; fails where it is told to."""

    def __init__(self, notes: Path, fails_in: str = "") -> None:
        super().__init__()
        self._notes = notes
        self._fails_in = fails_in

    def _note(self, hook: str) -> None:
        with self._notes.open("a") as file:
            file.write(f"{hook} {dist.get_rank()}\n")
        if self._fails_in == hook and dist.get_rank() == 0:
            raise ValueError("the disk is full")

    def prepare_data(self) -> None:
        self._note("prepare_data")

    def setup(self, stage: str) -> None:
        self._note("setup")
        if dist.get_rank() == 0:
            time.sleep(SLOW_S)
        self._note("end of setup")

    def train_dataloader(self) -> list[Any]:
        return []


def _fit(notes: Path, fails_in: str, first_rank_setup: bool) -> None:
    make_trainer(AutomodelStrategy(first_rank_setup=first_rank_setup)).fit(Prepares(notes, fails_in))


def test_first_rank_sets_up_first(pool2: RankPool, tmp_path: Path) -> None:
    """The other rank starts when the first has ended."""
    pool2.run(_fit, tmp_path / "notes", "", first_rank_setup=True)
    order = (tmp_path / "notes").read_text().splitlines()
    assert order == ["prepare_data 0", "setup 0", "end of setup 0", "setup 1", "end of setup 1"]


def test_all_ranks_set_up_at_once_by_default(pool2: RankPool, tmp_path: Path) -> None:
    """The negative: without the option the slow rank is overtaken."""
    pool2.run(_fit, tmp_path / "notes", "", first_rank_setup=False)
    order = (tmp_path / "notes").read_text().splitlines()
    assert order.index("end of setup 1") < order.index("end of setup 0")


@pytest.mark.parametrize(
    ("fails_in", "first_rank_setup", "left_out"),
    [("prepare_data", False, "setup"), ("prepare_data", True, "setup"), ("setup", True, "setup 1")],
)
def test_failure_of_the_first_rank(
    pool2: RankPool, tmp_path: Path, fails_in: str, first_rank_setup: bool, left_out: str
) -> None:
    """Every rank raises, with the cause, and no rank reaches what comes after."""
    with pytest.raises(RankError) as caught:
        pool2.run(_fit, tmp_path / "notes", fails_in, first_rank_setup=first_rank_setup)
    first, other = (caught.value.failures[rank].splitlines()[-1] for rank in range(2))
    assert first == "ValueError: the disk is full"
    assert re.fullmatch(r".*RankFailedError: rank 0 on .*ValueError: the disk is full", other)
    assert left_out not in (tmp_path / "notes").read_text()


def _blocks(notes: Path) -> tuple[bool, bool]:
    strategy = AutomodelStrategy()
    pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, logger=False)
    with strategy.first_rank_per_node() as is_first:
        if not notes.exists():
            with notes.open("a") as file:
                file.write("x")
    with strategy.first_rank_per_node(scope="global", timeout=1.0) as is_global_first:
        pass
    return is_first, is_global_first


def test_block_of_the_strategy(pool2: RankPool, tmp_path: Path) -> None:
    """The others find the work done."""
    assert pool2.run(_blocks, tmp_path / "notes") == [(True, True), (False, False)]
    assert (tmp_path / "notes").read_text() == "x"


class Renamed(AutomodelStrategy):
    """As if another version of Lightning had another name for a barrier."""

    renamed = ""

    def barrier(self, name: str | None = None) -> None:
        super().barrier("another name" if name == self.renamed else name)


@pytest.mark.parametrize(
    ("stage", "name"),
    [("fit", "pre_setup"), ("fit", "post_setup"), ("validate", "run-stage")],
)
def test_a_barrier_that_does_not_come(name: str, stage: str) -> None:
    """What is done at it is not left out in silence."""
    strategy = Renamed()
    strategy.renamed = name
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **SILENT)
    with pytest.raises(RuntimeError, match=rf"has not called strategy\.barrier\('{name}'\)"):
        getattr(trainer, stage)(LabelledModule(), DataLoader(micro_batches(CASE)[0], batch_size=None))
    destroy_global_state()
