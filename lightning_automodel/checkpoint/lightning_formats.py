"""``.metadata`` of a directory of shards, as this package, Lightning's own strategies and plain torch write it."""

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.safe_load import MetadataUnpickler
from lightning_automodel.checkpoint.state_dict import MODEL

METADATA = ".metadata"
_MODEL_OF_FSDP_STRATEGY = "model"


def parse_metadata(content: bytes) -> Metadata:
    """Parse ``.metadata``; the names become this package's own, whichever strategy has saved the shards."""
    try:
        metadata = MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        sizes_needed(metadata)
        outline(metadata)
        for name in metadata.state_dict_metadata:
            if not isinstance(path := metadata.planner_data[name], tuple) or not path:
                raise TypeError(f"{name} has the place {path!r}")
        return _under_own_names(metadata)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{METADATA} is damaged ({type(error).__name__}: {error}; {len(content)} bytes)"
        ) from error


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
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    return needed


def _under_own_names(metadata: Metadata) -> Metadata:
    """``metadata`` with the model's state where ``ModelParallelStrategy`` and this package keep it.

    Lightning's ``FSDPStrategy`` keeps it under ``"model"``. Only the metadata holds names, so the files stay valid.
    """
    old = f"{_MODEL_OF_FSDP_STRATEGY}."
    entries = metadata.state_dict_metadata
    if any(name.startswith(f"{MODEL}.") for name in entries) or not any(name.startswith(old) for name in entries):
        return metadata

    def renamed(name: str) -> str:
        return f"{MODEL}.{name.removeprefix(old)}" if name.startswith(old) else name

    planner_data: Mapping[str, tuple[Any, ...]] = metadata.planner_data
    return dataclasses.replace(
        metadata,
        state_dict_metadata={renamed(name): entry for name, entry in entries.items()},
        planner_data={
            renamed(name): (MODEL, *path[1:]) if name.startswith(old) else path for name, path in planner_data.items()
        },
        storage_data={
            dataclasses.replace(index, fqn=renamed(index.fqn)): place for index, place in metadata.storage_data.items()
        },
    )
