"""The data that runs train on, by seed; `tests.trainer.exactness.micro_batches` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """Micro-batches of token ids and labels.

    Attributes:
        ragged: Shapes and label counts differ by rank, step and row; otherwise all are equal and labelled.
        gap: What has no label token at all: some micro-batches, one rank, or everything.
        telling: How the strategy learns the number of label tokens; "label_key" names the labels otherwise.
        label_shift: Leading label positions of each row that the loss drops.
        ignore_index: Label of a position that the loss ignores.
    """

    seed: int
    num_batches: int = 3
    num_ranks: int = 2
    ragged: bool = True
    gap: Literal["none", "micro_batches", "rank", "everything"] = "none"
    telling: Literal["returned", "callable", "labels", "label_key"] = "labels"
    label_shift: int = 0
    ignore_index: int = -100
    per_token_loss: bool = True

    @property
    def label_key(self) -> str:
        return "targets" if self.telling == "label_key" else "labels"

    def used_labels(self, batch: dict[str, Tensor]) -> Tensor:
        """The labels at the positions that the loss looks at, [b, s - label_shift]."""
        return batch[self.label_key][:, self.label_shift :]

    def num_label_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """How many label tokens the loss uses."""
        return (self.used_labels(batch) != self.ignore_index).sum()
