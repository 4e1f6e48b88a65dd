"""Loading files without running code that they may hold."""

import contextlib
import dataclasses
import enum
import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
from typing_extensions import override

from lightning_automodel.checkpoint.errors import CheckpointError


def load_plain_data(source: str | io.BytesIO, what: str, weights_only: bool) -> Any:
    """``torch.load`` to host memory; a local file is mapped, so only the parts in use are read.

    Raises CheckpointError about ``what`` if loading it needs code, with the names of classes and functions.
    With ``weights_only=False`` this runs that code instead.
    """
    is_mapped = isinstance(source, str)
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        return torch.load(source, map_location="cpu", weights_only=weights_only, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        needed = str(error)[:500]
        with contextlib.suppress(RuntimeError, ValueError, pickle.UnpicklingError):
            if isinstance(source, io.BytesIO):
                source.seek(0)
            names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
            needed = ", ".join(sorted(names)) or needed
        raise CheckpointError(
            f"{what} holds more than plain data, which can run code when it is loaded ({needed}): if you"
            " trust its source, pass weights_only=False to the Trainer's method, or allow the class with"
            " torch.serialization.add_safe_globals"
        ) from error


class MetadataUnpickler(pickle.Unpickler):
    """Loads ``.metadata`` with torch's data classes and enumerations for shards, and refuses all others."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            named = super().find_class(module, name)
            is_data = isinstance(named, type) and (
                dataclasses.is_dataclass(named) or issubclass(named, enum.Enum)
            )
            # A name with dots could reach an object that the module only imports.
            if is_data and named.__module__ == module:
                return named
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):  # of any operating system
            return PurePosixPath
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module == "torch.serialization" and name.lstrip("_") == "get_layout":
            layouts = [value for value in vars(torch).values() if isinstance(value, torch.layout)]
            return {str(layout): layout for layout in layouts}.__getitem__
        raise CheckpointError(f".metadata names {module}.{name}, which is not a class that describes shards")
