"""Each rank trains on its own share of a data set, without the user doing anything for it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.runs import LabelledModule, make_trainer


class Records(LabelledModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch["labels"].flatten().tolist()
        return super().training_step({**batch, "labels": batch["labels"] % 11}, batch_idx)


def _seen(options: dict[str, Any]) -> list[int]:
    rows = [
        {"input_ids": torch.ones(1, dtype=torch.long), "labels": torch.tensor([index])} for index in range(8)
    ]
    module = Records()
    trainer = make_trainer(AutomodelStrategy(**options), use_distributed_sampler=True)
    trainer.fit(module, DataLoader(rows, batch_size=2))
    return module.seen


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_distributed_sampler_is_injected(pool2: RankPool, engine: str) -> None:
    """Together the ranks see every sample once, and none sees them all."""
    shares = pool2.run(_seen, {"data_parallel": engine})
    assert [len(share) for share in shares] == [4, 4]
    assert sorted(shares[0] + shares[1]) == list(range(8))


class Rows(Dataset):
    """Gives many samples at once."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, indices: list[int]) -> dict[str, Tensor]:
        return {
            "input_ids": torch.ones(len(indices), 1, dtype=torch.long),
            "labels": torch.tensor(indices)[:, None],
        }


class RowLoader(DataLoader):
    """Like scvi-tools' loader: reads a batch at once, unless it is given a sampler."""

    def __init__(self, dataset: Dataset, sampler: Any = None, **kwargs: Any) -> None:
        if sampler is None:
            sampler = BatchSampler(SequentialSampler(dataset), 2, drop_last=False)
            kwargs["batch_size"] = None
        super().__init__(dataset, sampler=sampler, **kwargs)


def _shapes_and_warnings(loader: type[DataLoader]) -> tuple[list[tuple[int, ...]], list[str]]:
    shapes = []

    class Shapes(LabelledModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            shapes.append(tuple(batch["labels"].shape))
            return super().training_step(
                {"input_ids": batch["input_ids"].view(-1, 1), "labels": batch["labels"].view(-1, 1)},
                batch_idx,
            )

        def train_dataloader(
            self,
        ) -> DataLoader:  # in a hook, Lightning repeats the arguments that it was made with
            batches = BatchSampler(SequentialSampler(Rows()), 2, drop_last=False)
            return (
                RowLoader(Rows())
                if loader is RowLoader
                else DataLoader(Rows(), sampler=batches, batch_size=None)
            )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(AutomodelStrategy(), use_distributed_sampler=True)
        trainer.fit(Shapes())
    return shapes, [str(each.message) for each in caught if "yields whole batches" in str(each.message)]


@pytest.mark.every_case
@pytest.mark.parametrize("loader", [RowLoader, DataLoader])
def test_batches_of_batches(pool2: RankPool, loader: type[DataLoader]) -> None:
    """A loader that Lightning has made anew and that collates batches is told of; one that passes them on is not."""
    (shapes, told), (_, told_elsewhere) = pool2.run(_shapes_and_warnings, loader)
    assert told_elsewhere == []
    if loader is DataLoader:
        assert (shapes, told) == ([(2, 1), (2, 1)], [])
    else:
        assert shapes == [(1, 2, 1), (1, 2, 1)]
        assert len(told) == 1
        assert (
            "the RowLoader that Lightning has made of it for several ranks collates batch_size=1" in told[0]
        )
