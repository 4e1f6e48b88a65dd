"""``.metadata``, the table of a directory of shards, as this package, Lightning and plain torch write it."""

import io
import itertools
import math
from collections import Counter

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.safe_load import MetadataUnpickler
from lightning_automodel.checkpoint.state_dict import MODEL

METADATA = ".metadata"
_MODEL_OF_FSDP_STRATEGY = "model"
_MAX_SPLIT_DIMS = 8


def parse_metadata(content: bytes) -> Metadata:
    """Parse and check ``.metadata``, whichever strategy has saved the shards."""
    try:
        metadata = MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        sizes_needed(metadata)
        outline(metadata)
        _check_entries(metadata)
        return metadata
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{METADATA} is damaged ({type(error).__name__}: {error}; {len(content)} bytes)"
        ) from error


def _check_entries(metadata: Metadata) -> None:
    """Raise CheckpointError unless every entry has its bytes in a file, and a tensor's chunks cover it exactly once.

    torch checks that when it saves, and not when it loads: what no chunk covers would keep what was in memory before.
    """
    if {path[0] for path in metadata.planner_data.values()} & {MODEL, _MODEL_OF_FSDP_STRATEGY} == {
        _MODEL_OF_FSDP_STRATEGY
    }:
        raise CheckpointError(
            "Lightning's FSDPStrategy has written these shards: make one file of them, which this strategy reads, with"
            " python -m lightning.pytorch.utilities.consolidate_checkpoint"
        )
    for name, entry in metadata.state_dict_metadata.items():
        path = metadata.planner_data[name]
        if not (isinstance(name, str) and isinstance(path, tuple) and path and isinstance(path[0], str)):
            raise TypeError("an entry is not named by strings")
        if isinstance(entry, BytesStorageMetadata):
            metadata.storage_data[MetadataIndex(name)]
            continue
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        if not _cover_once(tuple(entry.size), boxes):
            raise CheckpointError(
                f"{METADATA} is damaged: the {len(boxes)} chunks of {name} do not cover its shape {list(entry.size)}"
                " exactly once"
            )
        for offsets, sizes in boxes:
            place = metadata.storage_data[MetadataIndex(name, torch.Size(offsets))]
            # An element takes at least a bit, whatever its dtype says: some tensors pack theirs.
            if entry.properties.layout == torch.strided and math.prod(sizes) > 8 * place.length:
                raise CheckpointError(
                    f"{METADATA} is damaged: a chunk of {name} has shape {list(sizes)}, and {place.length} bytes in"
                    f" {place.relative_path}"
                )


def _cover_once(size: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether ``boxes``, offsets and sizes, cover a tensor's ``size`` without gap or overlap.

    They do exactly if their corners, counted with alternating signs, cancel with those of the whole: the corners are
    the mixed derivative of how often each element is covered. The cost is linear in the boxes.
    """
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(size) or not all(
            0 <= start <= start + length <= end for start, length, end in zip(offsets, sizes, size, strict=True)
        ):
            return False
    split = [dim for dim, length in enumerate(size) if any(sizes[dim] != length for _, sizes in boxes)]
    if len(split) > _MAX_SPLIT_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, sizes) in [(-1, ((0,) * len(size), size)), *((1, box) for box in boxes)]:
        if all(sizes):
            for ends in itertools.product((0, 1), repeat=len(split)):
                corner = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(split, ends, strict=True))
                corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def outline(metadata: Metadata) -> dict[str, Tensor | None]:
    """Tensors without values by flattened name; None for other objects."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def sizes_needed(metadata: Metadata) -> dict[str, int]:
    """Bytes that each file must have at least, by name."""
    needed: dict[str, int] = {}
    for place in metadata.storage_data.values():
        if place.offset < 0 or place.length < 0:
            raise ValueError(f"{place.length} bytes at {place.offset}")
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    return needed
