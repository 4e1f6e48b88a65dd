"""One file from ``torch.save`` with whole tensors, checked against its checksums before anything is loaded.

Such a file is a zip archive: torch writes a checksum for each record, but does not check it when it loads.
"""

import io
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.serialization import config as serialization_config

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.tree import MODEL, copied
from lightning_automodel.distributed.process_group import group_rank

Write = Callable[[dist.ProcessGroup | None], None]
"""Writes what was prepared. A collective over the group, or else over the default group."""


def prepare_file(
    checkpoint: dict[str, Any],
    path: str,
    save: Callable[[dict[str, Any], str], None],
    copy: bool = False,
) -> Write:
    """Prepare a file, which ``save`` writes on rank 0. A collective; see :func:`.prepare_shards`."""
    what = f"Cannot save {path}"
    with on_every_rank(what):
        if group_rank() == 0:
            paths.prepare_place(path)
            if copy:
                checkpoint = copied(checkpoint)

    def write(group: dist.ProcessGroup | None) -> None:
        with on_every_rank(what, group):
            if group_rank() == 0:
                save(checkpoint, path)

    return write


def save_file(checkpoint: dict[str, Any], path: str) -> None:
    """Write ``checkpoint`` to a file that appears in one step, once all of it is on disk. Called by one rank."""
    if not paths.is_local(path):
        if paths.is_directory(path):  # an object store can hold both, and the directory would be loaded
            raise CheckpointError(f"{path} is a directory: remove it, or choose another path")
        stream = io.BytesIO()
        with with_checksums():
            torch.save(checkpoint, stream)
        paths.write_file(path, stream.getvalue())
        return
    temporary = Path(path).with_name(paths.temporary_name())
    try:
        with open(temporary, "wb") as file, with_checksums():
            torch.save(checkpoint, file)
        paths.replace(temporary, Path(path))
    except BaseException:
        paths.remove(str(temporary))
        raise


def with_checksums() -> AbstractContextManager[None]:
    """Context in which ``torch.save`` writes a checksum of each record, whatever the user has configured."""
    return serialization_config.patch("save.compute_crc32", True)  # type: ignore[attr-defined]


def load_file(path: str, weights_only: bool | None) -> Any:
    """Load a file to host memory, after comparing its content with its checksums. A local one is mapped.

    Any other file is fetched whole, since not every server can send parts.
    """
    source: Any = path
    if paths.is_local(path):
        paths.check_file(path)
    else:
        source = io.BytesIO(paths.read_file(path))
    return load_checked(source, path.rpartition("/")[2], weights_only)


def load_checked(source: str | io.BytesIO, name: str, weights_only: bool | None) -> Any:
    """Load what ``torch.save`` has written, named ``name``, to host memory.

    Raises :class:`CheckpointError` if it does not have its checksums, and what ``torch.load`` raises if it
    holds code and ``weights_only`` is not False.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            damaged = archive.testzip()
    except Exception as error:  # damaged content can raise anything
        raise CheckpointError(
            f"{name} is damaged, or not what torch.save has written since release 1.6"
            f" ({type(error).__name__}: {error})"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{name} has changed since it was written (wrong checksum of {damaged})")
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return torch.load(
        source, map_location="cpu", weights_only=weights_only is not False, mmap=isinstance(source, str)
    )


def check_model(checkpoint: Any) -> None:
    """Raise CheckpointError unless what was loaded is a dict with the state of a model."""
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(MODEL), dict):
        raise CheckpointError(f"it has no {MODEL!r}: this is not a checkpoint of a LightningModule")
