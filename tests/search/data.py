"""Batches that the search trains on, and the plain losses of them.

Shapes: b rows, s positions, d width, v vocabulary.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.search.cases import Case

# Odd, so that shards on two ranks are uneven.
VOCABULARY = 7
WIDTH = 5
IGNORED = -100
CLASS_WEIGHTS = torch.linspace(0.3, 2.0, VOCABULARY, dtype=torch.float64)


# --- Data -------------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A batch that is an object."""

    ids: Tensor
    labels: Tensor


@functools.lru_cache(maxsize=4)
def data(case: Case) -> list[list[tuple[Tensor, Tensor]]]:
    """[b, s] ids and [b, s], [b] or (soft) [b, v] labels of an epoch, by rank and then by batch."""
    rng = random.Random(case.seed)
    empty_rank = rng.randrange(case.num_ranks)
    empty_window = rng.randrange(2)
    made = []
    for rank in range(case.num_ranks):
        made.append([])
        for index in range(case.num_batches_of(rank)):
            generator = torch.Generator().manual_seed(rng.randrange(2**31))
            # Ranks must call backward equally often: each batch has two chunks.
            shape = (rng.randint(2 if case.manual == "chunks" else 1, 3), rng.randint(2, 5))
            ids = torch.randint(VOCABULARY, shape, generator=generator)
            labels = torch.randint(
                VOCABULARY, shape if case.task == "tokens" else shape[:1], generator=generator
            )
            if case.task == "tokens":
                ignored = torch.rand(shape, generator=generator) < rng.random()
                ignored[0, -1] = False
                labels[ignored] = IGNORED
            if (
                (case.gap == "rank" and rank == empty_rank)
                or (case.gap == "window" and index // case.accumulates(0) == empty_window)
                or (case.gap == "micro_batches" and rng.random() < 0.4)
            ):
                labels[:] = IGNORED
            made[-1].append((ids, _softened(labels) if case.soft else labels))
    return made


def _softened(labels: Tensor) -> Tensor:
    """[b, v] distributions over classes, as label smoothing or mixup makes them."""
    return 0.8 * F.one_hot(labels, VOCABULARY).double() + 0.2 / VOCABULARY


def packed(case: Case, ids: Tensor, labels: Tensor) -> Any:
    """The batch as the case wants it."""
    key = "targets" if case.tell == "key" else "labels"
    return {
        "dict": lambda: {"ids": ids, key: labels},
        "tuple": lambda: (ids, labels),
        "list": lambda: [ids, labels],
        "nested": lambda: {"inputs": {"ids": ids}, "outputs": [labels]},
        "beside": lambda: {"weight": torch.tensor(2.0), "ids": ids, key: labels, "name": "x", "index": 3},
        "object": lambda: Pair(ids, labels),
    }[case.batch]()


def unpacked(case: Case, batch: Any) -> tuple[Tensor, Tensor]:
    """Ids and labels of a batch."""
    if case.batch in ("tuple", "list"):
        return batch[0], batch[1]
    if case.batch == "nested":
        return batch["inputs"]["ids"], batch["outputs"][0]
    if case.batch == "object":
        return batch.ids, batch.labels
    return batch["ids"], batch["targets" if case.tell == "key" else "labels"]


# --- Losses -----------------------------------------------------------------------------------------------------------


def used(case: Case, labels: Tensor) -> Tensor:
    """The labels at positions that the loss looks at."""
    return labels[:, case.label_shift :] if case.task == "tokens" else labels


def count(case: Case, labels: Tensor) -> Any:
    """What the loss sums over: label tokens, or the class weights of these; of soft labels, rows."""
    if case.soft:
        return torch.tensor(len(labels))  # torch divides by rows, with or without class weights
    labels = used(case, labels)
    if case.weighted:
        return CLASS_WEIGHTS[labels[labels != IGNORED]].sum()
    return (labels != IGNORED).sum()


def cross_entropy(case: Case, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Sum or mean of the token losses."""
    labels = used(case, labels)
    if case.task == "tokens":
        logits = logits[:, : logits.shape[1] - case.label_shift]
    weight = CLASS_WEIGHTS if case.weighted else None
    targets = labels if case.soft else labels.reshape(-1)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets, weight=weight, reduction=reduction)


def aux_loss(hidden: Tensor) -> Tensor:
    """A loss that is no mean over label tokens."""
    return 0.1 * hidden.square().mean()


def critic_loss(
    case: Case, critic: nn.Module, hidden: Tensor, labels: Tensor, sign: float, reduction: str
) -> Tensor:
    """[] how well a critic knows the hidden states at positions that count."""
    scores = critic(hidden)
    labels = used(case, labels)
    scores = scores[:, : labels.shape[1]] if case.task == "tokens" else scores.mean(dim=1)
    counted = labels != IGNORED
    summed = (F.softplus(sign * scores) * counted).sum()
    return summed / counted.sum().clamp(min=1) if reduction == "mean" else summed
