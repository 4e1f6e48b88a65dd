"""An entry of a directory is a tensor whatever a hook does with it, and reads itself when its values are used."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_automodel.checkpoint.shard_directory import open_checkpoint, prepare_shards
from lightning_automodel.checkpoint.tree import Entry

VALUES = torch.arange(12.0).view(3, 4)


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    prepare_shards({"state_dict": {"weight": VALUES.clone()}}, str(tmp_path / "a.ckpt"))(None)
    found = open_checkpoint(str(tmp_path / "a.ckpt"), None)[0]["state_dict"]["weight"]
    assert isinstance(found, Entry)
    return found


def test_what_is_known_is_not_read(entry: Entry) -> None:
    assert (entry.shape, entry.dtype, entry.device, entry.dim()) == ((3, 4), torch.float32, VALUES.device, 2)
    assert (entry.numel(), entry.is_meta) == (12, False)
    assert entry.value is None


def _loaded(entry: Tensor) -> Tensor:
    layer = nn.Linear(4, 3, bias=False)
    layer.load_state_dict({"weight": entry})
    return layer.weight.detach()


def _pickled(entry: Tensor) -> Tensor:
    stream = io.BytesIO()
    torch.save({"a": entry}, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)["a"]


def _set(entry: Tensor) -> Tensor:
    entry[0] = 1
    return entry


USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda value: value + 1,
    "in place": lambda value: value.mul_(2),
    "zero": lambda value: value.zero_(),
    "set": _set,
    "copy into": lambda value: value.copy_(torch.ones(3, 4)),
    "copied": lambda value: torch.zeros(3, 4).copy_(value),
    "slice": lambda value: value[1:, :2],
    "view": lambda value: value.view(-1),
    "transposed": lambda value: value.T,
    "data": lambda value: value.data,
    "detached": lambda value: value.detach(),
    "cat": lambda value: torch.cat([value, value]),
    "other dtype": lambda value: value.to(torch.float64),
    "item": lambda value: value[0, 1].item(),
    "list": lambda value: value.tolist(),
    "numpy": lambda value: torch.from_numpy(value.numpy().copy()),
    "interpolated": lambda value: functional.interpolate(value[None, None], (6, 8)),
    "equal": lambda value: torch.equal(value, VALUES),
    "loaded": _loaded,
    "pickled": _pickled,
    "printed": lambda value: repr(value.clone()),
}


@pytest.mark.parametrize("use", USES)
def test_uses(entry: Entry, use: str) -> None:
    """As of a plain tensor, in the result and in what is left."""
    plain = VALUES.clone()
    expected = USES[use](plain)
    found = USES[use](entry)
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected
    assert torch.equal(entry.read(), plain)


def test_values_are_kept_once_they_are_used(entry: Entry) -> None:
    """A copy has those of then, also if nothing had used them."""
    unread = copy.deepcopy(entry)
    entry.mul_(2)
    copied = copy.deepcopy(entry)
    entry.add_(1)
    copied.sub_(1)
    assert torch.equal(unread + 0, VALUES)
    assert torch.equal(copied, 2 * VALUES - 1)
    assert torch.equal(entry.read(), 2 * VALUES + 1)


def test_a_cycle_is_named(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"state_dict": {}}
    tree["itself"] = tree
    with pytest.raises(RuntimeError, match="RecursionError"):
        prepare_shards(tree, str(tmp_path / "a.ckpt"))
    assert list(tmp_path.iterdir()) == []
