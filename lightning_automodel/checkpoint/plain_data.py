"""Loading files without running code that they may hold."""

import pickle
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_automodel import _compat
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


class MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that describe shards, and no others, since others could run code."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _compat.CHECKPOINT_METADATA_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f".metadata names {module}.{name}, which describes no shard")
