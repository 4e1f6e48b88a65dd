"""What callbacks keep in a checkpoint comes back as it was: tensors of all kinds, and collections of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.checkpoint.checkpoints import FORMS, AdamModule, Saves, fit
from tests.rank_pool import RankPool


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


class Pair(NamedTuple):
    first: Any
    second: Any


class WithViews(AdamModule):
    def __init__(self) -> None:
        super().__init__()
        for name in ("conjugate", "negative"):
            self.register_buffer(name, _tensors()[name])


class Keeps(Callback):
    """Tensors of all kinds, shards in lists and in other shapes, and collections of other classes."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.has_loaded = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.has_loaded:
            weight = pl_module.model.head.weight.detach()
            self.state = {
                **_tensors(),
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
        self.has_loaded = True


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        values = None if whole.is_meta else whole.to_dense().tolist()
        return whole.dtype, whole.shape, whole.is_sparse, values
    if isinstance(value, dict):
        return type(value).__name__, {key: _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_described(item) for item in value]
    return value


def _save_and_load(options: dict[str, Any], path: str) -> tuple[list[Any], str]:
    """What a callback and buffers hold when they are saved and when they are loaded, and the class of loaded shards."""
    described = []
    for settings in (
        {"callbacks": [Keeps(), Saves("on_train_batch_end", 2, path)]},
        {"callbacks": [Keeps()], "ckpt_path": path, "max_epochs": 1, "weights_only": False},
    ):
        module = WithViews()
        if described:
            module.conjugate.zero_(), module.negative.zero_()
        fit(options, module, **settings)
        described.append(_described([settings["callbacks"][0].state, module.conjugate, module.negative]))
    return described, type(settings["callbacks"][0].state["listed"][0]).__name__


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("form", "in_background"),
    [
        ("shards", True),
        ("one_file_of_shards", False),
        ("replicated", False),
        ("replicated", True),
        ("replicated_directory", False),
    ],
)
def test_what_callbacks_keep(pool2: RankPool, tmp_path: Path, form: str, in_background: bool) -> None:
    """Comes back as it was: a Counter has counted no twice, a list of shards has shards, of a file whole tensors."""
    options = {**FORMS[form], "async_checkpoint": in_background}
    for (saved, loaded), kind in pool2.run(_save_and_load, options, str(tmp_path / "last.ckpt")):
        assert saved == loaded
        state = loaded[1][0][1]
        assert state.keys() >= _tensors().keys()
        assert state["negative"] == _described(_tensors()["negative"])
        assert state["counts"] == ("Counter", {"batches": 2})
        assert kind == ("Shard" if form == "shards" else "Tensor")
