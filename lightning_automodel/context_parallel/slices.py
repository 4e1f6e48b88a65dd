"""Context parallelism: which positions of a batch each rank of the group gets."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_automodel.context_parallel.attention import Slices
from lightning_automodel.gradients.token_loss import kind_and_keys
from lightning_automodel.options import StrategyOptions

SHIFTED_LABELS = "shift_labels"
"""Key of labels at the position that predicts them, as Hugging Face models call them."""

_IDS = "input_ids"
_POSITIONS = "position_ids"
_MASK = "attention_mask"


class SequenceSlices:
    """Cuts this rank's slice of each sequence from a batch that all ranks of a context-parallel group hold.

    Of 2 W chunks of equal length, rank r gets chunks r and 2 W - 1 - r, so that under a causal mask all
    ranks have the same amount to compute. Nothing is communicated. ``adds_mask``: whether to create a
    missing attention mask.
    """

    def __init__(self, rank: int, options: StrategyOptions, adds_mask: bool = False) -> None:
        self._options = options
        self._num_chunks = 2 * options.context_parallel_size
        self.chunks = rank, self._num_chunks - 1 - rank
        self._adds_mask = adds_mask
        labels = dict.fromkeys((options.label_key, SHIFTED_LABELS), options.ignore_index)
        self._padding = {_IDS: 0, _POSITIONS: 0, _MASK: 0, **labels}

    def describe(self, batch: Any, group: dist.ProcessGroup | None) -> Slices:
        """How the sequences of a batch are sliced across the ranks of ``group``.

        Without a mask, which would let Hugging Face models ignore them, ``position_ids`` tell the document of each
        position: a new one begins where they do not go up by 1.
        """
        *rows, length = self._ids(batch).shape
        chunk = -(-length // self._num_chunks)  # what is behind the end of the sequence is padding
        is_masked = batch.get(_MASK) is not None
        documents = None
        if not is_masked and batch.get(_POSITIONS) is not None:
            positions = batch[_POSITIONS]
            begins = positions.diff(dim=-1, prepend=positions[..., :1] - 1) != 1
            documents = self._pad(begins.cumsum(-1), -1)
        return Slices(group, self.chunks, chunk, length, (*rows, 2 * chunk), is_masked, documents)

    def _ids(self, batch: Any) -> Tensor:
        """[b, s] ``input_ids`` of a batch, which must be a mapping with them."""
        if not (isinstance(batch, Mapping) and isinstance(batch.get(_IDS), Tensor)):
            raise ValueError(
                f"context_parallel_size={self._num_chunks // 2} slices the sequences of a batch that is a mapping"
                f" with input_ids [b, s], got {kind_and_keys(batch)}: return {{'input_ids': [b, s],"
                f" {self._options.label_key!r}: [b, s]}} from the collate function."
            )
        ids: Tensor = batch[_IDS]
        return ids

    def slice(self, batch: Any) -> MutableMapping[str, Any]:
        """A copy of a batch with this rank's slice of each sequence.

        ``input_ids``, labels, ``position_ids``, ``attention_mask`` [..., s] and all entries that have the
        shape of ``input_ids`` are sliced; other entries are unchanged.
        """
        sliced = self.complete(batch)
        shape = batch[_IDS].shape
        for key, tensor in sliced.items():
            if isinstance(tensor, Tensor) and (key in self._padding or tensor.shape == shape):
                self._check(key, tensor, shape[-1])
                sliced[key] = self._cut(tensor, self._padding.get(key, 0))
        return sliced

    def complete(self, batch: Any) -> MutableMapping[str, Any]:
        """A copy of a batch with all that a slice needs, in whole sequences.

        Missing position ids are created. With a ``label_shift`` labels are shifted before slicing, so that
        the last token of a slice keeps its label, which is in the next slice. They are then stored as
        ``shift_labels``, and reading ``labels`` raises.
        """
        ids = self._ids(batch)
        completed = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        positions = batch.get(_POSITIONS)
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=ids.device)
        if positions.numel() == ids.shape[-1]:  # the same in all rows
            positions = positions.reshape(-1).expand(ids.shape)
        completed[_POSITIONS] = positions
        if self._adds_mask and batch.get(_MASK) is None:
            completed[_MASK] = torch.ones_like(ids)
        key = self._options.label_key
        shift = self._options.label_shift
        if shift and key in batch:
            if SHIFTED_LABELS not in batch:
                labels = batch[key]
                self._check(key, labels, ids.shape[-1])
                labels = F.pad(labels, (0, shift), value=self._options.ignore_index)
                completed[SHIFTED_LABELS] = labels[..., shift:]
            completed[key] = ShiftedAway()
        return completed

    def _check(self, key: str, tensor: Tensor, length: int) -> None:
        if tensor.ndim == 0 or tensor.shape[-1] != length or (key == _MASK and tensor.ndim > 2):
            raise ValueError(
                f"context_parallel_size={self._num_chunks // 2} slices the last dimension of batch[{key!r}],"
                f" which has the shape {list(tensor.shape)}, but input_ids have {length} positions: make it"
                f" [b, {length}]."
            )

    def _pad(self, tensor: Tensor, value: int) -> Tensor:
        """[..., s] to the length of all chunks."""
        return F.pad(tensor, (0, -tensor.shape[-1] % self._num_chunks), value=value)

    def _cut(self, tensor: Tensor, padding: int) -> Tensor:
        """Cut [..., s] to this rank's two chunks, [..., 2 c]."""
        chunks = self._pad(tensor, padding).chunk(self._num_chunks, dim=-1)
        return torch.cat([chunks[index] for index in self.chunks], dim=-1)


class ShiftedAway:
    """Placeholder for the labels of a slice that has ``shift_labels``; raises if a step reads it.

    Shifting the labels of a slice would drop one label per slice. The key stays, since Hugging Face models
    require ``labels`` beside ``shift_labels``, although they do not read them.
    """

    _MESSAGE = (
        "The labels of a batch cannot be shifted in a slice of a sequence: take batch['shift_labels'], which"
        " has for each position of batch['input_ids'] the label of its prediction. (Or shift labels in the"
        " collate function, and pass label_shift=0.)"
    )

    @classmethod
    def _refuse(cls, *_: Any) -> NoReturn:
        raise AttributeError(cls._MESSAGE)

    __getattr__ = __getitem__ = __eq__ = __ne__ = __len__ = __iter__ = _refuse
    __hash__ = object.__hash__
    # Called by torch instead of any of its functions that gets a placeholder.
    __torch_function__ = _refuse
