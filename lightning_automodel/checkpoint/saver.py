"""The two forms of a save: each prepares, on every rank, a function that writes, at once or in the background."""

import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.atomic import clear_leftovers
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, translated
from lightning_automodel.checkpoint.safe_load import warn_about_code
from lightning_automodel.checkpoint.sharded import ShardWriter
from lightning_automodel.checkpoint.state_dict import EXTRA_STATE, MODEL, optimizer_key, split_shards
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.sharding.units import is_sharded

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
            folder = paths.new_folder(path)
            with naming_what_fails(rest):
                torch.save(rest, content)
            warn_about_code(content)
            prepare_place(path)
    # The folder's name is random, and all ranks write into it.
    folder = collectives.broadcast_object(folder, 0)
    writer = ShardWriter(path, folder, content.getvalue())
    staged = _copied(shards) if copy else shards

    def write(group: dist.ProcessGroup | None) -> None:
        try:
            with translated(what):
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
            prepare_place(path)
            if copy:
                checkpoint = _copied(checkpoint)

    def write(group: dist.ProcessGroup | None) -> None:
        with on_every_rank(what, group):
            if group_rank() == 0:
                with naming_what_fails(checkpoint):
                    save(checkpoint, path)

    return write


@contextmanager
def naming_what_fails(checkpoint: dict[str, Any]) -> Iterator[None]:
    """If the block cannot save ``checkpoint``, raise the error of :func:`name_what_fails` if that finds one."""
    try:
        yield
    except Exception:
        name_what_fails(checkpoint)
        raise


class _PicklerWithoutTensors(pickle.Pickler):
    @override
    def reducer_override(self, obj: Any) -> Any:
        return (int, ()) if isinstance(obj, Tensor) else NotImplemented


def name_what_fails(tree: Mapping[Any, Any], *keys: str) -> None:
    """Raise CheckpointError with the keys of the first part of a checkpoint that cannot be pickled, if there is one."""
    for key, value in tree.items():
        try:
            _PicklerWithoutTensors(io.BytesIO(), protocol=2).dump(value)
        except Exception as error:
            first, *others = path = (*keys, str(key))
            if isinstance(value, Mapping):
                name_what_fails(value, *path)
            where = first + "".join(f"[{json.dumps(each)}]" for each in others)
            what = "holds a sharded module" if isinstance(value, nn.Module) and is_sharded(value) else str(error)
            remedy = "put its state_dict(), or plain data, in its place"
            if others and first.endswith("hyper_parameters"):
                remedy = f"call self.save_hyperparameters(ignore=[{json.dumps(others[0])}])"
            raise CheckpointError(f"{where} of the checkpoint cannot be saved ({what}): {remedy}") from error


def prepare_place(path: str) -> None:
    """Make the directory of ``path``, and remove what crashed saves have left in it. Called by one rank."""
    paths.refuse_to_replace(path)
    filesystem, parent = url_to_fs(paths.parent(path))
    filesystem.makedirs(parent, exist_ok=True)
    if paths.is_local(path):
        clear_leftovers(Path(parent))


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
