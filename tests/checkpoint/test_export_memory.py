"""Exports and consolidations hold one tensor at a time, beside what is mapped to files."""

from __future__ import annotations

import re
import sys
import threading
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
from lightning_automodel.checkpoint.reading import load_any
from lightning_automodel.checkpoint.shard_directory import prepare_shards
from tests.rank_pool import RankPool

ROWS = 4352
NUM_LAYERS = 6
TENSOR_BYTES = 4 * ROWS * 2048  # 36 MB: malloc gives such memory back at once when it is freed
FIXED_BYTES = 45_000_000


def _grown_by(call: Callable[[], object], name: str) -> int:
    """Peak bytes of the process above those before: "VmRSS", or "RssAnon", which the system cannot drop."""
    has_ended = threading.Event()
    peak = before = _status(name)

    def watch() -> None:
        nonlocal peak
        while not has_ended.wait(0.002):
            peak = max(peak, _status(name))

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    has_ended.set()
    watcher.join()
    return peak - before


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def _llama(num_layers: int, rows: int) -> nn.Module:
    """Nearly all of it is in feed-forward matrices of `rows`; each is filled with its number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 2048, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, head_dim=2, intermediate_size=rows, num_hidden_layers=num_layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, index)
    return model


def _export(folder: str, num_layers: int, rows: int) -> dict[str, int]:
    """How much the memory of this rank grows, by what it does."""
    model = _llama(num_layers, rows)
    path = f"{folder}/run.ckpt"
    live = partial(export_hugging_face, model, f"{folder}/live")
    grown = {"live": _grown_by(live, "RssAnon")}
    prepare_shards({"epoch": 1, "global_step": 2, "state_dict": model_state(model)}, path)(None)
    if dist.get_rank() == 0:
        consolidate = partial(main, ["consolidate", path, f"{folder}/consolidate"])
        grown["consolidate"] = _grown_by(consolidate, "RssAnon")
        grown["all of it"] = _grown_by(partial(load_any, path, None, None), "VmRSS")
    return grown


def _export_twice(folder: str) -> dict[str, int]:
    _export(f"{folder}/small", 1, 8)  # which imports what is needed
    return _export(folder, NUM_LAYERS // 3, ROWS)


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in /proc")
def test_memory(pool2: RankPool, tmp_path: Path) -> None:
    """A model of 214 MB in tensors of 36 MB, by both ranks, and by one process from the shards."""
    first, second = pool2.run(_export_twice, str(tmp_path))
    of_everything = first.pop("all of it")
    # To gather a tensor, gloo holds it two or three times.
    assert max(first["live"], second["live"]) <= 3 * TENSOR_BYTES + FIXED_BYTES, (first, second)
    # The tensor, and while it is read its parts, twice.
    assert first["consolidate"] <= 3 * TENSOR_BYTES + FIXED_BYTES, first
    assert of_everything >= NUM_LAYERS * TENSOR_BYTES / 2  # this measures something
    exported = load_file(tmp_path / "live" / "model.safetensors")
    assert len(exported) == 3 + 9 * NUM_LAYERS // 3
    matrix = exported["model.layers.1.mlp.down_proj.weight"]
    assert matrix.shape == (2048, ROWS)
    assert (matrix == matrix[0, 0]).all()
    assert exported["model.layers.0.mlp.down_proj.weight"][0, 0] != matrix[0, 0] != 0
    written = torch.load(tmp_path / "consolidate", weights_only=True, mmap=True)
    assert torch.equal(written["state_dict"]["model.layers.1.mlp.down_proj.weight"], matrix)
