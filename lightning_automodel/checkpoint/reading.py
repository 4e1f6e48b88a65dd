"""Opening the model in a checkpoint of either form, in one process."""

import io
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_automodel import lightning_internals
from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.safe_load import load_plain_data
from lightning_automodel.checkpoint.sharded import Check, ShardDirectory
from lightning_automodel.checkpoint.single_file import check_file, readable
from lightning_automodel.checkpoint.state_dict import MODEL
from lightning_automodel.patching import PatchStack
from lightning_automodel.sharding.param_names import without_wrappers


class SavedModel(NamedTuple):
    """The model in a checkpoint; this process alone can read any of its tensors.

    Attributes:
        rest: The checkpoint without the states of model and optimizers.
        tensors: By name, perhaps without values; names are without wrappers.
        read: ``names -> tensors``, whole and in host memory; those of a file may be mapped, so do not change them.
        world_size: Ranks that wrote a directory; None for one file.
    """

    rest: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    read: Callable[[Iterable[str]], dict[str, Tensor]]
    world_size: int | None = None


def open_model(path: str, weights_only: bool | None, check: Check = "content") -> SavedModel:
    """Check a checkpoint of either form, and open its model. Not a collective.

    Raises :class:`CheckpointError` if it is damaged, missing, or holds code, unless ``weights_only`` is False.
    """
    if paths.is_directory(path):
        shards = ShardDirectory(path, weights_only, alone=True, check=check)
        tensors = {name: entry for name, entry in shards.model.items() if entry is not None}
        return SavedModel(shards.rest, tensors, shards.read_model, shards.world_size)
    with on_every_rank(f"Cannot load {path}", alone=True):
        check_file(path, reads_content=check != "sizes")
        checkpoint = load_plain_data(readable(path), path, weights_only is not False)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(MODEL), dict):
            raise CheckpointError(f"it has no {MODEL!r}: this is not a checkpoint of a LightningModule")
    tensors = {without_wrappers(name): each for name, each in checkpoint[MODEL].items() if isinstance(each, Tensor)}
    rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, "optimizer_states")}
    return SavedModel(rest, tensors, lambda names: {name: tensors[name] for name in names})


@cache
def load_directories() -> None:
    """Patch ``load_from_checkpoint`` of LightningModules and LightningDataModules to take directories of shards too.

    Lightning (2.6) has no setting for it. Anything else is loaded by its own function. A second call does nothing.
    """
    load = lightning_internals.saving.pl_load

    @wraps(load)
    def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        found = read_directory(path_or_url, map_location, weights_only)
        return load(path_or_url, map_location, weights_only) if found is None else found

    PatchStack().set(lightning_internals.saving, "pl_load", load_any)


def read_directory(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any] | None:
    """Read a directory, without optimizer states, as one file would hold it; None if ``path`` is not a directory."""
    if not isinstance(path, str | Path) or str(path).startswith(("http://", "https://")):
        return None
    place = paths.normalize(path)
    if not paths.is_directory(place):
        return None
    shards = ShardDirectory(place, weights_only, alone=True)
    # `map_location` can be of many kinds: loading an empty tensor shows to which device it maps the host's tensors.
    stream = io.BytesIO()
    torch.save(torch.empty(0), stream)
    stream.seek(0)
    device = torch.load(stream, map_location=map_location).device
    state = shards.read_model(shards.model)
    for name, value in state.items():
        state[name] = value.to(device) if isinstance(value, Tensor) else value
    return {**shards.rest, MODEL: state}
