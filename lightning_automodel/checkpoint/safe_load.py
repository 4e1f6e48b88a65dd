"""Loading files without running code that they may hold."""

import pickle
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_automodel import torch_internals
from lightning_automodel.checkpoint.errors import CheckpointError


def load_plain_data(stream: Any, what: str, weights_only: bool, **kwargs: Any) -> Any:
    """``torch.load`` to host memory, with an error that says what to do about objects that are no plain data.

    Args:
        stream: Open for reading, or a path.
        what: For the message.
        weights_only: False runs code that the file holds.
        **kwargs: For ``torch.load``.

    Raises:
        CheckpointError: If there are such objects.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=weights_only, **kwargs)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        raise CheckpointError(
            f"{what} holds more than plain data, which can run code when it is loaded ({_named(stream, error)}): if you"
            " trust its source, pass weights_only=False to the Trainer's method, or allow the class with"
            " torch.serialization.add_safe_globals"
        ) from error


def _named(stream: Any, error: Exception) -> str:
    """The objects that are no plain data."""
    try:
        if hasattr(stream, "seek"):
            stream.seek(0)
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))) or str(error)
    except (RuntimeError, ValueError, pickle.UnpicklingError):
        return str(error)[:500]


def warn_about_code(stream: Any) -> None:
    """Warn if what ``torch.save`` has written to ``stream``, or the file of this path, will not load as plain data."""
    if hasattr(stream, "seek"):
        stream.seek(0)
    if names := torch.serialization.get_unsafe_globals_in_checkpoint(stream):
        rank_zero_warn(
            f"The checkpoint holds more than plain data ({', '.join(sorted(names))}): it will load with"
            " weights_only=False alone. Hyperparameters and states of callbacks are best kept to numbers, strings,"
            " tensors, lists and dicts."
        )


_PATH_MODULES = ("pathlib", "pathlib._local")
_PATHS: dict[str, type[PurePath]] = {
    "PosixPath": PurePosixPath,
    "PurePosixPath": PurePosixPath,
    "WindowsPath": PureWindowsPath,
    "PureWindowsPath": PureWindowsPath,
}
"""Lightning's strategies note where they saved; the path may be one of another system."""


class MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that describe shards, and no others, since others could run code."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in torch_internals.CHECKPOINT_METADATA_CLASSES:
            return super().find_class(module, name)
        if module in _PATH_MODULES and name in _PATHS:
            return _PATHS[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f".metadata names {module}.{name}, which describes no shard")


class _Unknown:
    """Stands for an object whose class is not loaded."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Unknown":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_outline(stream: Any, what: str) -> dict[str, Any]:
    """What ``torch.save`` has written, with tensors that have no values, and stand-ins for what is no plain data.

    Runs no code that the file may hold, and reads no tensors.

    Args:
        stream: Open for reading.
        what: For the message.

    Raises:
        CheckpointError: If it is damaged, calls functions, or holds no dict.
    """
    unknown: list[str] = []
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
        stream.seek(0)
        stand_ins = [(_stand_in(name), name) for name in unknown]
        with torch.serialization.safe_globals(stand_ins), torch_internals.FakeTensorMode():  # type: ignore[arg-type]
            loaded = torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{what} cannot be read without running code ({', '.join(sorted(unknown))})") from error
    except Exception as error:  # damaged content can raise anything
        text = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{what} cannot be read ({text[:200]})") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{what} is no checkpoint: it holds a {type(loaded).__name__}")
    return loaded


def _stand_in(name: str) -> type[_Unknown]:
    """A class for each name, since torch knows classes by their names."""
    return type(name.rpartition(".")[2], (_Unknown,), {})
