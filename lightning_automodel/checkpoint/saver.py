"""The two forms of a save: each prepares, on every rank, a function that writes, at once or in the background."""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import on_every_rank, on_this_rank
from lightning_automodel.checkpoint.sharded import ShardWriter
from lightning_automodel.checkpoint.state_dict import EXTRA_STATE, MODEL, optimizer_key, split_shards
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank

Write = Callable[[dist.ProcessGroup | None], None]
"""Writes what was prepared: a collective over the group (None: the default one), which every rank must call.

If any rank fails, all raise :class:`CheckpointError`, and the older checkpoint is unchanged.
"""


def prepare_shards(checkpoint: dict[str, Any], path: str, copy: bool = False) -> Write:
    """Prepare a directory: shards of model and optimizers by every rank, the rest by rank 0. A collective.

    Args:
        checkpoint: Lightning's checkpoint, with shards instead of whole tensors; states are popped from it.
        path: Path of the checkpoint, the same on every rank.
        copy: Whether the state is copied to host memory, so that it may change before it is written.
    """
    what = f"Cannot save {path}"
    shards, rest = _take_shards(checkpoint)
    folder, content = "", io.BytesIO()
    with on_every_rank(what):
        if group_rank() == 0:
            torch.save(rest, content)
            folder = paths.prepare_place(path)
    # The folder's name is random, and all ranks write into it.
    folder = collectives.broadcast_object(folder, 0)
    writer = ShardWriter(path, folder, content.getvalue())
    staged = _copied(shards) if copy else shards

    def write(group: dist.ProcessGroup | None) -> None:
        try:
            with on_this_rank(what):
                dcp.save(staged, storage_writer=writer, process_group=group)
        except BaseException:
            if group_rank() == 0:
                paths.remove(folder)
            raise

    return write


def prepare_file(
    checkpoint: dict[str, Any],
    path: str,
    save: Callable[[dict[str, Any], str], None],
    copy: bool = False,
) -> Write:
    """Prepare a file, which ``save`` writes on rank 0. A collective; see :func:`prepare_shards`."""
    what = f"Cannot save {path}"
    with on_every_rank(what):
        if group_rank() == 0:
            paths.prepare_place(path)
            if copy:
                checkpoint = _copied(checkpoint)

    def write(group: dist.ProcessGroup | None) -> None:
        with on_every_rank(what, group):
            if group_rank() == 0:
                save(checkpoint, path)

    return write


def _take_shards(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shards by place, and the rest of ``checkpoint``, from which the states of model and optimizers are popped."""
    of_model: dict[str, Any] = checkpoint.pop(MODEL)
    objects = {name: of_model.pop(name) for name in list(of_model) if not isinstance(of_model[name], Tensor)}
    shards = {MODEL: of_model}
    for index, state in enumerate(filter(None, checkpoint.pop("optimizer_states", []))):
        shards[optimizer_key(index)] = state
    rest, others = split_shards(checkpoint, of_model.keys())
    return {**shards, **others}, {**rest, EXTRA_STATE: objects} if objects else rest


def _copied(states: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``states`` in host memory, pinned and kept by torch's allocator, which training does not change.

    torch's ``DefaultStager`` (2.13 to 2.15) loses that a tensor is a conjugate or negative view of its storage, and
    cannot copy tensors without a storage or quantised ones.
    """
    copied = apply_to_collection(
        states,
        Tensor,
        lambda each: each if each.is_meta else each.detach().to("cpu", copy=True, non_blocking=True),
        allow_frozen=True,
    )
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return copied
