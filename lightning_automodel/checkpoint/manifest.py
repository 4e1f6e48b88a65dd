"""What makes a directory of shards complete: its manifest, and the table of what its files hold."""

import io
import json
import zlib

from fsspec.core import url_to_fs
from torch.distributed.checkpoint.metadata import Metadata

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.safe_load import MetadataUnpickler
from lightning_automodel.checkpoint.state_dict import MODEL

REST = "meta.pt"
"""File of everything but the shards (loops, callbacks, hyperparameters), under Lightning's name for it."""

MANIFEST = "manifest.json"
"""File that names the folder of the other files within the directory, and the checksum of ``.metadata``."""

METADATA = ".metadata"
FORMAT = "lightning_automodel checkpoint, version 2"


def is_shard_directory(path: str) -> bool:
    """Whether the directory at ``path`` holds shards, from this package or another."""
    filesystem, place = url_to_fs(path)
    return any(filesystem.exists(f"{place}/{name}") for name in (MANIFEST, METADATA))


def read_manifest(path: str) -> bytes | None:
    """Content of a directory's manifest, different in each save; None if another program wrote it."""
    filesystem, place = url_to_fs(f"{path}/{MANIFEST}")
    if not filesystem.exists(place):
        return None
    return paths.read_file(f"{path}/{MANIFEST}")


def open_table(path: str, manifest: bytes | None) -> tuple[str, Metadata]:
    """The folder of the files, and ``.metadata``; raises CheckpointError if that is missing or damaged."""
    folder = path
    crc32 = None
    if manifest is not None:
        try:
            content = json.loads(manifest)
            is_known = content["format"] == FORMAT
            within = content["folder"]
            crc32 = content["crc32"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({len(manifest)} bytes)") from error
        if not is_known:
            raise CheckpointError(
                f"{MANIFEST} does not say {FORMAT!r}: load it with the release that wrote it"
            )
        if within:
            folder = paths.member(path, within)
    table = paths.read_file(f"{folder}/{METADATA}")
    if crc32 not in (None, checksum(table)):
        raise CheckpointError(
            f"{METADATA} has changed since it was written: its CRC-32 is {checksum(table)}, in {MANIFEST}"
            f" {crc32}"
        )
    return folder, _parsed(table)


def _parsed(table: bytes) -> Metadata:
    """The content of ``.metadata``; raises CheckpointError if it is damaged or has Lightning's layout."""
    try:
        metadata = MetadataUnpickler(io.BytesIO(table)).load()
        saved = {place[0] for place in metadata.planner_data.values()}
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{METADATA} is damaged ({type(error).__name__}: {error}; {len(table)} bytes)"
        ) from error
    if "model" in saved and MODEL not in saved:
        raise CheckpointError(
            "Lightning's FSDPStrategy has written these shards: make one file of them, which this strategy"
            " reads, with python -m lightning.pytorch.utilities.consolidate_checkpoint"
        )
    return metadata


def checksum(content: bytes) -> str:
    """CRC-32 of the content of a file, as manifests hold it."""
    return f"{zlib.crc32(content):08x}"
