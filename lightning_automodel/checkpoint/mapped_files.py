"""Tensors that are mapped to files, so that the system may evict what was read or written from memory."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lightning_automodel.checkpoint import paths


def new_tensor(folder: str | Path, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor mapped to a new file in ``folder``, whose name goes at once, and whose content with the tensor."""
    if size.numel() == 0:
        return torch.empty(size, dtype=dtype)
    # The mapping keeps it alive.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=paths.TEMPORARY) as file:
        if hasattr(os, "posix_fallocate"):  # a full disk raises here, not as SIGBUS later
            os.posix_fallocate(file.fileno(), 0, size.numel() * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=size.numel(), dtype=dtype).view(size)
