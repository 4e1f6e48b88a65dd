"""Makes one file of a directory of shards, with tensors that the system may evict from memory."""

import tempfile
from functools import partial

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.mapped_files import new_tensor
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
        save_file(shards.read_all(shards.tree, partial(new_tensor, folder)), str(target))
