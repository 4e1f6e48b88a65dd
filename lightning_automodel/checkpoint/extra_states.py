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
from lightning_automodel.checkpoint.state_dict import copied, is_extra_state, model_state
from lightning_automodel.distributed.collectives import gather_objects


def differing_extra_states(
    module: nn.Module, path: str | Path, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """This rank's extra states that are not the same on every rank, by name and in host memory.

    The state dict of the checkpoint at ``path`` holds rank 0's. A collective over ``group``, which exchanges
    a digest of each state; without a group nothing can differ. If a rank cannot pickle one of its states,
    every rank raises :class:`CheckpointError`.
    """
    if group is None:
        return {}
    states: dict[str, Any] = {}
    digests: dict[str, bytes] = {}
    with on_every_rank(f"Cannot save {path}", group):
        for name, state in model_state(module).items():
            if is_extra_state(name) and not isinstance(state, DTensor):  # which is saved as shards
                states[name] = state
                digests[name] = _digest(name, state)
    by_rank = gather_objects(digests, group)
    differing = [name for name in states if len({digests.get(name) for digests in by_rank}) > 1]
    return {name: copied(states[name]) for name in differing}


def _digest(name: str, state: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(state, stream)
    except Exception as error:  # objects can raise anything
        raise CheckpointError(
            f"get_extra_state returned what cannot be pickled ({name}: {error}): return plain data, such as"
            " tensors, numbers, strings, lists and dicts"
        ) from error
    return hashlib.sha256(stream.getvalue()).digest()
