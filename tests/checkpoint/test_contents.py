"""What callbacks keep in a checkpoint comes back as it was: tensors of all kinds, and collections of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.checkpoint.checkpoints import FORMS, AdamModule, Saves, fit, forms
from tests.rank_pool import RankPool


def _described(value: Tensor) -> Any:
    local = value.to_local() if hasattr(value, "to_local") else value
    return type(value).__name__, value.dtype, local.tolist()


def _tensors() -> dict[str, Tensor]:
    numbers = torch.arange(6.0).view(2, 3)
    return {
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "turned": numbers.t(),
        "part": numbers[1:],
        "repeated": torch.ones(1).expand(5),
        "yes or no": torch.tensor([True, False]),
        "number": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "without values": torch.empty(2, device="meta"),
    }


class WithViews(AdamModule):
    """Buffers that are views of a special kind."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("conjugate", "negative"):
            self.register_buffer(name, _tensors()[name])


class KeepsTensors(Callback):
    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return _tensors()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def _save_tensors(options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of a callback and buffers, as they are loaded."""
    fit(options, WithViews(), callbacks=[KeepsTensors(), Saves("on_train_batch_end", 2, path)])
    loaded = KeepsTensors()
    module = WithViews()
    module.conjugate.zero_(), module.negative.zero_()
    fit(options, module, callbacks=[loaded], ckpt_path=path, max_epochs=1)
    return loaded.loaded, {"conjugate": module.conjugate, "negative": module.negative}


@pytest.mark.parametrize(
    ("form", "in_background"),
    [("shards", True), ("one_file_of_shards", False), ("replicated", True), ("replicated_directory", False)],
)
def test_tensors_of_all_kinds(pool2: RankPool, tmp_path: Path, form: str, in_background: bool) -> None:
    """Views, those without storages, and those without values."""
    options = {**FORMS[form], "async_checkpoint": in_background}
    wanted = _tensors()
    for of_callback, buffers in pool2.run(_save_tensors, options, str(tmp_path / "last.ckpt")):
        for name, value in [*of_callback.items(), *buffers.items()]:
            assert (value.shape, value.dtype, value.is_sparse) == (
                wanted[name].shape,
                wanted[name].dtype,
                wanted[name].is_sparse,
            )
            if not wanted[name].is_meta:
                assert torch.equal(value.to_dense(), wanted[name].to_dense()), name
        assert of_callback.keys() == wanted.keys()


class Collects(Callback):
    """Shards in lists, under other names and in other shapes, and collections of other classes."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        weight = pl_module.model.head.weight.detach()
        self.state = {
            "listed": [weight + 1, (weight.float(),)],
            "other": {"name": weight * 2, 3: weight[0] * 1},
            "counts": Counter(batches=2),
            "factory": defaultdict(int, seen=3),
            "pair": Pair(weight + 3, 4),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


def _as_plain_data(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _described(value)
    if isinstance(value, dict):
        return type(value).__name__, {key: _as_plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_as_plain_data(item) for item in value]
    return value


def _collect(options: dict[str, Any], path: str) -> tuple[Any, Any]:
    saved = Collects()
    loaded = Collects()
    trainer, _ = fit(options, callbacks=[saved])
    trainer.save_checkpoint(path)
    loaded.on_train_end = lambda *_: None
    fit(options, callbacks=[loaded], ckpt_path=path, max_epochs=1, weights_only=False)
    return _as_plain_data(saved.state), _as_plain_data(loaded.state)


@pytest.mark.parametrize("form", forms("shards", "one_file_of_shards", "replicated"))
def test_collections_of_callbacks(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Come back as they were: a Counter has counted no twice, a list of shards holds shards."""
    for saved, loaded in pool2.run(_collect, FORMS[form], str(tmp_path / "last.ckpt")):
        assert saved == loaded
        assert loaded[1]["counts"] == ("Counter", {"batches": 2})
        assert loaded[1]["listed"][1][0][0] == ("Tensor" if "replicated" in form else "Shard")
