"""What callbacks and optimizers keep comes back as it was; what a checkpoint cannot hold is left out or refused."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint.shard_directory import prepare_shards
from lightning_automodel.distributed import process_group
from tests.checkpoint.checkpoints import (
    FORMS,
    AdamModule,
    Saves,
    adamw,
    fit,
    refused,
    resume,
    save,
    uninterrupted,
)
from tests.checkpoint.search import described
from tests.rank_pool import RankPool
from tests.trainer.exactness import Block, TinyDecoder, full_weights, weight_error
from tests.trainer.plain import ModelModule
from tests.trainer.runs import CASE, TOLERANCE


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
            }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict
        self.has_loaded = True


def _save_and_load(options: dict[str, Any], path: str) -> tuple[list[Any], str]:
    """What a callback and buffers hold when they are saved and when they are loaded, and the class of loaded shards."""
    states = []
    for settings in (
        {"callbacks": [Keeps(), Saves("on_train_batch_end", 2, path)]},
        {"callbacks": [Keeps()], "ckpt_path": path, "max_epochs": 1, "weights_only": False},
    ):
        module = WithViews()
        if states:
            module.conjugate.zero_(), module.negative.zero_()
        fit(options, module, **settings)
        held = [settings["callbacks"][0].state, module.conjugate, module.negative]
        states.append(described(held, with_kind=False))
    return states, type(settings["callbacks"][0].state["listed"][0]).__name__


@pytest.mark.every_case
@pytest.mark.parametrize("form", FORMS)
def test_what_callbacks_keep(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Comes back as it was: a Counter has counted no twice, a list of shards has shards, of a file whole tensors."""
    options = {**FORMS[form], "async_checkpoint": form in ("shards", "replicated")}
    for (saved, loaded), kind in pool2.run(_save_and_load, options, str(tmp_path / "last.ckpt")):
        assert saved == loaded
        assert kind == ("Shard" if form == "shards" else "Tensor")


# --- What it cannot hold ----------------------------------------------------------------------------------------------


class HoldsANetwork(ModelModule):
    """Its network is among the hyper-parameters, as in libraries that take one."""

    def __init__(self, net: Any, ignore: Any = None) -> None:
        super().__init__(net)
        self.save_hyperparameters(ignore=ignore, logger=False)

    def configure_optimizers(self) -> Any:
        return adamw(self)


class PutsItThere(HoldsANetwork):
    """By its own hook, as disent's modules do: nothing that is left out of the hyper-parameters helps."""

    def __init__(self, net: Any) -> None:
        super().__init__(net, ignore=["net"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"] = {"width": 3, "nested": {"net": [self.model, self.model.head]}}


def _save_hyper_parameters(
    options: dict[str, Any], folder: str, how: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Whole weights, and what was said of the hyper-parameters at the first save."""
    net = TinyDecoder(0).double()
    module = PutsItThere(net) if how == "hook" else HoldsANetwork(net)
    callbacks: list[Callback] = [ModelCheckpoint(folder, filename="a")]
    with warnings.catch_warnings(record=True) as caught:
        fit(options, module, callbacks=callbacks, enable_checkpointing=True)
    said = [str(warning.message) for warning in caught]
    return full_weights(module.model), [text for text in said if text.startswith("The hyper-parameters")]


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["hyper-parameter", "hook"])
@pytest.mark.parametrize("form", ["shards", "one_file_of_shards"])
@pytest.mark.filterwarnings("ignore:Attribute 'net'")
def test_networks_among_the_hyper_parameters(pool2: RankPool, tmp_path: Path, form: str, how: str) -> None:
    """Are left out, which a note tells: they are passed to ``load_from_checkpoint``, which fills them."""
    (weights, said), _ = pool2.run(_save_hyper_parameters, FORMS[form], str(tmp_path), how)
    path = tmp_path / "a.ckpt"
    saved = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)["hyper_parameters"]
    assert saved == ({"width": 3} if how == "hook" else {"ignore": None})
    assert f"load_from_checkpoint(path, {'nested=nested' if how == 'hook' else 'net=net'})" in said[0]
    if how == "hyper-parameter":
        with pytest.raises(TypeError, match="net"):
            HoldsANetwork.load_from_checkpoint(path)
        loaded = HoldsANetwork.load_from_checkpoint(path, net=TinyDecoder(0).double())
        assert all(torch.equal(weights[name], value) for name, value in loaded.model.named_parameters())


class Unpicklable(AdamModule):
    """Puts there what nothing can pickle, or shards that are no parameter's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        other = fully_shard(Block())
        held = {
            "function": lambda: None,
            "module": other,
            "shards": HidesTensors(self.model.head.weight.detach()),
            "named tuple": Pair(self.model.head.weight.detach(), 4),
        }
        checkpoint["mine"] = {"of": {"net": held[self.kind]}}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("function", "cannot be pickled: Can't"),
        ("module", "cannot be pickled: Can't pickle <class 'torch.distributed.fsdp."),
        ("shards", "cannot be pickled: it is an object that holds sharded tensors"),
        ("named tuple", "cannot be pickled: it is an object that holds sharded tensors"),
    ],
)
def test_what_cannot_be_pickled_is_named(pool2: RankPool, tmp_path: Path, kind: str, message: str) -> None:
    """On every rank, and nothing is left."""
    for raised in pool2.run(refused, {}, f"{tmp_path}/a", Unpicklable, (kind,)):
        assert raised.startswith(
            f"Cannot save {tmp_path}/a: rank 0: checkpoint['mine']['of']['net'] {message}"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_cycle_is_named(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"state_dict": {}}
    tree["itself"] = tree
    with pytest.raises(RuntimeError, match="RecursionError"):
        prepare_shards(tree, str(tmp_path / "a.ckpt"))
    assert list(tmp_path.iterdir()) == []


def _timeout_in_the_background(options: dict[str, Any], folder: str) -> timedelta:
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    fit({**options, "timeout": 2.5}, AdamModule(), callbacks=[saves], enable_checkpointing=True)
    group = process_group.kept_with_world()["background"]  # made for this save, or an earlier one
    return group._get_backend(torch.device("cpu")).options._timeout


def test_timeout_in_the_background(pool2: RankPool, tmp_path: Path) -> None:
    told = pool2.run(_timeout_in_the_background, {"async_checkpoint": True}, str(tmp_path))
    assert told == [timedelta(minutes=2.5)] * 2


# --- States of optimizers ---------------------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and has a state dict of a form of its own, as pytorch_optimizer's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["lr"] = 0.01 * self.count
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups
        self.count = state_dict["count"]


class HidesTensors:
    """An object that is neither a dict, a list nor a dataclass."""

    def __init__(self, momentum: Tensor) -> None:
        self.momentum = momentum


class KeepsWrongly(torch.optim.SGD):
    """Keeps plain tensors of its rank's part, or another number on each rank."""

    def __init__(self, params: Any, what: str) -> None:
        super().__init__(params, lr=0.05)
        self.what = what

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            if self.what == "number":
                group["seen"] = 7 + dist.get_rank()
            for parameter in group["params"]:
                if self.what == "part":
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    self.state[parameter]["momentum"] = local.detach() + 1
        return loss


class Module(AdamModule):
    def __init__(self, kind: Any, *args: Any, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.kind = kind
        self.args = args

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), *self.args)


class InOrder(AdamModule):
    """Trains two groups of parameters, in their order or from the last to the first."""

    def __init__(self, step: int, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.step = step

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": part[:: self.step]} for part in (parameters[:4], parameters[4:])]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


@pytest.mark.parametrize(
    ("saving", "resuming", "make", "saved", "resumed"),
    [
        ("replicated", "shards", Module, Lookahead, Lookahead),
        ("shards", "shards", InOrder, 1, -1),
        ("replicated", "replicated", InOrder, 1, -1),
    ],
)
@pytest.mark.every_case
def test_states_come_back(
    pool2: RankPool, tmp_path: Path, saving: str, resuming: str, make: Any, saved: Any, resumed: Any
) -> None:
    """Whole tensors become shards, and the reverse; the search draws more states.

    Each parameter gets its own where they come in another order; other parameters are refused (`test_damage.py`).
    """
    path = str(tmp_path / "last.ckpt")
    pool2.run(save, FORMS[saving], path, make, (saved,))
    expected = pool2.run(uninterrupted, FORMS[saving], make, (saved,))[0]
    for weights in pool2.run(resume, FORMS[resuming], path, partial(make, resumed, seed=CASE.seed + 2), ()):
        assert weight_error(weights, expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("what", "entry"),
    [
        ("number", "(param_groups.0.seen is 7 on rank 0 and 8 on rank 1)"),
        ("part", "(state.model.embedding.weight.momentum is "),
    ],
)
@pytest.mark.every_case
def test_what_could_not_be_loaded_is_refused(pool2: RankPool, tmp_path: Path, what: str, entry: str) -> None:
    """At the first save, with the entry and the way out, on every rank."""
    path = tmp_path / "last.ckpt"
    for message in pool2.run(refused, FORMS["shards"], str(path), Module, (KeepsWrongly, what)):
        assert entry in message
        assert "data_parallel='ddp'" in message
    assert not path.exists()


class KeepsMask(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mask"] = torch.zeros_like(parameter, dtype=torch.bool)
        return loss


class Masked(AdamModule):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.model.to(dtype)

    def configure_optimizers(self) -> Any:
        return KeepsMask(self.parameters(), lr=0.01)


def _load_as(dtype: torch.dtype, path: str) -> set[str]:
    trainer, _ = fit({}, Masked(dtype), ckpt_path=path, max_epochs=1)
    return {str(state["mask"].dtype) for state in trainer.optimizers[0].state.values()}


def test_states_of_parameters_of_another_dtype(pool2: RankPool, tmp_path: Path) -> None:
    """Are cast with their parameters, as torch does: kernels want both of one dtype. Of the same, none is."""
    path = str(tmp_path / "last.ckpt")
    pool2.run(save, {}, path, Masked, (torch.float32,))
    assert pool2.run(_load_as, torch.float32, path) == [{"torch.bool"}] * 2
    assert pool2.run(_load_as, torch.float64, path) == [{"torch.float64"}] * 2
