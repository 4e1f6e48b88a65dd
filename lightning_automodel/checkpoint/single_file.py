"""One file from ``torch.save`` with whole tensors, checked against its checksums before anything is loaded.

Such a file is a zip archive: torch writes a checksum for each record, but does not check it when it loads.
"""

import io
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from torch import Tensor
from torch.utils.serialization import config as serialization_config
from typing_extensions import override

from lightning_automodel.checkpoint import optimizers, paths, state_dict
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.optimizers import Names
from lightning_automodel.checkpoint.safe_load import load_plain_data
from lightning_automodel.checkpoint.state_dict import MODEL, Saved
from lightning_automodel.checkpoint.trees import joined, take_apart
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.internals.torch import module_versions, without_wrappers
from lightning_automodel.sharding.apply import shard_like


def prepare_file(
    checkpoint: dict[str, Any],
    path: str,
    save: Callable[[dict[str, Any], str], None],
    copy: bool = False,
) -> Callable[[dist.ProcessGroup | None], None]:
    """Prepare a file, which ``save`` writes on rank 0. A collective; see :func:`.shard_writer.prepare_shards`."""
    what = f"Cannot save {path}"
    with on_every_rank(what):
        if group_rank() == 0:
            paths.prepare_place(path)
            if copy:
                checkpoint = state_dict.copied(checkpoint)

    def write(group: dist.ProcessGroup | None) -> None:
        with on_every_rank(what, group):
            if group_rank() == 0:
                save(checkpoint, path)

    return write


_PAUSE_BYTES = 1 << 25


class _PausingFile:
    """An open ``file`` for ``torch.save`` that calls ``pause`` after every ``_PAUSE_BYTES``."""

    def __init__(self, file: IO[bytes], pause: Callable[[], None]) -> None:
        self._file = file
        self._pause = pause
        self._num_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        written = self._file.write(data)
        self._num_bytes += written
        if self._num_bytes > _PAUSE_BYTES:
            self._num_bytes = 0
            self._pause()
        return written

    def flush(self) -> None:
        self._file.flush()


def save_file(checkpoint: dict[str, Any], path: str, pause: Callable[[], None] | None = None) -> None:
    """Write ``checkpoint`` to a file that appears in one step, once all of it is on disk. Called by one rank.

    For local files ``pause`` is called after every few tensors, so that the caller can free what was
    written.
    """
    if not paths.is_local(path):
        filesystem, place = url_to_fs(path)
        if filesystem.isdir(place):  # an object store can hold both, and the directory would be loaded
            raise CheckpointError(f"{path} is a directory: remove it, or choose another path")
        stream = io.BytesIO()
        _save_with_checksums(checkpoint, stream)
        filesystem.pipe_file(place, stream.getvalue())
        return
    temporary = Path(path).with_name(paths.temporary_name())
    try:
        with open(temporary, "wb") as file:
            _save_with_checksums(checkpoint, file if pause is None else _PausingFile(file, pause))
        paths.sync(temporary)
        paths.replace(temporary, Path(path))
    except BaseException:
        paths.discard(temporary)
        raise


def _save_with_checksums(checkpoint: dict[str, Any], file: Any) -> None:
    with serialization_config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
        torch.save(checkpoint, file)


def load_file(path: str, weights_only: bool | None, reads_content: bool = True) -> dict[str, Any]:
    """Load a file to host memory, after comparing its content with its checksums if it ``reads_content``.

    A local file is mapped, so that only the parts in use are read. Any other file is fetched whole, since
    not every server can send parts. Raises :class:`CheckpointError` if it is damaged, or not a file.
    """
    filesystem, place = url_to_fs(path)
    if not filesystem.exists(place):
        raise CheckpointError("there is no such file or directory")
    if paths.is_local(path) and not os.path.isfile(place):
        raise CheckpointError("it is not a regular file")
    source: str | io.BytesIO
    if paths.is_local(path):
        source = place
        if reads_content:
            with open(place, "rb") as file:
                check_content(file)
    else:
        source = io.BytesIO(filesystem.cat_file(place))
        if reads_content:
            check_content(source)
    checkpoint = load_plain_data(source, path, weights_only is not False)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(MODEL), dict):
        raise CheckpointError(f"it has no {MODEL!r}: this is not a checkpoint of a LightningModule")
    return checkpoint


def check_content(file: IO[bytes], name: str = "it") -> None:
    """Compare the content of ``torch.save``'s ``file`` with its checksums; CheckpointError if it differs."""
    try:
        damaged = zipfile.ZipFile(file).testzip()
    except Exception as error:  # damaged content can raise anything
        raise CheckpointError(
            f"{name} is damaged, or not what torch.save has written since release 1.6"
            f" ({type(error).__name__}: {error})"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{name} has changed since it was written (wrong checksum of {damaged})")


class WholeCheckpoint(Saved):
    """A checkpoint of whole tensors, in the form that Lightning loads, open for loading.

    Plain optimizers only number their parameters. For files that hold no names, ``parameter_names`` has the
    names of each of this run's optimizers by group.
    """

    def __init__(self, path: str, checkpoint: dict[str, Any], parameter_names: Iterable[Names] = ()) -> None:
        self.path = path
        self.rest = {key: value for key, value in checkpoint.items() if key not in state_dict.STATES}
        self.module_versions = module_versions(checkpoint[MODEL])
        of_model = state_dict.without_wrappers_in(checkpoint[MODEL])
        values: dict[str, Any] = {f"{MODEL}.{name}": value for name, value in of_model.items()}
        self._optimizers: list[dict[str, Any]] = []
        names_by_optimizer = self.rest.pop(optimizers.PARAMETER_NAMES, None) or parameter_names
        states = [state for state in checkpoint.get(state_dict.OPTIMIZERS, []) if state]
        for index, (state, names) in enumerate(zip(states, names_by_optimizer, strict=False)):
            named = optimizers.by_name(state, optimizers.flat(names))
            tree, leaves = take_apart(named, (optimizers.optimizer_key(index),))
            self._optimizers.append(tree)
            values.update({joined(path): leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)})
        # Lightning's WeightAveraging keeps a state of the model in "current_model_state".
        sharded = {*self.rest.pop(state_dict.SHARDED_STATES, ()), "current_model_state"}
        for place, tensors in state_dict.dicts_in(self.rest):
            if place in sharded:
                named = {f"{place}.{without_wrappers(name)}": value for name, value in tensors.items()}
                values.update(named)
        self.entries = {key: value if isinstance(value, Tensor) else None for key, value in values.items()}
        self._values = values

    @override
    def optimizer_states(self) -> list[dict[str, Any]]:
        return self._optimizers

    @override
    def read_into(self, targets: dict[str, Any]) -> None:
        """Overwrite the tensors in ``targets`` in place, and replace its other values. Not a collective."""
        fill_tree(targets, self._values)

    def read_model_alone(self, name: str) -> Any:
        """One entry of the model's state; a tensor is whole and in host memory. Not a collective."""
        return self._values[f"{MODEL}.{name}"]


def fill_tree(targets: Any, values: Mapping[str, Any], prefix: str = "") -> None:
    """Overwrite the tensors in ``targets``, nested dicts and lists, with whole ``values`` by flattened name.

    Each rank keeps its part of sharded tensors. Values that are not tensors are replaced. Not a collective.
    """
    items = targets.items() if isinstance(targets, dict) else enumerate(targets)
    for key, target in list(items):
        name = f"{prefix}{key}"
        if isinstance(target, (dict, list)) and name not in values:
            fill_tree(target, values, f"{name}.")
        elif isinstance(target, Tensor) and isinstance(values[name], Tensor):
            with torch.no_grad():
                target.copy_(shard_like(target, values[name]))
        else:
            targets[key] = values[name]
