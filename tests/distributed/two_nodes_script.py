"""What each rank of `test_two_nodes.py` runs: two caches are filled, then rank 0 fails; `FOLDER` holds the traces."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from lightning_automodel.first_rank import FirstRankPerNode
from lightning_automodel.nodes import Scope


def prepare(folder: Path, scope: Scope) -> None:
    """Fill a cache that a node, or all nodes, share."""
    rank = dist.get_rank()
    cache = folder / (f"disk_of_node_{os.environ['GROUP_RANK']}" if scope == "node" else "shared_disk")
    with FirstRankPerNode(scope=scope):
        if not cache.exists():
            time.sleep(0.2)
            folder.joinpath(f"{scope}_done_by_{rank}").touch()
            cache.touch()
        folder.joinpath(f"{scope}_seen_by_{rank}").touch()


def fail(folder: Path) -> int:
    """Fail on rank 0, and write down how each rank leaves."""
    rank = dist.get_rank()
    try:
        with FirstRankPerNode():
            folder.joinpath(f"ran_on_{rank}").touch()
            if rank == 0:
                raise OSError("no space on node 0")
    except Exception as error:
        folder.joinpath(f"error_of_{rank}").write_text(f"{type(error).__name__}: {error}")
        return 1
    return 0


def main() -> None:
    """Fill both caches, then fail."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    prepare(folder, "node")
    prepare(folder, "global")
    status = fail(folder)
    # A launcher ends its other ranks once one has failed, so the status comes when all have written.
    dist.barrier()
    sys.exit(status)


if __name__ == "__main__":
    main()
