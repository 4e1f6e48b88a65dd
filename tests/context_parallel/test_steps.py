"""Context parallelism: ranks that share a batch and hold a slice of its sequences each, against one process.

The decoder attends by `context_parallel_attention`, with more heads than key heads and learned positions, so
that a slice that attends to itself alone, or that counts its positions from zero, is wrong. Lengths are
ragged and rarely divide by the number of chunks; many slices hold no label.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, EvaluationLoss, context_parallel_attention
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import Batch, full_weights, weight_error
from tests.trainer.plain import fill, plain_weights, sgd
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import TOLERANCE, make_trainer, warnings_of

PLAN = {
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "blocks.*.out": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
"""How tensor-parallel ranks share a `Decoder`: each attends with half of the heads."""

VOCABULARY = 11
WIDTH = 8
HEADS = 4
KEY_HEADS = 2
MAX_LENGTH = 21


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; fields as in `tests.trainer.cases.Case`, and the ranks that share a batch."""

    seed: int = 41
    layout: str = "fsdp2"
    num_ranks: int = 1
    context: int = 2
    tensor: int = 1
    accumulation: int = 2
    num_batches: int = 5
    gap: str = "none"
    told: str = "labels"
    loss_reduction: str = "mean"
    label_shift: int = 0
    clipping: str = "none"
    is_causal: bool = True
    padded: bool = False
    recompute: bool | str = False
    defer: bool = True
    reshard: bool | str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the strategy."""
        options: dict[str, Any] = {
            "context_parallel_size": self.context,
            "tensor_parallel_size": self.tensor,
            "label_shift": self.label_shift,
            "loss_reduction": self.loss_reduction,
            "activation_checkpointing": self.recompute,
        }
        if self.told in ("callable", "weights"):
            options["count_label_tokens"] = functools.partial(count_used, self)
        if self.layout == "ddp":
            return {**options, "data_parallel": "ddp"}
        replicas = self.num_ranks if self.layout == "hsdp" else 1
        options |= {"data_parallel_replicate_size": replicas, "defer_fsdp_grad_sync": self.defer}
        return {**options, "reshard_during_accumulation": self.reshard}

    @property
    def last_window(self) -> int:
        """Micro-batches of a rank in it."""
        return (self.num_batches - 1) % self.accumulation + 1

    @property
    def clip(self) -> dict[str, Any]:
        """Keywords of the Trainer."""
        if self.clipping == "none":
            return {}
        value = {"norm": 0.05, "value": 0.005}[self.clipping]
        return {"gradient_clip_val": value, "gradient_clip_algorithm": self.clipping}


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH * KEY_HEADS // HEADS) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norm(hidden)
        # [b, h, s, d]: a tensor-parallel rank has some of the heads.
        heads = (
            project(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = self.attend(*heads, mask)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return hidden + torch.tanh(self.feed_forward(hidden))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return context_parallel_attention(query, key, value, is_causal=self.is_causal, attention_mask=mask)


class Decoder(nn.Module):
    """Embeddings of tokens and positions, blocks, head."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(is_causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        fill(self)

    def forward(self, batch: Batch) -> Tensor:
        positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[-1]))
        hidden = self.embedding(batch["input_ids"]) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, batch.get("attention_mask"))
        return self.head(hidden)


def used_labels(run: Run, batch: Batch) -> Tensor:
    return batch["shift_labels" if run.label_shift else "labels"]


def count_used(run: Run, batch: Batch) -> int | float:
    if "weights" in run.told:
        return batch["weights"].sum().item()
    return int((used_labels(run, batch) != -100).sum())


class DecoderModule(LightningModule):
    """Trains a `Decoder` on slices and on whole batches alike."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.model = Decoder(run.is_causal)

    def configure_model(self) -> None:
        if self.run.tensor > 1:
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)

    def loss(self, batch: Batch, reduction: str) -> Tensor:
        logits = self.model(batch)
        labels = used_labels(self.run, batch)
        if "weights" in self.run.told:
            losses = (
                F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
                * batch["weights"].flatten()
            )
            return losses.sum() / (batch["weights"].sum().clamp(min=1e-9) if reduction == "mean" else 1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch, self.run.loss_reduction)

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch, "mean")
        self.log("count", float(count_used(self.run, batch)), sync_dist=True, reduce_fx="sum", batch_size=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


@functools.cache
def batches_by_rank(run: Run) -> list[list[Batch]]:
    """The micro-batches of an epoch, by data-parallel rank and then by step."""
    rng = random.Random(run.seed)
    empty_rank = rng.randrange(run.num_ranks)

    def is_empty(rank: int, step: int) -> bool:
        return {
            "none": False,
            "micro_batches": rng.random() < 0.4,
            "rank": rank == empty_rank,
        }[run.gap]

    return [
        [make_batch(run, rng, is_empty(rank, step)) for step in range(run.num_batches)]
        for rank in range(run.num_ranks)
    ]


def make_batch(run: Run, rng: random.Random, is_empty: bool) -> Batch:
    num_rows = rng.randint(1, 3)
    length = rng.randint(1, MAX_LENGTH)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    ids, labels = (torch.randint(VOCABULARY, (num_rows, length), generator=generator) for _ in range(2))
    for row in labels:
        row[torch.randperm(length, generator=generator)[: rng.randint(0, length)]] = -100
    labels[0, -1] = 1
    batch = {"input_ids": ids, "labels": labels}
    if run.padded:
        real = torch.tensor([[rng.randint(1, length)] for _ in range(num_rows)])
        batch["position_ids"] = positions = torch.arange(length)[None]
        batch["attention_mask"] = (
            positions >= length - real if rng.random() < 0.5 else positions < real
        ).long()
        labels[batch["attention_mask"] == 0] = -100
    if is_empty:
        labels[:] = -100
    if "weights" in run.told:
        batch["weights"] = torch.rand(labels.shape, generator=generator).double() * (labels != -100)
    return batch


def whole(run: Run, batch: Batch) -> Batch:
    """A batch as one process takes it."""
    ids = batch["input_ids"]
    labels = batch["labels"]
    shifted = F.pad(labels[:, run.label_shift :], (0, run.label_shift), value=-100)[:, : labels.shape[1]]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return {**batch, "position_ids": positions, "shift_labels": shifted}


@functools.cache
def train_plainly(run: Run) -> tuple[dict[str, Tensor], float, float]:
    """Weights, and the last window's loss and label tokens, of one process."""
    seen: list[tuple[Tensor, float]] = []

    def sums(module: Any, batch: Batch) -> tuple[Tensor, float]:
        seen.append((module.loss(batch, "sum"), count_used(run, batch)))
        return seen[-1]

    clips: Any = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_, "none": lambda *_: 0}
    settings: dict[str, Any] = {
        "case": Case(seed=run.seed, num_batches=run.num_batches),
        "clip": lambda parameters: clips[run.clipping](parameters, run.clip.get("gradient_clip_val")),
        "by_rank": [[whole(run, batch) for batch in batches] for batches in batches_by_rank(run)],
    }
    weights = plain_weights(DecoderModule(run), run.accumulation, sums=sums, **settings)
    losses, counts = zip(*seen[-run.last_window * run.num_ranks :], strict=True)
    return weights, float(sum(losses)) / max(sum(counts), 1), sum(counts)


def data_rank(run: Run) -> int:
    return dist.get_rank() // (run.context * run.tensor)


def loader(run: Run) -> DataLoader:
    return DataLoader(batches_by_rank(run)[data_rank(run)], batch_size=None)


def fit(run: Run) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Runs on every rank: full weights, and the last step's report."""
    module = DecoderModule(run)
    strategy = AutomodelStrategy(**run.options)
    make_trainer(strategy, accumulate_grad_batches=run.accumulation, **run.clip).fit(module, loader(run))
    report = strategy.last_step
    assert report is not None
    assert strategy.describe()["gradient_divisor"] == dist.get_world_size() // run.tensor
    return full_weights(module), {
        name: float(getattr(report, name)) for name in ("loss", "num_label_tokens", "num_micro_batches")
    }


RUNS = {
    "slices without a label": Run(gap="micro_batches", clipping="norm"),
    # An entry of the shape of the tokens is sliced, and its sum is a count.
    "weights of labels": Run(told="weights", gap="micro_batches", num_batches=3),
    # Shards over data-parallel ranks and context peers; labels that are shifted across slices.
    "two by two": Run(num_ranks=2, label_shift=1, clipping="norm", recompute="selective"),
    "padded": Run(padded=True, recompute=True),
    "ddp": Run(layout="ddp", num_ranks=2, gap="rank", loss_reduction="sum", told="callable"),
    # Reduced and gathered with each micro-batch, over replicas; attention to later positions.
    "hsdp": Run(layout="hsdp", num_ranks=2, clipping="value", is_causal=False, defer=False, reshard=True),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_as_one_process(request: pytest.FixtureRequest, run: Run) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{run.num_ranks * run.context * run.tensor}")
    weights, loss, count = train_plainly(run)
    for trained, report in pool.run(fit, run):
        assert weight_error(trained, weights) <= TOLERANCE
        assert report["num_label_tokens"] == pytest.approx(float(count), rel=1e-6)
        assert report["num_micro_batches"] == run.last_window * run.num_ranks
        assert (
            math.isnan(report["loss"])
            if count == 0
            else report["loss"] == pytest.approx(loss, rel=TOLERANCE)
        )


def describe() -> tuple[dict[str, Any], list[int]]:
    """Runs on every rank: the mesh, and the samples that Lightning's sampler gives this rank."""
    drawn: list[int] = []

    class Module(DecoderModule):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            drawn.extend(batch["number"].tolist())
            return super().training_step(batch, batch_idx)

    strategy = AutomodelStrategy(context_parallel_size=2)
    row = torch.arange(6) % VOCABULARY
    data = [{"input_ids": row, "labels": row, "number": index} for index in range(4)]
    make_trainer(strategy, use_distributed_sampler=True).fit(Module(Run()), DataLoader(data, batch_size=1))
    return strategy.describe()["mesh"], drawn


def test_context_peers_are_one_to_samplers(pool4: RankPool) -> None:
    """And the mesh says how many they are. What is not named is not sliced."""
    meshes, drawn = zip(*pool4.run(describe), strict=True)
    assert meshes[0] == {
        "data_parallel_replicate": 1,
        "data_parallel_shard": 2,
        "context_parallel": 2,
        "tensor_parallel": 1,
        "data_parallel": 2,
    }
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert sorted(drawn[0] + drawn[2]) == [0, 1, 2, 3]


def evaluate(run: Run) -> tuple[float, float]:
    """Runs on every rank: the evaluation's loss and label tokens; the ranks' data differ in length."""
    module = DecoderModule(run)
    batches = batches_by_rank(run)[data_rank(run)]
    trainer = make_trainer(AutomodelStrategy(**run.options), callbacks=[EvaluationLoss()])
    trainer.validate(module, DataLoader(batches[data_rank(run) :], batch_size=None), verbose=False)
    return float(trainer.callback_metrics["val_loss"]), float(trainer.callback_metrics["count"])


@pytest.mark.parametrize("label_shift", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_evaluation(pool4: RankPool, label_shift: int) -> None:
    """Each token counts once; a rank whose data has ended waits without taking part in attention."""
    run = Run(num_ranks=2, label_shift=label_shift)
    batches = [whole(run, each) for rank, own in enumerate(batches_by_rank(run)) for each in own[rank:]]
    module = DecoderModule(run)
    count = sum(count_used(run, batch) for batch in batches)
    loss = sum(module.loss(batch, "sum").item() for batch in batches) / count
    for found, counted in pool4.run(evaluate, run):
        assert found == pytest.approx(loss, rel=TOLERANCE)
        assert counted == count


class WithinSlice(DecoderModule):
    """Attends by torch's own function, outside of modules."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        states = self.model.embedding(batch["input_ids"])[:, None]
        return self.model.head(F.scaled_dot_product_attention(states, states, states)).mean()


class ShiftsBefore(DecoderModule):
    """Leaves the last position of its slice out, as of a whole sequence."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.model({key: tensor[:, :-1] for key, tensor in batch.items()}).mean()


class ShiftsItself(DecoderModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class DrawsItself(DecoderModule):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class CountsEntry(DecoderModule):
    """Returns an entry that is not sliced."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return {
            "loss": super().training_step(batch, batch_idx),
            "num_label_tokens": batch["num_tokens"].sum(),
        }


IDS = torch.ones(1, 4, dtype=torch.long)
TWO = {"input_ids": IDS.expand(2, 4), "labels": IDS.expand(2, 4), "num_tokens": torch.tensor([4, 3])}
"""Two rows, and a count that is not the number of labels."""


def refused(
    sentence: str,
    make_module: Callable[[Run], LightningModule] = DecoderModule,
    batches: Callable[[], list[Batch]] = lambda: [{"input_ids": IDS, "labels": IDS}],
    **options: Any,
) -> Refused:
    return Refused(lambda: make_module(Run()), (sentence,), batches, {"context_parallel_size": 2, **options})


REFUSED = {
    "torch's own attention": refused("0 calls of attention crossed the 2 context-parallel", WithinSlice),
    "shifted before the model": refused("take batch['shift_labels'] in place of ids[:, 1:]", ShiftsBefore),
    "shifted in the slice": refused("take batch['shift_labels']", ShiftsItself, label_shift=1),
    "dataloader_iter": refused("a mapping with input_ids [b, s], got a _DataFetcherWrapper", DrawsItself),
    "counted by a function of the whole": refused(
        "count_label_tokens counts 7, 7 on the 2 ranks that share a batch, and 7 in the whole batch",
        batches=lambda: [TWO],
        count_label_tokens=lambda batch: batch["num_tokens"].sum(),
    ),
    "shifted by a function": refused(
        "count_label_tokens counts 2, 2 on the 2 ranks that share a batch, and 6 in the whole batch",
        batches=lambda: [TWO],
        count_label_tokens=lambda batch: batch["labels"][:, 1:].numel(),
    ),
    "returned": refused("leave it out: labels of slices are counted", CountsEntry, batches=lambda: [TWO]),
    "unequal batches": refused(
        "The context-parallel ranks [0, 1] were given different first",
        batches=lambda: [{"input_ids": IDS + dist.get_rank(), "labels": IDS}],
    ),
}


class Regresses(DecoderModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.mse_loss(self.model(batch)[..., 0], batch["labels"].double())


def _told_of_padding(length: int) -> int:
    ids = torch.ones(1, length, dtype=torch.long)
    data = DataLoader([{"input_ids": ids, "labels": ids}], batch_size=None)
    trainer = make_trainer(AutomodelStrategy(context_parallel_size=2))
    return len(warnings_of("some of which are padding", trainer.fit, Regresses(Run()), data))


@pytest.mark.parametrize(("length", "told"), [(3, [1, 0]), (4, [0, 0])])
def test_a_mean_over_padding_is_told(pool2: RankPool, length: int, told: list[int]) -> None:
    assert pool2.run(_told_of_padding, length) == told


def test_what_would_be_wrong_in_slices_is_refused(pool2: RankPool) -> None:
    check_refused(pool2, __name__)
