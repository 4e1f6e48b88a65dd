"""What a checkpoint is and holds, found without running code that its files may hold."""

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
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from lightning_automodel.checkpoint import atomic, paths
from lightning_automodel.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from lightning_automodel.checkpoint.hugging_face import KEY
from lightning_automodel.checkpoint.lightning_formats import METADATA, outline
from lightning_automodel.checkpoint.manifest import MANIFEST
from lightning_automodel.checkpoint.reading import read_unreplaced
from lightning_automodel.checkpoint.safe_load import classes_and_functions, load_outline, load_plain_data
from lightning_automodel.checkpoint.sharded import REST, check_files, open_tables
from lightning_automodel.checkpoint.single_file import check_content, check_file, readable
from lightning_automodel.checkpoint.state_dict import MODEL, is_optimizer_key
from lightning_automodel.resume import CHECKPOINT_KEY


@dataclass
class Report:
    """What is known of a checkpoint.

    Attributes:
        path: Where it is.
        form: ``"directory of shards"`` or ``"one file"``.
        written_by: Which program, with its version where that is known.
        damage: What is wrong; None where nothing was found.
        verified: Whether all content was read to find that, or only what is there and how large.
        not_plain: Classes and functions without which it does not load: ``weights_only=False`` runs their code.
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
    not_plain: list[str] = field(default_factory=list)
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
    """Describe one checkpoint of either form; ``verify`` reads all of it. Raises CheckpointError if there is none."""
    filesystem, place = url_to_fs(path)
    if not filesystem.exists(place):
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}")
    is_directory = filesystem.isdir(place)
    if is_directory and not _is_directory_of_shards(filesystem, place):
        raise CheckpointError(f"{path} is no checkpoint: it holds neither {METADATA} nor checkpoints")
    report = Report(path, "")

    def describe() -> None:
        # Anew where the checkpoint was replaced meanwhile. What was found before any damage stays.
        nonlocal report
        report = Report(path, "directory of shards" if is_directory else "one file", verified=verify)
        with _as_checkpoint_error():
            _describe_directory(report, verify) if is_directory else _describe_file(report, verify)

    try:
        read_unreplaced(path, describe, alone=True)
    except CheckpointError as error:
        report.damage = str(error)
    return report


def checkpoints_in(path: str) -> list[str]:
    """Checkpoints that lie in a directory, from the oldest to the newest; empty where it is one itself."""
    filesystem, place = url_to_fs(path)
    if not filesystem.isdir(place) or _is_directory_of_shards(filesystem, place):
        return []
    found = []
    for entry in filesystem.ls(place, detail=True):
        is_directory = entry["type"] == "directory" and _is_directory_of_shards(filesystem, entry["name"])
        is_file = entry["type"] != "directory" and entry["name"].endswith(".ckpt")
        if (is_directory or is_file) and not os.path.basename(entry["name"]).startswith(atomic.TEMPORARY):
            found.append(entry["name"])
    found.sort(key=lambda name: _written_at(filesystem, name))
    return [filesystem.unstrip_protocol(name) if "://" in path else name for name in found]


def leftovers_in(path: str) -> list[str]:
    """Names of what saves that have not ended left beside local checkpoints."""
    return [leftover.path.name for leftover in atomic.leftovers(Path(path))] if paths.is_local(path) else []


def _is_directory_of_shards(filesystem: AbstractFileSystem, place: str) -> bool:
    return any(filesystem.exists(f"{place}/{name}") for name in (METADATA, MANIFEST))


def _written_at(filesystem: AbstractFileSystem, place: str) -> float:
    if filesystem.isdir(place):
        place = next(file for name in (MANIFEST, METADATA) if filesystem.exists(file := f"{place}/{name}"))
    try:
        return filesystem.modified(place).timestamp()
    except NotImplementedError:
        return 0.0


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"it holds other things than a checkpoint does ({type(error).__name__}: {error})"
        ) from error


def _describe_directory(report: Report, verify: bool) -> None:
    filesystem, folder, manifest, metadata = open_tables(report.path)
    # torch calls the files __<rank>_<number>.distcp.
    ranks = {place.relative_path.lstrip("_").partition("_")[0] for place in metadata.storage_data.values()}
    report.world_size = manifest.world_size if manifest is not None else len(ranks) or None
    tensors = {
        tuple(metadata.planner_data[name]): tensor for name, tensor in outline(metadata).items() if tensor is not None
    }
    _describe_model(report, {path[1]: tensor for path, tensor in tensors.items() if path[0] == MODEL})
    by_optimizer: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter(model=report.num_bytes["model"], optimizers=0, rest=0)
    for path, tensor in tensors.items():
        if is_optimizer_key(str(path[0])):
            by_optimizer.setdefault(str(path[0]), Counter())[str(path[-1])] += 1
            sizes["optimizers"] += tensor.nbytes
        elif path[0] != MODEL:
            sizes["rest"] += tensor.nbytes
    report.optimizer_states = [dict(by_optimizer[key]) for key in sorted(by_optimizer)]
    try:
        content = paths.read_file(filesystem, folder, REST)
        sizes["rest"] += len(content)
        rest, report.not_plain = load_outline(io.BytesIO(content), REST)
        _describe_rest(report, rest)
    except FileNotFoundError:
        report.written_by = "torch.distributed.checkpoint"
    finally:
        report.num_bytes = dict(sizes)
    check_files(filesystem, folder, manifest, metadata, 0, 1 if verify else 0)
    if manifest is not None:
        report.written_by = "lightning_automodel"
    if verify:
        report.not_plain = sorted({*report.not_plain, *_check_entries(filesystem, folder, metadata, manifest is None)})


def _check_entries(filesystem: AbstractFileSystem, folder: str, metadata: Metadata, has_checksums: bool) -> set[str]:
    """Read each entry of the shards: names of what objects among them need beside plain data."""
    found: set[str] = set()
    for index, place in metadata.storage_data.items():
        what = f"{index.fqn} in {place.relative_path}"
        with filesystem.open(f"{folder}/{place.relative_path}", "rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        # Checksums match whatever their writer wrote: they do not tell that an entry is what the table says.
        try:
            if has_checksums:
                check_content(content)
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                found.update(classes_and_functions(content))
            elif not isinstance(load_plain_data(content, what, weights_only=True), Tensor):
                raise CheckpointError("it is no tensor")
        except Exception as error:  # damaged content can raise anything
            raise CheckpointError(f"{what} cannot be loaded: {error}") from error
    return found


def _describe_file(report: Report, verify: bool) -> None:
    if verify:
        check_file(report.path)
    filesystem, place = url_to_fs(report.path)
    if paths.is_local(place) and not os.path.isfile(place):
        raise CheckpointError("it is no regular file")
    checkpoint, report.not_plain = load_outline(readable(report.path), report.path)
    _describe_model(report, checkpoint.get(MODEL, {}))
    states = checkpoint.get("optimizer_states", [])
    report.optimizer_states = [
        dict(Counter(str(kind) for kinds in state.get("state", {}).values() for kind in kinds)) for state in states
    ]
    of_optimizers = sum(tensor.numel() * tensor.element_size() for tensor in _leaves(states))
    rest = max(0, filesystem.size(place) - report.num_bytes["model"] - of_optimizers)
    report.num_bytes |= {"optimizers": of_optimizers, "rest": rest}
    _describe_rest(report, {key: value for key, value in checkpoint.items() if key not in (MODEL, "optimizer_states")})


def _describe_model(report: Report, state: Mapping[str, Any]) -> None:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    report.dtypes, report.num_parameters = dict(dtypes), sum(dtypes.values())
    report.num_bytes["model"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _describe_rest(report: Report, rest: Mapping[str, Any]) -> None:
    report.rest = sorted(map(str, rest))
    epoch, step = rest.get("epoch"), rest.get("global_step")
    report.epoch, report.global_step = (each if isinstance(each, int) else None for each in (epoch, step))
    if version := rest.get("pytorch-lightning_version"):
        report.written_by = f"Lightning {version}"
    if isinstance(of_run := rest.get(CHECKPOINT_KEY), dict):
        report.written_by = "lightning_automodel"
        report.mesh = {str(name): int(size) for name, size in of_run["sizes"].items()}
    report.hugging_face = {model["prefix"]: model["class"] for model in rest.get(KEY, [])}


def _leaves(tree: Any) -> Iterator[Tensor]:
    for value in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _leaves(value)


# --- As text ---------------------------------------------------------------------------------------------------------

_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def as_text(report: Report) -> str:
    """Several lines on one checkpoint."""
    lines = {
        "path": report.path,
        "form": report.form,
        "written by": report.written_by,
        "world size": "unknown" if report.world_size is None else str(report.world_size),
        "mesh": ", ".join(f"{name} {size}" for name, size in report.mesh.items()) or "unknown",
        "state": _state(report),
        "epoch": "unknown" if report.epoch is None else str(report.epoch),
        "optimizer steps": "unknown" if report.global_step is None else str(report.global_step),
        "elements": f"{report.num_parameters:,} ({_counts(report.dtypes)})",
        **{name: _bytes(size) for name, size in report.num_bytes.items()},
        **{
            f"optimizer {index}": f"state of parameters: {_counts(kinds)}"
            for index, kinds in enumerate(report.optimizer_states)
        },
        "Hugging Face": ", ".join(f"{prefix} {name}" for prefix, name in report.hugging_face.items()) or "none",
        "also holds": ", ".join(report.rest) or "nothing",
    }
    return "\n".join(f"{name + ':':<17}{value}" for name, value in lines.items())


def as_line(report: Report, is_newest: bool) -> str:
    """One line on one of several."""
    at = f"epoch {report.epoch}, step {report.global_step}, {_bytes(sum(report.num_bytes.values()))}, {report.form}"
    return f"{report.path}: {at}, {_state(report)}{' (newest)' if is_newest else ''}"


def _state(report: Report) -> str:
    if report.damage is not None:
        return f"DAMAGED: {report.damage}"
    state = "complete, all content verified" if report.verified else "complete by its files' names and sizes"
    needs = f"; loads with weights_only=False alone, it holds {', '.join(report.not_plain)}" if report.not_plain else ""
    return f"{state}{needs}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"


def _bytes(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} {_UNITS[-1]}"
