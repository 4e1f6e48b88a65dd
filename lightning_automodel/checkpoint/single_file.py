"""One file with whole tensors, as ``torch.save`` writes it, with a checksum that is checked before anything is loaded.

The checksum stands in the comment at the end of the zip archive, which such a file is; torch and Lightning do not mind.
"""

import io
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from torch import nn
from torch.optim import Optimizer

from lightning_automodel.checkpoint import atomic, paths
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.safe_load import load_plain_data, warn_about_code
from lightning_automodel.checkpoint.state_dict import (
    MODEL,
    SHARDED_PLACES,
    check_groups,
    check_number,
    no_optimizer_state,
    optimizer_key,
)
from lightning_automodel.checkpoint.streams import RecordedStream, crc32_of
from lightning_automodel.sharding.apply import shard_like
from lightning_automodel.sharding.param_names import without_wrappers

_END_OF_ARCHIVE = b"PK\x05\x06"
_END_SIZE = 22
_COMMENT = b"lightning_automodel crc32=%08x"
_COMMENT_SIZE = len(_COMMENT % 0)
_NO_COMMENT = b"\x00\x00"


def save_file(checkpoint: dict[str, Any], path: str) -> None:
    """Write ``checkpoint`` to a file that appears in one step, once all of it is on disk. Called by one rank."""
    if not paths.is_local(path):
        stream = io.BytesIO()
        _write(checkpoint, stream)
        warn_about_code(stream)
        filesystem, place = url_to_fs(path)
        # On an object store, a directory can stand beside it, and would be taken for the checkpoint.
        below = filesystem.find(place) if filesystem.isdir(place) else []
        filesystem.pipe_file(place, stream.getvalue())
        for name in below:
            if name.strip("/") != place.strip("/"):
                filesystem.rm_file(name)
        return
    with new_file(path) as file:
        _write(checkpoint, file)


@contextmanager
def new_file(path: str) -> Iterator[IO[bytes]]:
    """What the block writes, an archive with its checksum, becomes the file ``path`` once all of it is on disk.

    If the block raises, what was at ``path`` stays.
    """
    staging = Path(path).with_name(atomic.unfinished_name())
    try:
        with open(staging, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            _check(file)
        warn_about_code(staging)
        atomic.publish(staging, Path(path))
    except BaseException:
        atomic.discard(staging)
        raise


def check_file(path: str) -> None:
    """Read a file once and compare it with its checksum, or those of its parts where another program wrote it.

    Raises:
        CheckpointError: If the file is damaged, or missing.
    """
    filesystem, place = url_to_fs(path)
    if not filesystem.exists(place):
        raise FileNotFoundError("there is no such file or directory")
    with _opened(path) as file:
        _check(file)


def _opened(path: str) -> IO[bytes]:
    """A file for reading in any order; from elsewhere all of it is fetched, since not every server sends parts."""
    filesystem, place = url_to_fs(path)
    return filesystem.open(place, "rb") if paths.is_local(path) else io.BytesIO(filesystem.cat_file(place))


def has_checksum(file: Any) -> bool:
    """Whether this package has written an open file."""
    return _checksum_at_end(file) is not None


def load_file(path: str, weights_only: bool | None) -> dict[str, Any]:
    """Load a whole checkpoint to host memory; a local one is mapped, so that only what is used is read.

    Args:
        path: The file.
        weights_only: False lets it run the code that it may hold; else plain data is loaded alone.

    Raises:
        CheckpointError: If it holds more than plain data.
    """
    safely = weights_only is not False
    if paths.is_local(path) and zipfile.is_zipfile(path):
        return load_plain_data(path, path, safely, mmap=True)
    with _opened(path) as file:
        return load_plain_data(file, path, safely)


class WholeCheckpoint:
    """A checkpoint of whole tensors, open for loading; see :class:`~lightning_automodel.checkpoint.state_dict.Saved`.

    Args:
        path: Where it comes from, for messages.
        checkpoint: As Lightning loads it. The states of model and optimizers are taken out.
        parameter_names: Those of each optimizer of the run, in its order, since plain optimizers number parameters.
        sizes: Of the tensors of the run's model, by name.
    """

    def __init__(
        self,
        path: str,
        checkpoint: dict[str, Any],
        parameter_names: list[list[str]],
        sizes: Mapping[str, torch.Size],
    ) -> None:
        self.path, self.rest = path, checkpoint
        trees = {}
        states = checkpoint.get("optimizer_states", [])
        for index, (state, names) in enumerate(zip(states, parameter_names, strict=False)):
            trees[optimizer_key(index)] = _by_name(state, names)
        self._values = {without_wrappers(name): value for name, value in _flattened(trees)}
        of_model = checkpoint.get(MODEL, {})
        self._values.update({f"{MODEL}.{without_wrappers(name)}": value for name, value in of_model.items()})
        told = checkpoint.pop(SHARDED_PLACES, None)
        rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, "optimizer_states")}
        for place, tensors in _states_in(rest):
            # What another strategy has saved, or this one whole, does not tell what becomes shards here.
            if place in told if told is not None else _are_of_model(tensors, sizes):
                self._values.update({f"{place}.{name}": tensor for name, tensor in tensors.items()})

    @property
    def entries(self) -> Mapping[str, torch.Size | None]:
        """Sizes of tensors by flattened name; None for other objects."""
        return {name: value.size() if isinstance(value, torch.Tensor) else None for name, value in self._values.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor by its flattened name."""
        return self._values[name].dtype

    def read_into(self, targets: Any, prefix: str = "") -> None:
        """Overwrite the tensors in ``targets`` in place, and replace what else is in it. Not a collective."""
        items = targets.items() if isinstance(targets, dict) else enumerate(targets)
        for key, target in list(items):
            name = f"{prefix}{key}"
            if isinstance(target, (dict, list)) and name not in self._values:
                self.read_into(target, f"{name}.")
            elif isinstance(target, torch.Tensor) and isinstance(self._values[name], torch.Tensor):
                with torch.no_grad():
                    target.copy_(shard_like(target, self._values[name]))
            else:
                targets[key] = self._values[name]


def fill_module(module: nn.Module, checkpoint: Mapping[str, Any], optimizers: list[Optimizer], strict: bool) -> None:
    """Let ``module``, a replicated model, load its state as its own hooks want it. Not a collective.

    Args:
        module: Its ``load_state_dict`` is called.
        checkpoint: State under names that differ in wrappers at most, or that the module's hooks know.
        optimizers: Which the checkpoint must hold the state of; Lightning loads that afterwards.
        strict: As for ``load_state_dict``.

    Raises:
        CheckpointError: If the state is of another model, whose tensors are then as they were, or of other optimizers.
    """
    everything = module.state_dict()
    state = _under_own_names(checkpoint[MODEL], everything)
    own = {name: value for name, value in everything.items() if isinstance(value, torch.Tensor)}
    shapes_fit = all(getattr(state.get(name), "shape", None) == value.shape for name, value in own.items())
    fits = shapes_fit and state.keys() <= everything.keys()
    if fits:
        _check_optimizers(optimizers, checkpoint)
    kept = {} if fits else {name: value.clone() for name, value in own.items()}
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        with torch.no_grad():
            for name, value in kept.items():
                own[name].copy_(value)
        raise CheckpointError(
            f"it is of another model: {error} (with LightningModule.strict_loading = False, names that only one of the"
            " two has are passed over)"
        ) from error
    if not fits:
        _check_optimizers(optimizers, checkpoint)


def _check_optimizers(optimizers: list[Optimizer], checkpoint: Mapping[str, Any]) -> None:
    if not optimizers:
        return
    states = checkpoint.get("optimizer_states", [])
    if not states:
        raise no_optimizer_state(0)
    check_number("optimizers", len(states), len(optimizers))
    for index, (optimizer, saved) in enumerate(zip(optimizers, states, strict=True)):
        if "param_groups" not in saved:
            continue  # it has a form of its own, and checks that
        check_groups(optimizer, saved["param_groups"], index)
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            check_number(f"parameters in a group of optimizer {index}", len(group["params"]), len(own["params"]))


def _under_own_names(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """``state`` of a model under the ``names`` that this run's has, where only wrappers make them differ."""
    own = {without_wrappers(name): name for name in names}
    renamed = {own.get(without_wrappers(name), name): value for name, value in state.items()}
    return state if renamed.keys() == state.keys() else renamed


def _by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state with parameters by name, also where they are numbered."""
    ids = [each for group in state["param_groups"] for each in group["params"]]
    if not all(isinstance(each, int) for each in ids):
        return state
    if len(ids) != len(names):
        raise CheckpointError(f"an optimizer of {len(ids)} parameters was saved, and this run's has {len(names)}")
    by_id = dict(zip(ids, names, strict=True))
    return {**state, "state": {by_id[each]: value for each, value in state["state"].items()}}


def _flattened(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with names as torch.distributed.checkpoint gives them: lists are opened where dicts or tensors are in."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        opened = isinstance(value, Mapping) or (
            isinstance(value, list) and any(isinstance(each, (Mapping, torch.Tensor)) for each in value)
        )
        if opened:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _states_in(tree: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Tensors of each dict, by its place as :func:`.split_shards` names it."""
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves = {without_wrappers(str(name)): leaf for name, leaf in value.items()}
            if tensors := {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}:
                yield f"{place}{key}", tensors
            yield from _states_in(value, f"{place}{key}/")


def _are_of_model(tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, torch.Size]) -> bool:
    return all(sizes.get(name) == tensor.size() for name, tensor in tensors.items())


def _write(checkpoint: dict[str, Any], file: Any) -> None:
    """Write an archive, and append to it the checksum of all that ``torch.save`` has written."""
    recorded = RecordedStream(file)
    with recorded.telling_first_error():
        torch.save(checkpoint, recorded)
    _append(file, recorded.size, recorded.crc32)


def add_checksum(file: Any) -> None:
    """Append the checksum to an archive that was not written at one go."""
    size = file.seek(0, os.SEEK_END)
    _append(file, size, _crc32(file, size))


def _append(file: Any, size: int, value: int) -> None:
    file.seek(size - len(_NO_COMMENT))
    file.write(_COMMENT_SIZE.to_bytes(2, "little") + _COMMENT % value)


def _checksum_at_end(file: Any) -> bytes | None:
    """The comment of an archive if it is as long as ours."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_SIZE - _COMMENT_SIZE))
    end = file.read()
    if end[:4] == _END_OF_ARCHIVE and end[_END_SIZE - 2 : _END_SIZE] == _COMMENT_SIZE.to_bytes(2, "little"):
        return end[_END_SIZE:]
    return None


def _check(file: Any) -> None:
    size = file.seek(0, os.SEEK_END)
    if (told := _checksum_at_end(file)) is not None:
        value = zlib.crc32(_NO_COMMENT, _crc32(file, size - _COMMENT_SIZE - len(_NO_COMMENT)))
        if told != _COMMENT % value:
            raise CheckpointError("its content has changed since it was written (wrong checksum)")
        return
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        if size == 0:
            raise CheckpointError("the file is empty")
        return  # the format that torch wrote before version 1.6 has no checksums
    try:
        file.seek(0)
        damaged = zipfile.ZipFile(file).testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        raise CheckpointError(f"the file is cut off or damaged ({error}; {size} bytes)") from error
    if damaged is not None:
        raise CheckpointError(f"its content has changed since it was written (wrong checksum of {damaged})")


def _crc32(file: Any, size: int) -> int:
    """CRC-32 of the first ``size`` bytes."""
    file.seek(0)
    return crc32_of(file, size)
