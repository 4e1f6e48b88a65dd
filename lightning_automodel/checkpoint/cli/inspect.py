"""What a checkpoint is and holds, found without running code that its files may hold."""

from collections import Counter
from typing import Any

from fsspec.core import url_to_fs
from torch import Tensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from lightning_automodel.checkpoint.hugging_face import KEY
from lightning_automodel.checkpoint.reading import open_checkpoint
from lightning_automodel.checkpoint.safe_load import NotPlainDataError
from lightning_automodel.checkpoint.state_dict import Saved
from lightning_automodel.resume import CHECKPOINT_KEY

Report = dict[str, Any]


def inspect(path: str, verify: bool = False, weights_only: bool = True) -> Report:
    """Describe one checkpoint of either form. Raises CheckpointNotFoundError if there is none.

    Args:
        path: Local, or a URL.
        verify: Read all of it, and compare it with its checksums.
        weights_only: False runs the code that the checkpoint may hold, to describe what needs it to load.

    Returns:
        Plain data; what is not known is None or missing. ``damage`` says what is wrong, ``not_plain`` names classes and
        functions that loading needs, and ``num_elements`` counts tied parameters under each of their names.
    """
    filesystem, place = url_to_fs(path)
    report: Report = {
        "path": path,
        "form": "directory of shards" if paths.is_directory(path) else "one file",
        "damage": None,
        "verified": verify,
        "not_plain": [],
    }
    try:
        report.update(_described(open_checkpoint(path, weights_only, reads_content=verify)))
    except CheckpointNotFoundError:
        raise
    except Exception as error:  # what others wrote can raise anything
        if isinstance(error.__cause__, NotPlainDataError):
            report["not_plain"] = error.__cause__.names
        elif isinstance(error, CheckpointError):
            report["damage"] = str(error)
        else:
            report["damage"] = f"it is damaged, or not a checkpoint ({type(error).__name__}: {str(error)[:200]})"
    return {**report, "num_bytes": filesystem.du(place)}


def _described(saved: Saved) -> Report:
    rest, of_run = saved.rest, saved.rest.get(CHECKPOINT_KEY)
    dtypes: Counter[str] = Counter()
    for tensor in saved.model.values():
        if isinstance(tensor, Tensor):
            dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return {
        "written_by": f"Lightning {rest.get('pytorch-lightning_version')}" if of_run is None else "lightning_automodel",
        "world_size": saved.world_size,
        "mesh": None if of_run is None else {str(name): int(size) for name, size in of_run["sizes"].items()},
        **{key: rest[key] if isinstance(rest.get(key), int) else None for key in ("epoch", "global_step")},
        "num_elements": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "rest": sorted(key for key in rest if isinstance(key, str)),
        "hugging_face": {
            model["prefix"]: model["class"] + (", adapters" if "peft" in model else "") for model in rest.get(KEY, [])
        },
    }
