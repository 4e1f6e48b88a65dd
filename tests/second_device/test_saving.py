"""A checkpoint is written beside training: on the rank's own device, on a stream of its own, by way of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, Trainer

from tests.checkpoint.checkpoints import fit
from tests.rank_pool import RankPool


class Saves(Callback):
    """Saves once, in mid-training."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def _written(path: str, in_background: bool) -> tuple[int, bool, str, bool]:
    """Device and stream that are current while it is written, and the backend of the group that objects go through.

    And whether all that is written lies in pinned memory.
    """
    import tests.second_device.device  # noqa: F401  registers the device

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
        fit({"async_checkpoint": in_background}, callbacks=[Saves(path)])
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.every_case
def test_where_it_is_written(pool2: RankPool, tmp_path: Path, in_background: bool) -> None:
    """Torch would synchronise the stream of training, and make a context on the first device for each rank."""
    found = pool2.run(_written, str(tmp_path / "checkpoint"), in_background)
    assert found == [(rank, not in_background, "gloo", in_background) for rank in range(2)]
