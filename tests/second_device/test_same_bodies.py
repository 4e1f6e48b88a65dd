"""Fits on the second device: the bodies that run on the CPU, with ranks that have another device (`conftest.py`).

What is imported here is collected here. One set of parameters of each runs by default, the others in the
sweep.
"""

# ruff: noqa: F401

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_automodel import AutomodelStrategy
from tests.checkpoint.checkpoints import Saves, fit
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
from tests.trainer.exactness import full_weights
from tests.trainer.runs import LabelledModule, loader, make_trainer, sampled
from tests.trainer.support import CELLS, FEATURES, LAYOUTS, PRECISIONS, Cell
from tests.trainer.test_exactness import test_weights_equal_one_process
from tests.trainer.test_layouts import test_unused_once_it_is_unfrozen, test_use_that_differs_between_ranks
from tests.trainer.test_lightning_callbacks import test_early_stopping
from tests.trainer.test_support import check
from tests.trainer.test_trainer_features import test_around_fits

BY_DEFAULT = {
    Cell("FSDP2", "16-mixed", "clip by norm"),
    Cell("FSDP2", "64-true", "CPU offload"),
    Cell("DDP", "64-true", "accumulation, short window"),
    Cell("CP x FSDP2", "64-true", "non-finite check, norm tracked"),
}
"""Of the matrix of support; the others are a sweep."""


@pytest.mark.every_case
@pytest.mark.parametrize("cell", sampled(CELLS, BY_DEFAULT), ids=str)
def test_cell(cell: Cell, request: pytest.FixtureRequest) -> None:
    """The matrix of support; float16 trains here, too."""
    check(cell, request.getfixturevalue(f"pool{LAYOUTS[cell.layout].world_size}"))


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

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["of the step"] = True
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert "of the step" in batch


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
    """Offloaded shards stay on the host, and counters of steps where made; a step gets the batch itself."""
    expected = {(place, "step", "cpu")} | {(place, key, place) for key in ("exp_avg", "exp_avg_sq")}
    assert pool2.run(_places_of_states, options) == [expected] * 2


def _written(path: str, in_background: bool) -> tuple[int, bool, str, bool]:
    """Device and stream that are current while it is written, and the backend of the group that objects go through.

    And whether all that is written lies in pinned memory.
    """
    import tests.second_device.device

    found: list[tuple[int, bool, str, bool]] = []
    save = dcp.save

    def noted(state: Any, *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> Any:
        index = torch.accelerator.current_device_index()
        is_default = torch.accelerator.current_stream().stream_id == 0
        of_model = [each for key, each in state.items() if key.startswith("state_dict.")]
        is_pinned = bool(of_model) and all(each.to_local().is_pinned() for each in of_model)
        found.append((index, is_default, dist.get_backend(process_group), is_pinned))
        return save(state, *args, process_group=process_group, **kwargs)

    with mock.patch.object(dcp, "save", noted):
        fit({"async_checkpoint": in_background}, callbacks=[Saves("on_train_batch_end", 2, path)])
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.every_case
def test_where_it_is_written(pool2: RankPool, tmp_path: Path, in_background: bool) -> None:
    """Torch would synchronise the stream of training, and make a context on the first device for each rank."""
    found = pool2.run(_written, str(tmp_path / "checkpoint"), in_background)
    assert found == [(rank, not in_background, "gloo", in_background) for rank in range(2)]


def _trained(**options: Any) -> dict[str, torch.Tensor]:
    """Full weights after a fit with accumulation, clipping and validation."""
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        limit_val_batches=2,
    )
    module = LabelledModule()
    trainer.fit(module, loader(), loader())
    return full_weights(module)


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}], ids=["fsdp2", "ddp"])
def test_fits_are_those_of_the_plain_device(
    pool2: RankPool, nccl_pool2: RankPool, options: dict[str, Any]
) -> None:
    """To the bit."""
    expected, found = (pool.run(_trained, **options)[0] for pool in (pool2, nccl_pool2))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
