"""Train one case with a Lightning strategy on the rank pool, and with a plain single-process loop, and compare weights.

The loop knows neither ranks nor micro-batches: it sums the token losses of a whole window over all ranks and
divides by the window's label tokens. In float64 the two must agree to rounding; `TOLERANCE` is a thousand
times what that costs. SGD with momentum, because Adam hides a wrong constant.

Shapes: b rows, s positions, d width, v vocabulary.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from tests import devices
from tests.trainer.cases import Case

TOLERANCE = 1e-12
VOCABULARY = 11
WIDTH = 7  # odd, so that shards on two ranks are uneven
LEARNING_RATE = 0.1
MOMENTUM = 0.9
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.linear": ColwiseParallel(output_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
"""How tensor-parallel ranks share a `TinyDecoder`; its norms stay plain."""

SILENT: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Options of a Trainer that writes nothing."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class LastStep:
    """The report of the last optimizer step, as plain numbers."""

    loss: float
    num_label_tokens: int
    num_micro_batches: int
    grad_norm: float | None


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: the full weights by name, and the last step where the strategy reports it."""

    weights: dict[str, Tensor]
    last_step: LastStep | None


@dataclass(frozen=True)
class Reference(Outcome):
    """The outcome of the plain loop, and how many of its windows were changed by clipping."""

    num_clipped: int
    num_windows: int


class Block(nn.Module):
    """A residual block that mixes each position with the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        positions = torch.arange(1, hidden.shape[1] + 1, device=hidden.device).view(1, -1, 1)
        return hidden + torch.tanh(self.linear(normed + normed.cumsum(dim=1) / positions))  # [b, s, d]


class TinyDecoder(nn.Module):
    """Embedding, blocks, norm and head; the same seed gives the same weights, none of which start at zero."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2 + seed % 2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)  # [b, s, d]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # [b, s, v]


class TinyModule(LightningModule):
    """Trains `TinyDecoder` the way `case` says, and tells its label tokens only if the case wants it told this way."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.model = TinyDecoder(case.seed)
        if case.precision == "32-true":
            self.model.double()

    def configure_model(self) -> None:
        if self.case.tensor > 1:
            dimension = "tp" if self.case.layout == "own_mesh" else "tensor_parallel"
            parallelize_module(self.model, self.device_mesh[dimension], PLAN)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Any]:
        case = self.case
        loss = token_loss(case, self.model(batch["input_ids"]), batch, reduction=case.loss_reduction)
        if not case.telling.startswith("returned"):
            return loss
        num_label_tokens = case.num_label_tokens(batch)
        return {
            "loss": loss,
            "num_label_tokens": num_label_tokens.item()
            if case.telling == "returned_int"
            else num_label_tokens,
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class ShardedTinyModule(TinyModule):
    """The same model, sharded by its own `configure_model`, as Lightning's `ModelParallelStrategy` demands."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def token_loss(case: Case, logits: Tensor, batch: Batch, reduction: str) -> Tensor:
    """Cross entropy of [b, s, v] logits over the label tokens; NaN as a mean over none of them."""
    logits = logits[:, : logits.shape[1] - case.label_shift]
    return F.cross_entropy(
        logits.flatten(0, 1),
        case.used_labels(batch).flatten(),
        ignore_index=case.ignore_index,
        reduction=reduction,
    )


@functools.cache
def micro_batches(case: Case) -> list[list[Batch]]:
    """The micro-batches of an epoch, by rank and then by step."""
    rng = random.Random(case.seed)
    unlabelled = set(_unlabelled(case, rng))
    return [
        [_micro_batch(case, rng, empty=(rank, step) in unlabelled) for step in range(case.num_batches)]
        for rank in range(case.num_ranks)
    ]


def _unlabelled(case: Case, rng: random.Random) -> Iterator[tuple[int, int]]:
    """The (rank, step) pairs without any label token."""
    window = case.accumulation[0]
    empty_rank = rng.randrange(case.num_ranks)
    empty_window = rng.randrange(-(-case.num_batches // window))
    first_empty = rng.randrange(case.num_batches)
    for rank in range(case.num_ranks):
        for step in range(case.num_batches):
            if (
                case.gap == "everything"
                or (case.gap == "rank" and rank == empty_rank)
                or (case.gap == "window" and step // window == empty_window)
                or (
                    case.gap == "micro_batches"
                    and (rng.random() < 0.3 or (rank, step) == (empty_rank, first_empty))
                )
            ):
                yield rank, step


def _micro_batch(case: Case, rng: random.Random, empty: bool) -> Batch:
    """Rows of random tokens; a row has from none to all of its positions labelled, a batch at least one that counts."""
    num_rows, length = (rng.randint(1, 3), rng.randint(2, 6)) if case.ragged else (2, 4)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    input_ids = torch.randint(VOCABULARY, (num_rows, length), generator=generator)
    labels = torch.randint(VOCABULARY, (num_rows, length), generator=generator)
    if case.ragged:
        for row in labels:
            row[torch.randperm(length, generator=generator)[: rng.randint(0, length)]] = case.ignore_index
        labels[0, -1] = 1
    if empty:
        labels[:, case.label_shift :] = case.ignore_index  # a label that the shift drops stays
    return {"input_ids": input_ids, case.label_key: labels}


def fit(
    case: Case, make_strategy: Callable[[Case], Strategy], make_module: type[TinyModule] = TinyModule
) -> Outcome:
    """Runs on every rank: train `case` with `Trainer.fit`, then gather the full weights."""
    module = make_module(case)
    strategy = make_strategy(case)
    scheduled = len(set(case.accumulation)) > 1
    callbacks: list[Callback] = (
        [GradientAccumulationScheduler(dict(enumerate(case.accumulation)))] if scheduled else []
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator=devices.accelerator(case.world_size),
        devices=case.world_size,
        plugins=[LightningEnvironment()],
        precision=case.precision,
        max_epochs=len(case.accumulation),
        accumulate_grad_batches=1 if scheduled else case.accumulation[0],
        gradient_clip_val=case.clip_val,
        gradient_clip_algorithm=None if case.clipping == "none" else case.clipping,
        callbacks=callbacks,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **SILENT,
    )
    trainer.fit(module, DataLoader(micro_batches(case)[dist.get_rank() // case.tensor], batch_size=None))
    return Outcome(full_weights(module.model), _last_step(strategy))


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, gathered from all ranks where they are sharded: a collective."""
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def _last_step(strategy: Strategy) -> LastStep | None:
    report = getattr(strategy, "last_step", None)
    if report is None:
        return None
    return LastStep(
        loss=float(report.loss),
        num_label_tokens=int(report.num_label_tokens),
        num_micro_batches=int(report.num_micro_batches),
        grad_norm=None if report.grad_norm is None else float(report.grad_norm),
    )


@functools.cache
def reference(case: Case) -> Reference:
    """Train `case` in this process, in one plain loop over all micro-batches of all ranks."""
    model = TinyDecoder(case.seed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    by_rank = micro_batches(case)
    num_clipped = num_windows = 0
    for window_size in case.accumulation:
        for start in range(0, case.num_batches, window_size):
            window = [batch for batches in by_rank for batch in batches[start : start + window_size]]
            optimizer.zero_grad()
            loss, num_label_tokens = _window_loss(case, model, window)
            loss.backward()
            unclipped = [parameter.grad.clone() for parameter in model.parameters()]
            grad_norm = _clip_(model, case)
            optimizer.step()
            num_windows += 1
            num_clipped += any(
                not torch.equal(before, parameter.grad)
                for before, parameter in zip(unclipped, model.parameters(), strict=True)
            )
    last_step = LastStep(loss.item(), num_label_tokens, len(window), grad_norm)
    return Reference(full_weights(model), last_step, num_clipped, num_windows)


def _window_loss(case: Case, model: nn.Module, window: list[Batch]) -> tuple[Tensor, int]:
    num_label_tokens = sum(int(case.num_label_tokens(batch)) for batch in window)
    reduction = "sum" if case.per_token_loss else "mean"
    losses = [token_loss(case, model(batch["input_ids"]), batch, reduction) for batch in window]
    # A sum over no label token is zero, and so is its gradient, whatever it is divided by.
    divisor = max(num_label_tokens, 1) if case.per_token_loss else len(window)
    return torch.stack(losses).sum() / divisor, num_label_tokens


def _clip_(model: nn.Module, case: Case) -> float | None:
    """Clip as the case says and return the norm before clipping, None where it was not needed."""
    if case.clipping == "norm":
        return nn.utils.clip_grad_norm_(model.parameters(), case.clip_val).item()
    if case.clipping == "value":
        nn.utils.clip_grad_value_(model.parameters(), case.clip_val)
    return None


def weight_error(outcome: Outcome, expected: Outcome) -> float:
    """The largest deviation of a weight, relative to the largest weight of its tensor."""
    assert outcome.weights.keys() == expected.weights.keys()
    return max(relative_error(outcome.weights[name], weight) for name, weight in expected.weights.items())


def relative_error(actual: Tensor | float, expected: Tensor | float) -> float:
    """max |actual - expected| / max |expected|; infinite for a wrong shape, a NaN, or anything but zero for zero."""
    actual = torch.as_tensor(actual, dtype=torch.float64, device="cpu")
    expected = torch.as_tensor(expected, dtype=torch.float64, device="cpu")
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    deviation = (actual - expected).abs().max().item()
    scale = expected.abs().max().item()
    return deviation / scale if scale else (float("inf") if deviation else 0.0)
