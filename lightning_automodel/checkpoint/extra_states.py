"""Extra states of modules (``get_extra_state``) that differ between ranks, such as those of samplers."""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.internals.torch import EXTRA_STATE, without_wrappers


def differing_extra_states(
    module: nn.Module,
    path: str | Path,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """This rank's extra states that are not the same on every rank, by name and in host memory.

    The state dict of the checkpoint at ``path`` holds rank 0's. A collective over ``group``, which exchanges
    a digest of each state; without a group nothing can differ. If a rank cannot pickle one of its states,
    every rank raises :class:`CheckpointError`.
    """
    if group is None:
        return {}
    packed: dict[str, bytes] = {}
    with on_every_rank(f"Cannot save {path}", group):
        packed = _packed_states(module)
    digests = {name: hashlib.sha256(content).digest() for name, content in packed.items()}
    digests_by_rank = gather_objects(digests, group)
    differing: dict[str, Any] = {}
    for name, content in packed.items():
        if len({digests_of_rank.get(name) for digests_of_rank in digests_by_rank}) > 1:
            differing[name] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    return differing


def _packed_states(module: nn.Module) -> dict[str, bytes]:
    packed: dict[str, bytes] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        if type(submodule).get_extra_state is nn.Module.get_extra_state:
            continue
        state = submodule.get_extra_state()
        if isinstance(state, DTensor):  # it is saved as shards
            continue
        name = without_wrappers(f"{path}.{EXTRA_STATE}".lstrip("."))
        stream = io.BytesIO()
        try:
            torch.save(state, stream)
        except Exception as error:  # objects can raise anything
            raise CheckpointError(
                f"get_extra_state of {type(submodule).__name__} returned what cannot be pickled ({name}:"
                f" {error}): return plain data, such as tensors, numbers, strings, lists and dicts"
            ) from error
        packed[name] = stream.getvalue()
    return packed
