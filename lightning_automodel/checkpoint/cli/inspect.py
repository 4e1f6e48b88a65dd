"""What a checkpoint is and holds, found without running code that its files may hold."""

import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from lightning_automodel.checkpoint.hugging_face import KEY
from lightning_automodel.checkpoint.lightning_formats import METADATA, outline
from lightning_automodel.checkpoint.manifest import MANIFEST
from lightning_automodel.checkpoint.safe_load import Source, classes_and_functions, load_plain_data
from lightning_automodel.checkpoint.sharded import REST, check_files, open_tables
from lightning_automodel.checkpoint.single_file import check_content, check_file, readable
from lightning_automodel.checkpoint.state_dict import MODEL, is_optimizer_key, optimizer_key
from lightning_automodel.resume import CHECKPOINT_KEY

Report = dict[str, Any]


def inspect(path: str, verify: bool = False, weights_only: bool = True) -> Report:
    """Describe one checkpoint of either form. Raises CheckpointError if there is none.

    Args:
        path: Local, or a URL.
        verify: Read all of it, and compare it with its checksums.
        weights_only: False runs the code that the checkpoint may hold, to describe what needs it to load.

    Returns:
        Plain data; what is not known is None or missing.

        - ``path``, ``form``, and ``written_by``: by which program
        - ``damage``: what is wrong; ``verified``: whether all content was read to find that, or only names and sizes
        - ``not_plain``: classes and functions that loading needs, whose code ``weights_only=False`` runs
        - ``world_size`` and ``mesh``: number of ranks that wrote it, and along each named mesh dimension
        - ``epoch`` and ``global_step``, as Lightning counts
        - ``num_elements``: elements of the model's state, buffers included, tied parameters under each of their names;
          ``dtypes``: the same by dtype
        - ``num_bytes``: of ``model``, ``optimizers`` and ``rest``
        - ``optimizer_states``: for each optimizer, how many parameters have each kind of state
        - ``rest``: keys of everything else; ``hugging_face``: by prefix, the class of such a model, and whether it
          has adapters
    """
    filesystem, place = url_to_fs(path)
    if not filesystem.exists(place):
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}")
    is_directory = filesystem.isdir(place)
    if is_directory and not _is_directory_of_shards(filesystem, place):
        raise CheckpointError(f"{path} is not a checkpoint: it holds neither {METADATA} nor checkpoints (*.ckpt)")
    report: Report = {
        "path": path,
        "form": "directory of shards" if is_directory else "one file",
        "written_by": None,
        "damage": None,
        "verified": verify,
    }
    try:
        # What was found before any damage stays.
        with _as_checkpoint_error():
            (_describe_directory if is_directory else _describe_file)(report, verify, weights_only)
    except CheckpointError as error:
        report["damage"] = str(error)
    return report


def checkpoints_at(path: str) -> list[str]:
    """The checkpoints in a folder, sorted by name; for any other path, ``path`` itself."""
    filesystem, place = url_to_fs(path)
    if not filesystem.isdir(place) or _is_directory_of_shards(filesystem, place):
        return [path]
    found = sorted(filesystem.glob(f"{place}/*.ckpt"))
    return [filesystem.unstrip_protocol(name) if "://" in path else name for name in found] or [path]


def _is_directory_of_shards(filesystem: AbstractFileSystem, place: str) -> bool:
    return any(filesystem.exists(f"{place}/{name}") for name in (METADATA, MANIFEST))


def as_text(report: Report) -> str:
    """A line for each key."""
    return "\n".join(f"{name.replace('_', ' ') + ':':<18}{_text(value)}" for name, value in report.items())


def as_line(report: Report) -> str:
    """One line for one of several reports."""
    size = sum(report.get("num_bytes", {}).values())
    state = "complete" if report["damage"] is None else f"DAMAGED: {report['damage']}"
    at = f"epoch {report.get('epoch')}, step {report.get('global_step')}, {size:,} bytes, {report['form']}"
    return f"{report['path']}: {at}, {state}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{_text(each)} {name}" for name, each in value.items()]
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "-"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_number else "-" if value is None else str(value)


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # damaged content, or that of another program, can raise anything
        text = next(iter(str(error).splitlines()), "")
        raise CheckpointError(f"it is damaged, or not a checkpoint ({type(error).__name__}: {text[:200]})") from error


def _describe_directory(report: Report, verify: bool, weights_only: bool) -> None:
    filesystem, folder, manifest, metadata = open_tables(report["path"])
    # torch calls the files __<rank>_<number>.distcp.
    ranks = {place.relative_path.lstrip("_").partition("_")[0] for place in metadata.storage_data.values()}
    report["world_size"] = manifest.world_size if manifest is not None else len(ranks) or None
    places = metadata.planner_data
    tensors = [(tuple(map(str, places[name])), each) for name, each in outline(metadata).items() if each is not None]
    _describe_states(report, [(place, each) for place, each in tensors if _is_state(place[0])])
    sizes = report["num_bytes"]
    sizes["rest"] = sum(each.nbytes for (first, *_), each in tensors if not _is_state(first))
    try:
        content = paths.read_file(filesystem, folder, REST)
        sizes["rest"] += len(content)
        _describe_rest(report, _load(report, io.BytesIO(content), REST, weights_only))
    except FileNotFoundError:
        report["written_by"] = "torch.distributed.checkpoint"
    check_files(filesystem, folder, manifest, metadata, 0, 1 if verify else 0)
    if manifest is not None:
        report["written_by"] = "lightning_automodel"
    if verify:
        needed = {*report.get("not_plain", []), *_check_entries(filesystem, folder, metadata, manifest is None)}
        report["not_plain"] = sorted(needed)


def _is_state(key: str) -> bool:
    return key == MODEL or is_optimizer_key(key)


def _check_entries(filesystem: AbstractFileSystem, folder: str, metadata: Metadata, has_checksums: bool) -> set[str]:
    """Read each entry of the shards; returns names of what its objects need besides plain data."""
    found: set[str] = set()
    for index, place in metadata.storage_data.items():
        what = f"{index.fqn} in {place.relative_path}"
        with filesystem.open(f"{folder}/{place.relative_path}", "rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        # Checksums match whatever their writer wrote: they do not show that an entry is what the metadata says.
        try:
            if has_checksums:
                check_content(content)
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                found.update(classes_and_functions(content))
            elif not isinstance(load_plain_data(content, what, weights_only=True), Tensor):
                raise CheckpointError("it is not a tensor")
        except Exception as error:  # damaged content can raise anything
            raise CheckpointError(f"{what} cannot be loaded: {error}") from error
    return found


def _describe_file(report: Report, verify: bool, weights_only: bool) -> None:
    filesystem, place = url_to_fs(report["path"])
    if verify:
        check_file(report["path"])
    elif paths.is_local(place) and not os.path.isfile(place):
        raise CheckpointError("it is not a regular file")
    checkpoint = _load(report, readable(report["path"]), report["path"], weights_only)
    states: list[tuple[tuple[str, ...], Any]] = [
        ((MODEL, str(name)), value) for name, value in checkpoint.get(MODEL, {}).items()
    ]
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        for name, kinds in optimizer.get("state", {}).items():
            states += [((optimizer_key(index), str(name), str(kind)), value) for kind, value in kinds.items()]
    _describe_states(report, [(path, value) for path, value in states if isinstance(value, Tensor)])
    sizes = report["num_bytes"]
    sizes["rest"] = max(0, filesystem.size(place) - sum(sizes.values()))
    _describe_rest(report, {key: value for key, value in checkpoint.items() if key not in (MODEL, "optimizer_states")})


def _load(report: Report, source: Source, what: str, weights_only: bool) -> dict[str, Any]:
    """What ``torch.save`` has written; empty if loading would run code and ``weights_only`` is set."""
    report["not_plain"] = classes_and_functions(source)
    if report["not_plain"] and weights_only:
        return {}
    loaded = load_plain_data(source, what, weights_only)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{what} is not a checkpoint: it holds a {type(loaded).__name__}")
    return loaded


def _describe_states(report: Report, tensors: list[tuple[tuple[str, ...], Tensor]]) -> None:
    """Describe the states of model and optimizers; each of ``tensors`` comes with its keys, the outermost first."""
    dtypes: Counter[str] = Counter()
    sizes: Counter[str] = Counter(model=0, optimizers=0)
    by_optimizer: dict[str, Counter[str]] = {}
    for (first, *others), tensor in tensors:
        sizes["model" if first == MODEL else "optimizers"] += tensor.numel() * tensor.element_size()
        if first == MODEL:
            dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        else:
            by_optimizer.setdefault(first, Counter())[others[-1]] += 1
    report["num_elements"], report["dtypes"], report["num_bytes"] = sum(dtypes.values()), dict(dtypes), dict(sizes)
    report["optimizer_states"] = [dict(by_optimizer[key]) for key in sorted(by_optimizer)]


def _describe_rest(report: Report, rest: Mapping[str, Any]) -> None:
    for key in ("epoch", "global_step"):
        report[key] = rest[key] if isinstance(rest.get(key), int) else None
    if version := rest.get("pytorch-lightning_version"):
        report["written_by"] = f"Lightning {version}"
    if isinstance(of_run := rest.get(CHECKPOINT_KEY), dict):
        report["written_by"] = "lightning_automodel"
        report["mesh"] = {str(name): int(size) for name, size in of_run["sizes"].items()}
    report["rest"] = sorted(map(str, rest))
    report["hugging_face"] = {
        model["prefix"]: f"{model['class']}{', adapters' if 'peft' in model else ''}" for model in rest.get(KEY, [])
    }
