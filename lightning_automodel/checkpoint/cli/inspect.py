"""What a checkpoint is and holds, told without loading tensors and without running code that its files may hold."""

import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_automodel.checkpoint import atomic
from lightning_automodel.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from lightning_automodel.checkpoint.hugging_face import KEY
from lightning_automodel.checkpoint.manifest import Manifest
from lightning_automodel.checkpoint.reading import TensorInfo
from lightning_automodel.checkpoint.safe_load import load_outline
from lightning_automodel.checkpoint.sharded import REST, check_foreign, read_manifest, read_metadata
from lightning_automodel.checkpoint.single_file import check_file, has_checksum
from lightning_automodel.checkpoint.state_dict import MODEL, is_optimizer_key
from lightning_automodel.resume import CHECKPOINT_KEY

_METADATA = ".metadata"


@dataclass
class Report:
    """What is known of a checkpoint.

    Attributes:
        path: Where it is.
        form: ``"directory of shards"`` or ``"one file"``.
        written_by: Which program, with its version where it is told.
        damage: What is wrong; None where nothing was found.
        verified: Whether all content was read to find that, or only what is there and how large.
        world_size: Ranks that wrote a directory; None where that is unknown.
        mesh: Ranks along each dimension of the mesh, by name; empty where that is unknown.
        epoch: Index of the epoch that it was saved in, or of the next one, as Lightning counts.
        global_step: Optimizer steps that were made.
        num_parameters: Elements of the model's state, buffers included.
        num_bytes: Of ``model``, ``optimizers`` and ``rest``.
        dtypes: Elements of the model's state by dtype.
        optimizer_states: For each optimizer, how many parameters have each kind of state.
        rest: Keys of everything else.
        hugging_face: Classes of the Hugging Face models in it, by prefix.
    """

    path: str
    form: str
    written_by: str = "unknown"
    damage: str | None = None
    verified: bool = False
    world_size: int | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    epoch: int | None = None
    global_step: int | None = None
    num_parameters: int = 0
    num_bytes: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    optimizer_states: list[dict[str, int]] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    hugging_face: dict[str, str] = field(default_factory=dict)


def inspect(path: str, verify: bool = False) -> Report:
    """Describe one checkpoint. Not a collective.

    Args:
        path: A directory of shards or a file; local, or any URL that fsspec knows.
        verify: Read all of it once and compare it with its checksums.

    Raises:
        CheckpointError: If there is none.
    """
    filesystem, place = url_to_fs(path)
    if not filesystem.exists(place):
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}")
    if not filesystem.isdir(place):
        return _inspect_file(path, filesystem, place, verify)
    if not _is_directory_of_shards(filesystem, place):
        raise CheckpointError(f"{path} is no checkpoint: it holds neither {_METADATA} nor checkpoints")
    return _inspect_directory(path, filesystem, place, verify)


def checkpoints_in(path: str) -> list[str]:
    """Checkpoints that lie in a directory, from the oldest to the newest; empty where it is one itself."""
    filesystem, place = url_to_fs(path)
    if not filesystem.isdir(place) or _is_directory_of_shards(filesystem, place):
        return []
    found = [
        entry["name"]
        for entry in filesystem.ls(place, detail=True)
        if not os.path.basename(entry["name"]).startswith(atomic.UNFINISHED)
        and (
            _is_directory_of_shards(filesystem, entry["name"])
            if entry["type"] == "directory"
            else entry["name"].endswith(".ckpt")
        )
    ]
    found.sort(key=lambda name: _written_at(filesystem, name))
    return [filesystem.unstrip_protocol(name) if "://" in path else name for name in found]


def leftovers_in(path: str) -> list[str]:
    """Names of what saves that have not ended left beside local checkpoints."""
    filesystem, place = url_to_fs(path)
    is_local = "file" in filesystem.protocol
    return [leftover.path.name for leftover in atomic.leftovers(Path(place))] if is_local else []


def _is_directory_of_shards(filesystem: AbstractFileSystem, place: str) -> bool:
    return any(filesystem.exists(f"{place}/{name}") for name in (_METADATA, "manifest.json"))


def _written_at(filesystem: AbstractFileSystem, place: str) -> float:
    if filesystem.isdir(place):
        place = next(file for name in ("manifest.json", _METADATA) if filesystem.exists(file := f"{place}/{name}"))
    try:
        return filesystem.modified(place).timestamp()
    except NotImplementedError:
        return 0.0


# --- A directory of shards --------------------------------------------------------------------------------------------


def _inspect_directory(path: str, filesystem: AbstractFileSystem, place: str, verify: bool) -> Report:
    report = Report(path, "directory of shards", verified=verify)
    with _telling_damage(report):
        manifest = read_manifest(filesystem, place)
        folder = f"{place}/{manifest.folder}".rstrip("/") if manifest is not None else place
        metadata = read_metadata(filesystem, folder)
        report.world_size = _world_size(manifest, metadata)
        _describe_shards(report, metadata)
        _describe_rest_file(report, filesystem, f"{folder}/{REST}")
        if manifest is None:
            check_foreign(filesystem, folder, metadata)
        else:
            report.written_by = "lightning_automodel"
            manifest.check(filesystem, folder, 0, 1 if verify else 0)
    return report


@contextmanager
def _telling_damage(report: Report) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        report.damage = str(error)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        report.damage = f"it holds other things than a checkpoint does ({type(error).__name__}: {error})"


def _world_size(manifest: Manifest | None, metadata: Metadata) -> int | None:
    if manifest is not None:
        return manifest.world_size
    # torch calls the files __<rank>_<number>.distcp.
    ranks = {place.relative_path.lstrip("_").partition("_")[0] for place in metadata.storage_data.values()}
    return len(ranks) or None


def _describe_shards(report: Report, metadata: Metadata) -> None:
    tensors: dict[tuple[Any, ...], TensorInfo] = {
        tuple(metadata.planner_data[name]): TensorInfo(entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _describe_model(report, {path[1]: info for path, info in tensors.items() if path[0] == MODEL})
    by_optimizer: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter(model=report.num_bytes["model"], optimizers=0, rest=0)
    for path, info in tensors.items():
        if is_optimizer_key(str(path[0])):
            by_optimizer.setdefault(str(path[0]), Counter())[str(path[-1])] += 1
            sizes["optimizers"] += info.num_bytes
        elif path[0] != MODEL:
            sizes["rest"] += info.num_bytes
    report.num_bytes = dict(sizes)
    report.optimizer_states = [dict(by_optimizer[key]) for key in sorted(by_optimizer)]


def _describe_rest_file(report: Report, filesystem: AbstractFileSystem, file: str) -> None:
    if not filesystem.exists(file):
        report.written_by = "torch.distributed.checkpoint"
        return
    content = filesystem.cat_file(file)
    report.num_bytes["rest"] += len(content)
    _describe_rest(report, load_outline(io.BytesIO(content), REST))


# --- One file ---------------------------------------------------------------------------------------------------------


def _inspect_file(path: str, filesystem: AbstractFileSystem, place: str, verify: bool) -> Report:
    report = Report(path, "one file", verified=verify)
    with _telling_damage(report):
        if verify:
            check_file(path)
        with filesystem.open(place, "rb") as file:
            is_ours = has_checksum(file)
            file.seek(0)
            checkpoint = load_outline(file, path)
        _describe_file(report, checkpoint, filesystem.size(place))
        if is_ours:
            report.written_by = "lightning_automodel"
    return report


def _describe_file(report: Report, checkpoint: Mapping[str, Any], size: int) -> None:
    _describe_model(report, checkpoint.get(MODEL, {}))
    states = checkpoint.get("optimizer_states", [])
    report.optimizer_states = [_kinds(state.get("state", {})) for state in states]
    of_model, of_optimizers = report.num_bytes["model"], sum(info.num_bytes for info in _leaves(states))
    report.num_bytes |= {"optimizers": of_optimizers, "rest": max(0, size - of_model - of_optimizers)}
    _describe_rest(report, {key: value for key, value in checkpoint.items() if key not in (MODEL, "optimizer_states")})


def _describe_model(report: Report, tensors: Mapping[str, Any]) -> None:
    infos = [TensorInfo.of(value) if isinstance(value, Tensor) else value for value in tensors.values()]
    infos = [info for info in infos if isinstance(info, TensorInfo)]
    dtypes: Counter[str] = Counter()
    for info in infos:
        dtypes[str(info.dtype).removeprefix("torch.")] += info.size.numel()
    report.dtypes, report.num_parameters = dict(dtypes), sum(dtypes.values())
    report.num_bytes["model"] = sum(info.num_bytes for info in infos)


def _describe_rest(report: Report, rest: Mapping[str, Any]) -> None:
    report.rest = sorted(map(str, rest))
    report.epoch, report.global_step = (_number(rest.get(key)) for key in ("epoch", "global_step"))
    if isinstance(of_run := rest.get(CHECKPOINT_KEY), dict):
        report.mesh = {str(name): int(size) for name, size in of_run["sizes"].items()}
    report.hugging_face = {model["prefix"]: model["class"] for model in rest.get(KEY, [])}
    if version := rest.get("pytorch-lightning_version"):
        report.written_by = f"Lightning {version}"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _kinds(states: Mapping[Any, Mapping[str, Any]]) -> dict[str, int]:
    return dict(Counter(str(kind) for state in states.values() for kind in state))


def _leaves(tree: Any) -> Iterator[TensorInfo]:
    for value in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ():
        if isinstance(value, Tensor):
            yield TensorInfo.of(value)
        else:
            yield from _leaves(value)
