"""The check at the first step under context parallelism: it sees one bad layer, and leaves no trace of itself."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_automodel import AutomodelStrategy
from lightning_automodel.context_parallel.check import FirstStepCheck
from tests.context_parallel.test_steps import (
    HEADS,
    KEY_HEADS,
    Block,
    DecoderModule,
    Run,
    batches_by_rank,
    data_rank,
)
from tests.rank_pool import RankPool
from tests.trainer.exactness import Batch, full_weights
from tests.trainer.plain import fill
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import make_trainer


class AttendsByHand(Block):
    """Writes the textbook's formula, within its slice."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        key, value = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (key, value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        return scores.masked_fill(~torch.ones_like(scores).tril().bool(), -math.inf).softmax(-1) @ value


class Deep(DecoderModule):
    """Four blocks, the third of a class of its own."""

    third: type[Block] = Block

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.blocks = nn.ModuleList((self.third if index == 2 else Block)(True) for index in range(4))
        fill(self.model)


class OneByHand(Deep):
    third = AttendsByHand


class CountsFromZero(DecoderModule):
    """Takes no positions from the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step(
            {name: each for name, each in batch.items() if name != "position_ids"}, batch_idx
        )


class CallsItself(DecoderModule):
    """Is the model itself, with positions of its own."""

    def forward(self, batch: Batch) -> Tensor:
        self.log("seen", 1.0)
        ids = batch["input_ids"]
        hidden = self.model.embedding(ids) + self.model.positions(torch.arange(ids.shape[1]))
        for block in self.model.blocks:
            hidden = block(hidden, None)
        return self.model.head(hidden)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch).flatten(0, 1), batch["labels"].flatten())


BATCH = {"input_ids": torch.arange(2 * 18).view(2, 18) % 11, "labels": torch.ones(2, 18, dtype=torch.long)}
LAYER = "model.blocks.2.out (Linear) gives something else on slices of sequences than on whole ones: off by"


class Pools(DecoderModule):
    """Takes the first position of a sequence, which is that of the slice."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.head.register_forward_hook(lambda _, __, output: output[:, 0])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch), batch["labels"][:, 0])


class Draws(DecoderModule):
    """Adds noise, in evaluation too."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.embedding.register_forward_hook(lambda _, __, output: output + torch.randn_like(output))


class Normalises(DecoderModule):
    """Takes statistics over positions, in training alone."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.norm = nn.BatchNorm1d(self.model.embedding.embedding_dim, dtype=torch.float64)
        self.model.blocks[1].register_forward_hook(lambda _, __, output: self.model.norm(output.mT).mT)


class EvaluatesByHand(OneByHand):
    """Has nothing to refuse in training."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        pass


def refused(
    make: type[DecoderModule], sentence: str, validates_first: bool = False, **options: Any
) -> Refused:
    """On slices."""
    return Refused(
        lambda: make(Run()),
        (sentence,),
        lambda: [BATCH],
        {"context_parallel_size": 2, **options},
        validates_first=validates_first,
    )


REFUSED = {
    "one layer by hand": refused(OneByHand, LAYER),
    "compiled": refused(OneByHand, LAYER, compile={"backend": "eager"}),
    "statistics": refused(Normalises, "model.blocks.1 (Block) gives something else on slices"),
    "in evaluation alone": refused(EvaluatesByHand, LAYER, validates_first=True),
    "other positions": refused(CountsFromZero, "gives something else on slices"),
    "pooled": refused(Pools, "gives something else on slices"),
    "random": refused(Draws, "(Or it draws random numbers in evaluation mode"),
    "its own, replicated": refused(
        CallsItself, "model.blocks.0.norm (LayerNorm) gives", data_parallel="ddp"
    ),
}


def test_what_no_step_tells_of_itself_is_seen(pool2: RankPool) -> None:
    check_refused(pool2, __name__)


class Remembers(DecoderModule):
    """Drops out, keeps statistics and counts its calls."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.blocks[0].norm = nn.Sequential(self.model.blocks[0].norm, nn.Dropout(0.3))
        self.model.mean = MeanMetric()
        self.model.register_buffer("num_calls", torch.zeros(()))
        self.model.register_forward_hook(self._count)
        self.logged: list[float] = []

    def _count(self, model: Any, args: Any, output: Tensor) -> Tensor:
        model.num_calls += 1
        model.mean.update(output.detach())
        return output * model.num_calls.cos().add(2)  # which the backward keeps

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_end(self) -> None:
        self.logged = [float(self.trainer.callback_metrics["loss"]), float(self.model.mean.compute())]


def fit_checked(run: Run, is_checked: bool) -> tuple[dict[str, Tensor], list[float], Tensor]:
    """Runs on every rank: weights and buffers, logged values, random state."""
    torch.manual_seed(5 + dist.get_rank())
    module = Remembers(run)
    strategy = AutomodelStrategy(**run.options)
    with patch.object(FirstStepCheck, "check", FirstStepCheck.check if is_checked else lambda *_: None):
        make_trainer(strategy, accumulate_grad_batches=run.accumulation, log_every_n_steps=1).fit(
            module, DataLoader(batches_by_rank(run)[data_rank(run)], batch_size=None)
        )
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return full_weights(module.model) | buffers, module.logged, torch.get_rng_state()


KINDS = {
    "fsdp2": Run(reshard=True),
    "kept": Run(reshard=False, recompute=True),
    "undeferred": Run(defer=False, accumulation=1),
    "ddp": Run(layout="ddp"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_no_trace(pool2: RankPool, kind: str) -> None:
    """Bit for bit what there is without it."""
    run = KINDS[kind]
    for checked, unchecked in zip(
        pool2.run(fit_checked, run, True), pool2.run(fit_checked, run, False), strict=True
    ):
        assert checked[0].keys() == unchecked[0].keys()
        for name, value in checked[0].items():
            assert torch.equal(value, unchecked[0][name]), name
        assert checked[1] == unchecked[1]
        assert torch.equal(checked[2], unchecked[2])
