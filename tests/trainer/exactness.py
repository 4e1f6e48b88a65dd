"""A tiny decoder, ragged data for it, and weights that are compared.

In float64, ranks and a plain single-process loop must agree to rounding; `TOLERANCE` is a thousand times what
that costs. SGD with momentum, because Adam hides a wrong constant.

Shapes: b rows, s positions, d width, v vocabulary.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

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


class Outcome(dict[str, Tensor]):
    """The full weights by name that a run left behind, which any dict of them is too."""

    @property
    def weights(self) -> dict[str, Tensor]:
        return self


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
    empty_rank = rng.randrange(case.num_ranks)
    rng.randrange(case.num_batches)  # so that the data of a seed stays what it was
    first_empty = rng.randrange(case.num_batches)
    for rank in range(case.num_ranks):
        for step in range(case.num_batches):
            if (
                case.gap == "everything"
                or (case.gap == "rank" and rank == empty_rank)
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


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, gathered from all ranks where they are sharded: a collective."""
    return {name: full(parameter).detach().clone() for name, parameter in model.named_parameters()}


def weight_error(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest deviation of a weight, relative to the largest weight of its tensor."""
    assert weights.keys() == expected.keys()
    return max(relative_error(weights[name], weight) for name, weight in expected.items())


def assert_exact(
    by_rank: Iterable[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    """The weights of every rank are the expected ones."""
    errors = [weight_error(weights, expected) for weights in by_rank]
    assert max(errors) <= tolerance, f"ranks are off by {errors}"


def relative_error(actual: Tensor | float, expected: Tensor | float) -> float:
    """max |actual - expected| / max |expected|; infinite for a wrong shape, a NaN, or anything but zero for zero."""
    actual = torch.as_tensor(actual, dtype=torch.float64, device="cpu")
    expected = torch.as_tensor(expected, dtype=torch.float64, device="cpu")
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    deviation = (actual - expected).abs().max().item()
    scale = expected.abs().max().item()
    return deviation / scale if scale else (float("inf") if deviation else 0.0)
