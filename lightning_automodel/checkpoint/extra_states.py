"""What modules save beside tensors (``get_extra_state``), where it differs between ranks: samplers, replay buffers."""

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


def differing_extra_states(module: nn.Module, path: str | Path, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """This rank's extra states, by name and in host memory, of the modules whose state is not the same on every rank.

    The state dict of the checkpoint at ``path`` holds those of rank 0. A collective over ``group``, which exchanges a
    digest for each state; without a group nothing can differ. If a rank cannot pickle one of its states, every rank
    raises :class:`CheckpointError`.
    """
    if group is None:
        return {}
    packed: dict[str, bytes] = {}
    with on_every_rank(f"Cannot save {path}", group):
        packed = _packed_states(module)
    digests = {name: hashlib.sha256(content).digest() for name, content in packed.items()}
    by_rank = gather_objects(digests, group)
    found: dict[str, Any] = {}
    for name, content in packed.items():
        if len({each.get(name) for each in by_rank}) > 1:
            found[name] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    return found


def _packed_states(module: nn.Module) -> dict[str, bytes]:
    packed: dict[str, bytes] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        if type(each).get_extra_state is nn.Module.get_extra_state:
            continue
        state = each.get_extra_state()
        if isinstance(state, DTensor):  # which is saved as shards
            continue
        name = without_wrappers(f"{path}.{EXTRA_STATE}".lstrip("."))
        stream = io.BytesIO()
        try:
            torch.save(state, stream)
        except Exception as error:  # objects can raise anything
            raise CheckpointError(
                f"get_extra_state of {type(each).__name__} returned what cannot be pickled ({name}: {error}): return"
                " plain data, such as tensors, numbers, strings, lists and dicts"
            ) from error
        packed[name] = stream.getvalue()
    return packed
