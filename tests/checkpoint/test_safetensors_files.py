"""Files of tensors are what safetensors writes, and large entries of shards are read block by block."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save
from torch import Tensor

from lightning_automodel.checkpoint import entries, safetensors_files
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.safetensors_files import num_bytes_of, owners_of, plan_files


def _written(folder: Path, tensors: dict[str, Tensor], planned: dict[str, Tensor] | None = None) -> Path:
    (file,) = plan_files(planned or tensors, "model", 10**9)
    for name in file.tensors:
        file.append(folder, name, tensors[name])
    return folder / file.name


def test_the_same_bytes_as_safetensors(tmp_path: Path) -> None:
    """With and without dimensions, empty, not contiguous, and with names in other scripts."""
    tensors = {
        "b.weight": torch.randn(3, 5).t(),
        "a": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        'ж"\\': torch.arange(3.0),
    }
    expected = save({name: each.contiguous() for name, each in tensors.items()}, {"format": "pt"})
    assert _written(tmp_path, tensors).read_bytes() == expected


def test_every_dtype(tmp_path: Path) -> None:
    """In one file, those with larger elements first; conjugate views, and a cast on the way."""
    bits = torch.arange(16, dtype=torch.uint8) % 2
    tensors = {str(dtype): bits.view(dtype) for dtype in safetensors_files._DTYPES}
    tensors["conjugate"] = torch.tensor([1 + 2j]).conj()
    tensors["cast"] = torch.randn(5)
    planned = {**tensors, "cast": torch.empty(5, dtype=torch.float16, device="meta")}
    # Which safetensors 0.8 writes, but cannot load.
    del (tensors["torch.float8_e8m0fnu"], planned["torch.float8_e8m0fnu"])
    found = load_file(_written(tmp_path, tensors, planned))
    assert found.pop("cast").equal(tensors.pop("cast").half())
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert found[name].view(torch.uint8).equal(value.resolve_conj().view(torch.uint8))


def test_what_they_cannot_hold() -> None:
    for value in (torch.zeros(2, dtype=torch.complex128), torch.zeros(2, 2).to_sparse()):
        with pytest.raises(CheckpointError, match=r"odd is of torch.*which safetensors files cannot hold"):
            plan_files({"odd": value}, "model", 100)


def test_the_same_files_as_huggingface_hub() -> None:
    """Tensors of all sizes, also above that of a file; ranks have about equally much to write."""
    for seed in range(30):
        generator = random.Random(seed)
        tensors = {
            f"t{i}": torch.empty(generator.randrange(1, 300)) for i in range(generator.randrange(1, 40))
        }
        expected = split_torch_state_dict_into_shards(tensors, max_shard_size=800).filename_to_tensors
        files = plan_files(tensors, "model", 800)
        assert {file.name: sorted(file.tensors) for file in files} == {
            name: sorted(names) for name, names in expected.items()
        }
        owners = owners_of(files, [0, 2])
        loads = [
            sum(f.num_bytes for f, owner in zip(files, owners, strict=True) if owner == rank)
            for rank in (0, 2)
        ]
        assert abs(loads[0] - loads[1]) <= max(file.num_bytes for file in files)


def test_sizes() -> None:
    assert [num_bytes_of(size) for size in (7, "50", "5GB", "1.5 kb")] == [7, 50, 5 * 10**9, 1500]
    with pytest.raises(ValueError, match="is not a size of files"):
        num_bytes_of("5GiB")


def _entry(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def test_large_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into contiguous tensors and columns of others, of another dtype too; what is no plain block is left to torch."""
    monkeypatch.setattr(entries, "BLOCK", 100)
    value = torch.randn(7, 30, dtype=torch.float64)
    for target in (torch.empty(7, 30, dtype=torch.float64), torch.zeros(7, 50)[:, 10:40]):
        assert entries.read_in_blocks(
            entries.part(_within(_entry(value)), 5, len(_entry(value).getvalue())), target
        )
        assert torch.equal(target, value.to(target.dtype))
    target = torch.zeros(30, 7, dtype=torch.float64)
    for other in (value.t(), value, value[:, :7], torch.tensor(1.0)):
        assert not entries.read_in_blocks(_entry(other), target)
    assert torch.equal(target, torch.zeros_like(target))
    content = bytearray(_entry(value).getvalue())
    content[content.index(value.numpy().tobytes()) + 900] ^= 1
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
        entries.read_in_blocks(io.BytesIO(content), torch.empty(7, 30))


def _within(entry: io.BytesIO) -> io.BytesIO:
    return io.BytesIO(b"other" + entry.getvalue() + b"other")
