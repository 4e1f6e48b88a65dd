"""Exports and consolidations hold one tensor at a time."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_automodel.checkpoint import export_hugging_face, model_state
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.reading import read_directory
from lightning_automodel.checkpoint.shard_writer import prepare_shards
from tests.rank_pool import RankPool

ROWS = 4352
NUM_LAYERS = 6
TENSOR_BYTES = 4 * ROWS * 2048  # 36 MB: malloc gives such memory back at once when it is freed
FIXED_BYTES = 30_000_000


def _grown_by(call: Callable[[], object]) -> int:
    """Peak bytes of the process above those before; mapped files count too."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def _filled(num_layers: int, rows: int) -> nn.ModuleList:
    layers = nn.ModuleList(nn.Linear(2048, rows, bias=False, device="meta") for _ in range(num_layers))
    for index, layer in enumerate(layers):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        layer.to_empty(device="cpu")
        nn.init.constant_(layer.weight, index)
    return layers


def _export(folder: str, num_layers: int, rows: int) -> dict[str, int]:
    """How much the memory of this rank grows, by what it does."""
    layers = _filled(num_layers, rows)
    path = f"{folder}/run.ckpt"
    live = partial(export_hugging_face, layers, f"{folder}/live", max_shard_size="50MB", prefix="")
    grown = {"live": _grown_by(live)}
    prepare_shards({"epoch": 1, "global_step": 2, "state_dict": model_state(layers)}, path)(None)
    if dist.get_rank() == 0:
        for command, *options in (["export", "--key", "", "--dtype", "bfloat16"], ["consolidate"]):
            grown[command] = _grown_by(partial(main, [command, path, f"{folder}/{command}", *options]))
        grown["all of it"] = _grown_by(partial(read_directory, path, None, None))
    return grown


def _export_twice(folder: str) -> dict[str, int]:
    _export(f"{folder}/small", 2, 8)  # which imports what is needed
    return _export(folder, NUM_LAYERS, ROWS)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in /proc")
def test_memory(pool2: RankPool, tmp_path: Path) -> None:
    """A model of 214 MB in tensors of 36 MB, by each rank, and by one process from the shards."""
    first, second = pool2.run(_export_twice, str(tmp_path))
    of_everything = first.pop("all of it")
    assert max(*first.values(), *second.values()) <= TENSOR_BYTES + FIXED_BYTES, (first, second)
    assert of_everything >= NUM_LAYERS * TENSOR_BYTES / 2  # this measures something
    live = load_file(tmp_path / "live" / "model-00006-of-00006.safetensors")
    assert torch.equal(live["5.weight"], torch.full((ROWS, 2048), 5.0))
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(exported["4.weight"], torch.full((ROWS, 2048), 4.0, dtype=torch.bfloat16))
    written = torch.load(tmp_path / "consolidate", weights_only=True, mmap=True)
    assert torch.equal(written["state_dict"]["3.weight"], torch.full((ROWS, 2048), 3.0))
