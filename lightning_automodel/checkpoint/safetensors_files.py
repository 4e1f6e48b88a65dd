"""Safetensors files for ``from_pretrained``, written tensor by tensor.

safetensors' own writer (0.8) takes all tensors of a file at once. The format is the header's length in 8
bytes, the header (JSON with the offsets of each tensor), and the tensors' bytes.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.entries import BLOCK
from lightning_automodel.checkpoint.errors import CheckpointError

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "": 1}


@dataclass(frozen=True)
class SafetensorsFile:
    """The plan of one file: tensors by name in the file's order; only their dtype and size are read."""

    name: str
    tensors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def append(self, folder: Path, name: str, value: Tensor) -> None:
        """Write the next tensor, cast to the planned dtype. Call it in the order of ``tensors``."""
        with self._naming_errors(), open(folder / self.name, "ab") as file:
            if name == next(iter(self.tensors)):
                file.write(self._header())
            flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            dtype = self.tensors[name].dtype
            for block in flat.split(max(1, BLOCK // max(value.element_size(), dtype.itemsize))):
                file.write(memoryview(block.to("cpu", dtype).view(torch.uint8).numpy()))

    def sync(self, folder: Path) -> None:
        """Wait until the whole file is on disk."""
        with self._naming_errors():
            paths.sync(folder / self.name)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _header(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in self.tensors.items():
            end = offset + tensor.nbytes
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.size()),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        padded = text + b" " * (-len(text) % 8)  # aligns the tensors
        return len(padded).to_bytes(8, "little") + padded


def plan_files(tensors: Mapping[str, Tensor], stem: str, max_bytes: int) -> list[SafetensorsFile]:
    """Distribute ``tensors`` over files in their order, like huggingface_hub.

    A tensor larger than ``max_bytes`` gets its own file.
    """
    if sys.byteorder != "little":
        raise CheckpointError("safetensors are little-endian: export on a machine that is")
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        _check(name, tensor)
        if tensor.nbytes > max_bytes:
            groups.insert(len(groups) - 1, {name: tensor})
            continue
        if size + tensor.nbytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    groups = [group for group in groups if group]
    files: list[SafetensorsFile] = []
    for number, group in enumerate(groups, 1):
        part = ""
        if len(groups) > 1:
            part = f"-{number:05d}-of-{len(groups):05d}"
        # Tensors with large elements first, so that every tensor is aligned.
        in_order = sorted(group, key=lambda name: (-group[name].element_size(), name))
        files.append(SafetensorsFile(f"{stem}{part}.safetensors", {name: group[name] for name in in_order}))
    return files


def index_of(files: Sequence[SafetensorsFile]) -> dict[str, Any]:
    """The content of the index of several files."""
    weight_map = {name: file.name for file in files for name in file.tensors}
    return {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": weight_map}


def owners_of(files: Sequence[SafetensorsFile], ranks: Sequence[int]) -> list[int]:
    """The rank that writes each file, so that each of ``ranks`` writes about the same number of bytes."""
    load = dict.fromkeys(ranks, 0)
    owners = [0] * len(files)
    for index in sorted(range(len(files)), key=lambda index: -files[index].num_bytes):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        load[rank] += files[index].num_bytes
        owners[index] = rank
    return owners


def num_bytes_of(size: str | int) -> int:
    """Number of bytes of a size such as ``"5GB"``. Units are decimal, as in huggingface_hub."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]B|)\s*", str(size).upper())
    if match is None:
        raise ValueError(
            f"{size!r} is not a size of files: give a number of bytes, or one with KB, MB, GB or TB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _check(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise CheckpointError(
            f"{name} is of {kind}, which safetensors files cannot hold: leave it out of the model"
        )
