"""The model's part of a checkpoint, read tensor by tensor in one process, whatever its form."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.sharded import ShardDirectory
from lightning_automodel.checkpoint.single_file import check_file, load_file
from lightning_automodel.checkpoint.state_dict import MODEL
from lightning_automodel.sharding.param_names import without_wrappers


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is, without its values.

    Attributes:
        size: Its whole shape.
        dtype: Of its elements.
    """

    size: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.size.numel() * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorInfo":
        """Of a tensor; a sharded one is described as a whole."""
        return cls(tensor.size(), tensor.dtype)


class ModelReader(Protocol):
    """The state of a model on disk; every process may read it by itself."""

    rest: Mapping[str, Any]
    """The checkpoint without the states of model and optimizers."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name; wrappers leave no trace in the names."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors in host memory; from a file they may be mapped, so leave them as they are."""

    def objects(self) -> Mapping[str, Any]:
        """What in the model's state is no tensor, by name."""


def open_model(path: str, weights_only: bool | None) -> ModelReader:
    """Check a checkpoint, whole, and open its model. Not a collective.

    Args:
        path: A directory of shards or a file; local, or any URL that fsspec knows.
        weights_only: False runs code that it may hold.

    Raises:
        CheckpointError: If it is damaged, missing, or holds more than plain data.
    """
    return _Directory(path, weights_only) if paths.is_directory(path) else _File(path, weights_only)


class _Directory:
    """Reads beside the tensors that are asked for one rank's shard of one of them."""

    def __init__(self, path: str, weights_only: bool | None) -> None:
        self._shards = ShardDirectory(path, weights_only, alone=True)
        self.rest: Mapping[str, Any] = self._shards.rest

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name.removeprefix(f"{MODEL}."): TensorInfo(entry.size, entry.properties.dtype)
            for name, entry in self._shards.metadata.state_dict_metadata.items()
            if name.startswith(f"{MODEL}.") and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        read = {name: torch.empty(self.tensors[name].size, dtype=self.tensors[name].dtype) for name in names}
        self._shards.read_into({MODEL: read})
        return read

    def objects(self) -> Mapping[str, Any]:
        return self._shards.objects()


class _File:
    def __init__(self, path: str, weights_only: bool | None) -> None:
        with on_every_rank(f"Cannot load {path}", alone=True):
            check_file(path)
            checkpoint = load_file(path, weights_only)
            if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(MODEL), dict):
                raise CheckpointError(f"it has no {MODEL!r}: this is no checkpoint of a LightningModule")
        state = {without_wrappers(name): value for name, value in checkpoint[MODEL].items()}
        self._state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self._objects = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, "optimizer_states")}
        self.rest: Mapping[str, Any] = rest

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo.of(tensor) for name, tensor in self._state.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._state[name] for name in names}

    def objects(self) -> Mapping[str, Any]:
        return self._objects
