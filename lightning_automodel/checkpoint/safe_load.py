"""Loading files without running code that they may hold."""

import dataclasses
import enum
import io
import pickle
import zipfile
from pathlib import PurePosixPath
from typing import IO, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_automodel.checkpoint.errors import CheckpointError

Source = str | io.BytesIO
"""A local file, which is memory-mapped so that only what is used is read, or a file's content."""


class NotPlainDataError(CheckpointError):
    """A file can be loaded only by running code; ``names`` are the classes and functions that it needs."""

    def __init__(self, what: str, names: list[str], reason: str) -> None:
        super().__init__(
            f"{what} holds more than plain data, which can run code when it is loaded ({', '.join(names) or reason}):"
            " if you trust its source, pass weights_only=False to the Trainer's method, or allow the class with"
            " torch.serialization.add_safe_globals"
        )
        self.names = names


def load_plain_data(source: Source, what: str, weights_only: bool) -> Any:
    """``torch.load`` to host memory, with an error that says what to do about objects that are not plain data.

    If ``weights_only`` is False, it runs code that the file holds. ``what`` names the source in the message.
    """
    check_format(source)
    if not isinstance(source, str):
        source.seek(0)
    try:
        return torch.load(source, map_location="cpu", weights_only=weights_only, mmap=isinstance(source, str))
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        try:
            names = classes_and_functions(source)
        except (RuntimeError, ValueError, pickle.UnpicklingError):
            names = []
        raise NotPlainDataError(what, names, str(error)[:500]) from error


def check_format(source: str | IO[bytes], name: str = "it") -> None:
    """Raise CheckpointError unless ``source`` is an archive, which torch checks with more care than older formats."""
    if not zipfile.is_zipfile(source):
        raise CheckpointError(f"{name} is cut off, damaged, or not what torch.save has written since release 1.6")


def classes_and_functions(source: Source) -> list[str]:
    """Names of what loading ``source``, written by ``torch.save``, would need besides plain data."""
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))


def warn_about_code(source: Source) -> None:
    """Warn if what ``torch.save`` has written will not load as plain data."""
    if names := classes_and_functions(source):
        rank_zero_warn(
            f"The checkpoint holds more than plain data ({', '.join(names)}): it can be loaded only with"
            " weights_only=False. Keep hyperparameters and states of callbacks to numbers, strings, tensors, lists and"
            " dicts."
        )


_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class MetadataUnpickler(pickle.Unpickler):
    """Loads only the classes that describe shards, since others could run code.

    Those are the data classes and enumerations of torch's modules, and nothing else that torch may put there.
    """

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module in _METADATA_MODULES:
            found = super().find_class(module, name)
            is_data = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
            # A name with dots could lead to something that the module only imports.
            if is_data and found.__module__ == module:
                return found
        # Lightning's strategies store the path of the save, which may be of another operating system.
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePosixPath
        if (module, name) == ("torch", "Size") or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        if module == "torch.serialization" and name.lstrip("_") == "get_layout":  # torch's way of pickling a layout
            return _layout
        raise CheckpointError(f".metadata names {module}.{name}, which is not a class that describes shards")


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."))
    if not isinstance(layout, torch.layout):
        raise TypeError(f"{name} is not a layout")
    return layout
