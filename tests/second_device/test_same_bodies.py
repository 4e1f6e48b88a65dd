"""Fits on the second device: the bodies that run on the CPU, with ranks that have another device (`conftest.py`).

What is imported here is collected here. One set of parameters of each runs by default, the others in the
sweep. `-k test_cell -m "sweep or not sweep" --support-table
benchmarks/results/support_cpu2.md` writes how much of the matrix of support has run.
"""

# ruff: noqa: F401

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_automodel import AutomodelStrategy
from tests.checkpoint.test_saving import (
    test_failure_in_the_background,
    test_training_goes_on_while_a_checkpoint_is_written,
)
from tests.checkpoint.test_shapes import test_state_that_is_not_there_yet
from tests.data.test_padded_training import test_equals_one_process
from tests.data.test_uneven_inputs import test_an_epoch_that_ends_on_one_rank_alone
from tests.failure.test_supervisor import test_nothing_is_left_after_a_failure_that_was_caught
from tests.gradients.test_chunked_loss import test_trained
from tests.gradients.test_final_gradients import (
    test_a_failed_backward_leaves_what_stood_there,
    test_misuse_raises,
    test_plain_backward_is_averaged_by_fsdp2,
    test_what_users_write,
)
from tests.gradients.test_own_backward import test_a_backward_that_edits_gradients, test_backwards_in_a_hook
from tests.markdown import merged_table, write_section
from tests.rank_pool import RankPool
from tests.resume.test_fit import test_from_everywhere
from tests.trainer.runs import LabelledModule, loader, make_trainer
from tests.trainer.support import CELLS, FEATURES, LAYOUTS, PRECISIONS, Cell
from tests.trainer.test_evaluation import test_around_fits
from tests.trainer.test_exactness import test_weights_equal_one_process
from tests.trainer.test_layouts import test_use_that_differs_between_ranks
from tests.trainer.test_lightning_callbacks import test_early_stopping, test_on_exception_checkpoint
from tests.trainer.test_models import test_unused_once_it_is_unfrozen
from tests.trainer.test_support import check

BY_DEFAULT = {
    Cell("FSDP2", "16-mixed", "clip by norm"),
    Cell("FSDP2", "64-true", "CPU offload"),
    Cell("DDP", "64-true", "accumulation, short window"),
    Cell("CP x FSDP2", "64-true", "non-finite check, norm tracked"),
}
"""Of the matrix of support; the others are a sweep."""


@pytest.mark.every_case
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in BY_DEFAULT else [pytest.mark.sweep]) for cell in CELLS],
    ids=str,
)
def test_cell(cell: Cell, request: pytest.FixtureRequest, table: dict[Cell, str]) -> None:
    """The matrix of support; float16 trains here, too."""
    ranks: RankPool = request.getfixturevalue(f"pool{LAYOUTS[cell.layout].world_size}")
    table[cell] = "failed"
    table[cell], _ = check(cell, ranks)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[Cell, str]]:
    """How each cell went; with --support-table, it is written at the end."""
    found: dict[Cell, str] = {}
    yield found
    if (path := request.config.getoption("--support-table")) and found:
        write_section(Path(path), "second device", as_markdown(found))


def as_markdown(found: dict[Cell, str]) -> str:
    """How many features passed or were refused, by precision and layout."""
    layouts = [layout for layout in LAYOUTS if any(cell.layout == layout for cell in found)]
    rows = {}
    for precision in PRECISIONS:
        counts = {layout: Counter[str]() for layout in layouts}
        for cell, status in found.items():
            if cell.precision == precision:
                counts[cell.layout][status] += 1
        rows[precision] = [
            ", ".join(f"{number} {word}" for word, number in count.items()) or "not selected"
            for count in counts.values()
        ]
    intro = (
        f"{datetime.date.today()}, torch {torch.__version__}: how many of the {len(FEATURES)} features"
        " passed on the second device of `tests/second_device`, by the tolerances of the tables above, and"
        " how many were refused as there."
    )
    return "\n".join([intro, "", *merged_table(["precision", *layouts], rows, "precisions")]) + "\n"


class WithStates(LabelledModule):
    """Its optimizer comes with states on the host, as from an earlier fit; notes where training finds them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        for parameter in self.parameters():
            first, second = (torch.zeros_like(parameter).cpu() for _ in range(2))
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": first,
                "exp_avg_sq": second,
            }
        return self.optimizer

    def on_train_start(self) -> None:
        self.found = {
            (parameter.device.type, key, value.device.type)
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }


def _places_of_states(options: dict[str, Any]) -> set[tuple[str, str, str]]:
    module = WithStates()
    make_trainer(AutomodelStrategy(**options), limit_train_batches=1).fit(module, loader())
    return module.found


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "place"), [({"cpu_offload": True}, "cpu"), ({"data_parallel": "ddp"}, "hostdev")]
)
def test_states_of_an_earlier_fit_follow_their_parameters(
    pool2: RankPool, options: dict[str, Any], place: str
) -> None:
    """Offloaded shards stay on the host, and counters of steps where an optimizer has made them."""
    expected = {(place, "step", "cpu")} | {(place, key, place) for key in ("exp_avg", "exp_avg_sq")}
    assert pool2.run(_places_of_states, options) == [expected] * 2
