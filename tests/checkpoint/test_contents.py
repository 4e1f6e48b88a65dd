"""What is in a checkpoint beside parameters and optimizers comes back as it was: extra state, states of callbacks."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor, nn

from lightning_automodel.checkpoint import CheckpointError
from lightning_automodel.checkpoint.__main__ import main
from tests.checkpoint.checkpoints import FORMS, AdamModule, fit, forms
from tests.checkpoint.optimizers import HidesTensors
from tests.rank_pool import RankError, RankPool

EXTRA: dict[str, Any] = {
    "text": "abc",
    "dict": {"a": 1, "b": {"c": [1, 2]}, "empty": {}},
    "empty": {},
    "none": None,
    "tensors": {"t": torch.ones(2), "listed": [torch.arange(3)]},
}


class HasExtraState(nn.Module):
    """A module of the kind that knows more than tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.value = EXTRA[kind]
        self.loaded = "nothing was loaded"

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


class WithExtraState(AdamModule):
    """One module of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleDict({f"kind_{kind}": HasExtraState(kind) for kind in EXTRA})

    def loaded(self) -> list[str]:
        return [repr(extra.loaded) for extra in self.extra.values()]


WANTED = [repr(value) for value in EXTRA.values()]


def _load_extra_state(options: dict[str, Any], path: str, with_average: bool) -> list[list[str]]:
    """As training resumes from it, and as `load_from_checkpoint` has it."""
    resumed = WithExtraState()
    for module, kwargs in ((WithExtraState(), {}), (resumed, {"ckpt_path": path, "max_epochs": 2})):
        callbacks = [EMAWeightAveraging(decay=0.5)] if with_average else []
        trainer, _ = fit(options, module, callbacks=callbacks, **kwargs)
        if module is not resumed:
            trainer.save_checkpoint(path)
    return [resumed.loaded(), WANTED if with_average else WithExtraState.load_from_checkpoint(path).loaded()]


@pytest.mark.sweep
@pytest.mark.parametrize("with_average", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_extra_state(pool2: RankPool, tmp_path: Path, form: str, with_average: bool) -> None:
    """Of any kind, also what `torch.distributed.checkpoint` would take apart or lose.

    A callback that averages puts both the weights and their average into the checkpoint; of shards that is
    refused.
    """
    path = tmp_path / "last.ckpt"
    if with_average and FORMS[form].get("data_parallel") != "ddp":
        with pytest.raises(RankError, match="HasExtraState has an extra state"):
            pool2.run(_load_extra_state, FORMS[form], str(path), with_average)
        return
    for loaded in pool2.run(_load_extra_state, FORMS[form], str(path), with_average):
        assert loaded == [WANTED] * 2
    if path.is_dir() and not with_average:
        assert main(["consolidate", str(path), str(tmp_path / "whole.ckpt")]) == 0
        assert WithExtraState.load_from_checkpoint(tmp_path / "whole.ckpt").loaded() == WANTED


class Keeps(Callback):
    """Notes on parameters: numbers under their names, and copies of them in another dtype."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        named = dict(pl_module.model.named_parameters(prefix="model"))
        self.state = {
            "norms": {name: torch.tensor(float(index)) for index, name in enumerate(named)},
            "whole": {name: torch.full(parameter.shape, 0.1) for name, parameter in named.items()},
            "shards": {name: parameter.detach().float() + 0.1 for name, parameter in named.items()},
            "alike": {"head.weight": pl_module.model.head.weight.detach() + 0.2},
            "alike.head": {"weight": torch.full(pl_module.model.head.weight.shape, 0.2)},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def _described(value: Tensor) -> Any:
    local = value.to_local() if hasattr(value, "to_local") else value
    return type(value).__name__, value.dtype, local.tolist()


def _keep(options: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """States that were saved and loaded."""
    saved = Keeps()
    loaded = Keeps()
    trainer, _ = fit(options, callbacks=[saved])
    trainer.save_checkpoint(path)
    loaded.on_train_end = lambda *_: None
    fit(options, callbacks=[loaded], ckpt_path=path, max_epochs=1)
    return [
        {
            kind: {name: _described(value) for name, value in kept.items()}
            for kind, kept in each.state.items()
        }
        for each in (saved, loaded)
    ]


@pytest.mark.parametrize("form", forms("shards", "one_file_of_shards"))
def test_states_of_callbacks(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """What was shards comes back as shards, the rest as it was, each in its dtype."""
    for saved, loaded in pool2.run(_keep, FORMS[form], str(tmp_path / "last.ckpt")):
        assert saved == loaded
        kinds = {value[0] for value in loaded["shards"].values()}
        assert kinds == ({"Tensor"} if "replicated" in form else {"Shard"})


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


class SavesOnce(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1 and not trainer.fit_loop.epoch_loop._should_accumulate():
            trainer.save_checkpoint(self.path)


def _save_tensors(options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of a callback and buffers, as they are loaded."""
    fit(options, WithViews(), callbacks=[KeepsTensors(), SavesOnce(path)])
    loaded = KeepsTensors()
    module = WithViews()
    module.conjugate.zero_(), module.negative.zero_()
    fit(options, module, callbacks=[loaded], ckpt_path=path, max_epochs=1)
    return loaded.loaded, {"conjugate": module.conjugate, "negative": module.negative}


@pytest.mark.parametrize(
    ("form", "in_background"),
    [
        ("shards", True),
        ("one_file_of_shards", False),
        ("replicated", True),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (("shards", False), ("replicated", False))
        ),
        *(pytest.param("replicated_directory", case, marks=pytest.mark.sweep) for case in (False, True)),
    ],
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


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class WithCounter(AdamModule):
    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), lr=0.01, momentum=0.9)


class SavesAtStart(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def _count(options: dict[str, Any], folder: str) -> list[int]:
    """Steps counted where a save comes before the first, from there on, and from a later one on."""
    counts = []
    settings = [
        {"callbacks": [SavesAtStart(f"{folder}/first.ckpt")]},
        {"ckpt_path": f"{folder}/first.ckpt"},
        {"ckpt_path": f"{folder}/later.ckpt", "max_epochs": 2},
    ]
    for each in settings:
        trainer, _ = fit(options, WithCounter(), **each)
        counts.append(trainer.optimizers[0].param_groups[0]["steps"])
        trainer.save_checkpoint(f"{folder}/later.ckpt")
    return counts


@pytest.mark.parametrize("form", forms("shards", "replicated_directory"))
def test_optimizers_that_count_in_their_groups(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """What torch does to know an optimizer's state is no step of the run."""
    for counts in pool2.run(_count, FORMS[form], str(tmp_path)):
        assert counts == [2, 2, 4]


class KeepsObjects(Callback):
    """Its state is an object that holds shards."""

    held: Any = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.held = HidesTensors(pl_module.model.head.weight.detach().clone())

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}


def _keep_objects(options: dict[str, Any], path: str) -> str:
    trainer, _ = fit(options, callbacks=[KeepsObjects()])
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(path)
    return str(raised.value)


@pytest.mark.parametrize("form", ["shards", "one_file_of_shards"])
def test_shards_in_objects(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Would be pickled as the part of a rank: the first save names them, and leaves nothing."""
    for message in pool2.run(_keep_objects, FORMS[form], str(tmp_path / "last.ckpt")):
        assert "checkpoint['callbacks']['KeepsObjects']['held'] " in message
        assert "full_tensor()" in message
    assert list(tmp_path.iterdir()) == []


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
