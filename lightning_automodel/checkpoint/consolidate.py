"""Makes one file of a directory of shards, with tensors that the system may evict from memory."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.reading import open_directory
from lightning_automodel.checkpoint.single_file import save_file


def consolidate(path: str, out: str, weights_only: bool | None) -> None:
    """Write a directory of shards as one file, like Lightning's other strategies. Not a collective.

    Tensors are mapped to temporary files beside the new one, so that the system can evict what was read or
    written. torch's ``dcp_to_torch_save`` holds the whole checkpoint, runs code that it may contain, and
    drops everything but the shards. Optimizer states keep parameter names as ids; torch's optimizers match
    ids by order.
    """
    if not paths.is_directory(path):
        raise CheckpointError(f"{path} is not a directory of shards: there is nothing to consolidate")
    target = paths.new_local_target(out)
    shards = open_directory(path, weights_only)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=paths.TEMPORARY) as folder:

        def mapped_to_file(size: torch.Size, dtype: torch.dtype) -> Tensor:
            if size.numel() == 0:
                return torch.empty(size, dtype=dtype)
            handle, name = tempfile.mkstemp(dir=folder)
            if hasattr(os, "posix_fallocate"):  # a full disk raises here, not as SIGBUS later
                os.posix_fallocate(handle, 0, size.numel() * dtype.itemsize)
            os.close(handle)
            found = torch.from_file(name, shared=True, size=size.numel(), dtype=dtype).view(size)
            Path(name).unlink()  # the mapping keeps the file alive
            return found

        save_file(shards.read_all(shards.tree, mapped_to_file), str(target))
