"""Streaming libraries with a state of their own go on within an epoch, and in the order of the next.

They are not among the dependencies of the tests: `pip install litdata mosaicml-streaming`.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from tests.rank_pool import RankPool
from tests.resume.resuming import Saver, Setting, disturb, make_trainer

NUM_ROWS = 44
STOPS = (
    ("on_train_batch_end", 3),
    ("on_train_epoch_end", 1),
    ("on_train_batch_start", 7),
    ("on_train_batch_end", 8),
)


class Noting(LightningModule):
    """Notes which rows it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1).double()
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.0)
        self.rows: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        self.rows.append(batch["row"].flatten().tolist())
        rows = batch["row"].double().view(-1, 1) / NUM_ROWS
        return {"loss": (self.layer(rows) - rows.sin()).square().mean(), "num_label_tokens": len(rows)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def mosaic() -> Any:
    """The library, without its part for pictures, which needs torchvision."""
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    return pytest.importorskip("streaming")


def mosaic_loader(folder: Path, num_workers: int) -> Any:
    """Needs the variables of torchrun, which Lightning does not set."""
    streaming = mosaic()
    size = str(dist.get_world_size())
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_WORLD_SIZE=size, WORLD_SIZE=size)
    data = streaming.StreamingDataset(
        local=str(folder), shuffle=True, batch_size=2, predownload=4, num_canonical_nodes=1
    )
    return streaming.StreamingDataLoader(data, batch_size=2, num_workers=num_workers)


def litdata_loader(folder: Path, num_workers: int) -> Any:
    import litdata

    data = litdata.StreamingDataset(str(folder), shuffle=True, seed=5)
    return litdata.StreamingDataLoader(data, batch_size=2, num_workers=num_workers)


LOADERS = {"streaming": mosaic_loader, "litdata": litdata_loader}


def row_of(index: int) -> dict[str, int]:
    return {"row": index}


def write(library: str, folder: Path) -> None:
    """In files of a few rows."""
    if library == "streaming":
        with mosaic().MDSWriter(out=str(folder), columns={"row": "int"}, size_limit=128) as writer:
            for index in range(NUM_ROWS):
                writer.write(row_of(index))
    else:
        import litdata

        litdata.optimize(
            row_of, list(range(NUM_ROWS)), str(folder), chunk_size=8, num_workers=1, verbose=False
        )


FITS = itertools.count()


def fit(
    setting: Setting, library: str, folder: Path, num_workers: int, *savers: Callback, path: Any = None
) -> Any:
    """Rows that were seen, and weights."""
    disturb(next(FITS))
    trainer = make_trainer(setting, list(savers))
    module = Noting()
    trainer.fit(module, LOADERS[library](folder, num_workers), ckpt_path=path)
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return module.rows, [p.tolist() for p in parameters]


def compared(options: dict[str, Any], library: str, folder: Path, num_workers: int, limit: Any) -> list[str]:
    """Runs on every rank: what differs where a fit goes on."""
    trainer = {"max_epochs": 3, "limit_train_batches": limit, "limit_val_batches": 0, "precision": "64-true"}
    setting = Setting(options, trainer)
    savers = [Saver(hook, when, folder.parent / f"{hook}-{when}") for hook, when in STOPS]
    rows, weights = fit(setting, library, folder, num_workers, *savers)
    found = [] if len({str(rows[start : start + 4]) for start in (0, limit or 11)}) == 2 else ["no shuffle"]
    for saver in savers:
        seen, resumed = fit(setting, library, folder, num_workers, path=saver.path)
        if not seen or seen != rows[len(rows) - len(seen) :] or resumed != weights:
            found.append(f"{saver.path.name}: {seen[:4]} of {len(seen)}, not of {rows}")
    return found


@pytest.mark.parametrize("library", LOADERS)
@pytest.mark.parametrize(
    ("num_workers", "limit"), [(0, None), (0, 5), pytest.param(2, None, marks=pytest.mark.sweep)]
)
@pytest.mark.every_case
@pytest.mark.timeout(600)
def test_goes_on(pool2: RankPool, library: str, num_workers: int, limit: int | None, tmp_path: Path) -> None:
    """Each rank with its own rows, in the order that they have in each epoch."""
    mosaic() if library == "streaming" else pytest.importorskip(library)
    write(library, tmp_path / "data")
    options = {"data_parallel": "ddp"}
    for differing in pool2.run(
        compared, options, library, tmp_path / "data", num_workers, limit, timeout_s=400
    ):
        assert differing == []
