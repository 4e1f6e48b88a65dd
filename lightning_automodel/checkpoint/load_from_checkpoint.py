"""``load_from_checkpoint`` of a directory of shards, which Lightning (2.6.6) can read as a file alone."""

import io
from pathlib import Path
from typing import Any

import torch

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.reading import open_model
from lightning_automodel.checkpoint.state_dict import MODEL


def read_directory(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any] | None:
    """Read a checkpoint without the states of its optimizers, if ``path`` is a directory. Not a collective.

    Args:
        path: Where Lightning is about to load from; a path, a URL or an open file.
        map_location: As for ``torch.load``: where the model's tensors go.
        weights_only: False runs code that the checkpoint may hold.

    Returns:
        As a file would hold it; None if ``path`` is something else.

    Raises:
        CheckpointError: If the directory is no checkpoint, or a damaged one, or holds more than plain data.
    """
    if not isinstance(path, str | Path) or str(path).startswith(("http://", "https://")):
        return None
    place = paths.normal(path)
    if not paths.is_directory(place):
        return None
    saved = open_model(place, weights_only)
    device = _device(map_location)
    state = {name: tensor.to(device) for name, tensor in saved.read(saved.tensors).items()}
    return {**saved.rest, MODEL: {**state, **saved.objects()}}


def _device(map_location: Any) -> torch.device:
    """Where ``map_location``, whatever it is, puts a tensor in host memory."""
    stream = io.BytesIO()
    torch.save(torch.empty(0), stream)
    stream.seek(0)
    return torch.load(stream, map_location=map_location).device
