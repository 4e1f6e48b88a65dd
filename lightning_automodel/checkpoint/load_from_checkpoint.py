"""``load_from_checkpoint`` of a directory of shards, which Lightning (2.6) can read as a file alone."""

import io
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from lightning_automodel import lightning_internals
from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.reading import open_model
from lightning_automodel.checkpoint.state_dict import MODEL
from lightning_automodel.patching import PatchStack


@cache
def load_directories() -> None:
    """Let ``load_from_checkpoint`` of LightningModules and LightningDataModules take directories too.

    Lightning has no setting for it. Its own function loads whatever is no directory. Doing it again changes nothing.
    """
    load = lightning_internals.saving.pl_load

    @wraps(load)
    def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        found = read_directory(path_or_url, map_location, weights_only)
        return load(path_or_url, map_location, weights_only) if found is None else found

    PatchStack().set(lightning_internals.saving, "pl_load", load_any)


def read_directory(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any] | None:
    """Read a checkpoint without the states of its optimizers, as a file would hold it; None if it is no directory."""
    if not isinstance(path, str | Path) or str(path).startswith(("http://", "https://")):
        return None
    place = paths.normalize(path)
    if not paths.is_directory(place):
        return None
    saved = open_model(place, weights_only)
    # Loading an empty tensor tells where `map_location`, whatever it is, puts one in host memory.
    stream = io.BytesIO()
    torch.save(torch.empty(0), stream)
    stream.seek(0)
    device = torch.load(stream, map_location=map_location).device
    state = {name: tensor.to(device) for name, tensor in saved.read(saved.tensors).items()}
    return {**saved.rest, MODEL: {**state, **saved.objects}}
