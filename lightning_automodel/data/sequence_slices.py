"""Context parallelism: which positions of a batch each of the ranks that share it gets."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

SHIFTED_LABELS = "shift_labels"
"""Labels that stand where they are predicted; the name that Hugging Face models take them by, beside ``labels``."""

_IDS, _POSITIONS, _MASK = "input_ids", "position_ids", "attention_mask"


class SequenceSlices:
    """Cuts what the ranks of a context-parallel group have all been given: a slice of each sequence for this rank.

    Of 2 W chunks of equal length rank r holds chunks r and 2 W - 1 - r, so that under a causal mask all have equally
    much to compute. Nothing is communicated.

    Args:
        rank: Within the group.
        size: Of the group, W.
        label_key: Key of the labels.
        ignore_index: Label of a position that the loss ignores.
        label_shift: Leading label positions of each row that the loss drops.
        adds_mask: Whether an attention mask is made where it is missing.
    """

    def __init__(
        self, rank: int, size: int, label_key: str, ignore_index: int, label_shift: int, adds_mask: bool = False
    ) -> None:
        self.chunks = rank, 2 * size - 1 - rank
        self._num_chunks, self._label_key, self._label_shift = 2 * size, label_key, label_shift
        self._adds_mask = adds_mask
        self._padding = {
            **{_IDS: 0, _POSITIONS: 0, _MASK: 0},
            **{label_key: ignore_index, SHIFTED_LABELS: ignore_index},
        }

    def length(self, batch: Any) -> int:
        """Positions of each sequence of a batch.

        Raises:
            TypeError: If the batch is no mapping.
            ValueError: If it has no ``input_ids``.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"context_parallel_size={self._num_chunks // 2} slices the sequences of a batch that is a mapping, and"
                f" this one is a {type(batch).__name__}: return {{'input_ids': [b, s], {self._label_key!r}: [b, s]}}"
                " from the collate function."
            )
        if not isinstance(batch.get(_IDS), Tensor):
            raise ValueError(
                f"context_parallel_size={self._num_chunks // 2} slices batch['input_ids'] [b, s], and the batch has the"
                f" keys {sorted(map(str, batch))}: give the tokens this name in the collate function."
            )
        return batch[_IDS].shape[-1]

    def chunk_length(self, length: int) -> int:
        """Positions of a chunk; those behind the sequence's last are padding."""
        return -(-length // self._num_chunks)

    def has_mask(self, batch: Any) -> bool:
        """Whether a batch leaves positions out by an ``attention_mask``."""
        return batch.get(_MASK) is not None

    def documents(self, batch: Any) -> Tensor | None:
        """[b, w * s] which document a position belongs to: ``position_ids`` that do not go on begin a new one.

        None where there are no position ids, or a mask beside them: then Hugging Face models do not look at them.
        """
        positions = batch.get(_POSITIONS)
        if positions is None or self.has_mask(batch):
            return None
        begins = positions.diff(dim=-1, prepend=positions[..., :1] - 1) != 1
        length = positions.shape[-1]
        return F.pad(begins.cumsum(-1), (0, self.chunk_length(length) * self._num_chunks - length), value=-1)

    def slice(self, batch: Any) -> MutableMapping[str, Any]:
        """A copy of a batch with this rank's slice of each sequence.

        ``input_ids``, labels, ``position_ids`` and ``attention_mask`` [..., s] are sliced, and all else is as it was.
        Position ids are made where they are missing. With a ``label_shift`` labels are shifted first, so that the last
        token of a slice has the first label of the next: they are called ``shift_labels`` then, and ``labels`` must not
        be looked at.

        Raises:
            TypeError: If the batch is no mapping.
            ValueError: If one of these does not have the length of ``input_ids``.
        """
        length = self.length(batch)
        sliced = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        if batch.get(_POSITIONS) is None:
            sliced[_POSITIONS] = torch.arange(length, device=batch[_IDS].device).expand(batch[_IDS].shape)
        if self._adds_mask and batch.get(_MASK) is None:
            sliced[_MASK] = torch.ones_like(batch[_IDS])
        if self._label_shift and self._label_key in batch:
            if SHIFTED_LABELS not in batch:
                self._check(self._label_key, batch[self._label_key], length)
                shifted = batch[self._label_key][..., self._label_shift :]
                sliced[SHIFTED_LABELS] = F.pad(
                    shifted, (0, length - shifted.shape[-1]), value=self._padding[self._label_key]
                )
            sliced[self._label_key] = ShiftedAway()
        for key, padding in self._padding.items():
            if isinstance(tensor := sliced.get(key), Tensor):
                self._check(key, tensor, length)
                sliced[key] = self._cut(tensor, padding)
        return sliced

    def _check(self, key: str, tensor: Tensor, length: int) -> None:
        if tensor.ndim == 0 or tensor.shape[-1] != length or (key == _MASK and tensor.ndim > 2):
            raise ValueError(
                f"context_parallel_size={self._num_chunks // 2} slices the last dimension of batch[{key!r}], which has"
                f" the shape {list(tensor.shape)}, but input_ids have {length} positions: make it [b, {length}]."
            )

    def _cut(self, tensor: Tensor, padding: int) -> Tensor:
        """[..., s] to the two chunks of this rank, [..., 2 c]."""
        chunk = self.chunk_length(tensor.shape[-1])
        padded = F.pad(tensor, (0, chunk * self._num_chunks - tensor.shape[-1]), value=padding)
        return torch.cat([padded[..., index * chunk : (index + 1) * chunk] for index in self.chunks], dim=-1)


class ShiftedAway:
    """Stands in for labels of which a slice holds a shifted form; raises where a step looks at them.

    Shifting the labels of a slice would drop one label for each slice. Hugging Face models want ``labels`` beside
    ``shift_labels``, and do not look at them.
    """

    _MESSAGE = (
        "The labels of a batch cannot be shifted in a slice of a sequence: take batch['shift_labels'], which has for"
        " each position of batch['input_ids'] the label of its prediction. (Or shift labels in the collate function,"
        " and pass label_shift=0.)"
    )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._MESSAGE)

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(self._MESSAGE)

    __getitem__ = __eq__ = __ne__ = __len__ = __iter__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        """What torch calls in place of a function of its own that is given one of these."""
        raise TypeError(cls._MESSAGE)
