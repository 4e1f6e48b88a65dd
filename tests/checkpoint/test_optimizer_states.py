"""States of optimizers of every form come back, or are refused at the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel.checkpoint import CheckpointError
from tests.checkpoint import optimizers
from tests.checkpoint.checkpoints import FORMS, AdamModule, deviation, fit, forms
from tests.checkpoint.optimizers import Module
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE, TOLERANCE


def _save(options: dict[str, Any], kind: Any, path: str) -> dict[str, Tensor]:
    """Weights of a run that is not stopped, of which a checkpoint is saved half-way."""
    trainer, _ = fit(options, Module(kind))
    trainer.save_checkpoint(path)
    return full_weights(fit(options, Module(kind), max_epochs=2)[1].model)


def _resume(options: dict[str, Any], kind: Any, path: str) -> dict[str, Tensor]:
    _, module = fit(options, Module(kind, CASE.seed + 2), ckpt_path=path, max_epochs=2)
    return full_weights(module.model)


@pytest.mark.parametrize(
    ("saving", "resuming", "kind"),
    [
        ("replicated", "shards", optimizers.Lookahead),
        ("replicated_directory", "one_file_of_shards", optimizers.HookedEntries),
    ],
)
@pytest.mark.every_case
def test_under_the_other_engine(
    pool2: RankPool, tmp_path: Path, saving: str, resuming: str, kind: Any
) -> None:
    """Whole tensors become shards, and the reverse; the search draws more states."""
    path = str(tmp_path / "last.ckpt")
    expected = pool2.run(_save, FORMS[saving], kind, path)[0]
    for weights in pool2.run(_resume, FORMS[resuming], kind, path):
        assert deviation(weights, expected) <= TOLERANCE


def _refused(options: dict[str, Any], kind: Any, path: str) -> str:
    trainer, _ = fit(options, Module(kind))
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(path)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        (
            optimizers.InObjects,
            "['state']['model.embedding.weight']['hidden']['objects'] cannot be pickled: it is an object",
        ),
        (optimizers.CountsApart, "(param_groups.0.seen is 7 on rank 0 and 8 on rank 1)"),
        (optimizers.LocalMomentum, "(state.model.embedding.weight.momentum is "),
    ],
)
@pytest.mark.every_case
def test_what_could_not_be_loaded_is_refused(pool2: RankPool, tmp_path: Path, kind: Any, entry: str) -> None:
    """At the first save, with the entry and the way out, on every rank."""
    path = tmp_path / "last.ckpt"
    for message in pool2.run(_refused, FORMS["shards"], kind, str(path)):
        assert entry in message
        assert "data_parallel='ddp'" in message
    assert not path.exists()


class HalfModule(AdamModule):
    """Parameters of low precision, whose optimizer keeps more than that for them."""

    def __init__(self, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.model.to(torch.float32)

    def configure_optimizers(self) -> Any:
        return KeepsPrecision(self.parameters(), lr=0.01)


class KeepsPrecision(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["wide"] = torch.full_like(parameter, 1 / 3, dtype=torch.float64)
                state["counter"] = torch.tensor(2**24 + 1)
                state["mask"] = torch.zeros_like(parameter, dtype=torch.bool)
                state["kind"] = "text"
                state["named"] = {"list": ["a", "b"]}
        return loss


def _kept(state: dict[str, Any]) -> list[Any]:
    found = []
    for value in state.values():
        if isinstance(value, Tensor):
            value = (str(value.dtype), value.full_tensor() if hasattr(value, "full_tensor") else value)
            value = (value[0], value[1].tolist())
        found.append(value)
    return found


def _keep_precision(options: dict[str, Any], path: str) -> tuple[list[Any], list[Any]]:
    trainer, _ = fit(options, HalfModule())
    trainer.save_checkpoint(path)
    resumed, _ = fit(options, HalfModule(), ckpt_path=path, max_epochs=1)
    states = [next(iter(each.optimizers[0].state.values())) for each in (trainer, resumed)]
    return _kept(states[0]), _kept(states[1])


@pytest.mark.parametrize("form", forms("shards", "replicated"))
def test_states_are_not_cast(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """To the dtype of their parameter, as torch's ``load_state_dict`` does, which also loses strings."""
    for saved, loaded in pool2.run(_keep_precision, FORMS[form], str(tmp_path / "last.ckpt")):
        assert saved == loaded
        assert [value[0] for value in loaded[:3]] == ["torch.float64", "torch.int64", "torch.bool"]


class Wide(HalfModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.double()


def _load_as_other_precision(options: dict[str, Any], path: str) -> set[str]:
    trainer, _ = fit(options, HalfModule())
    trainer.save_checkpoint(path)
    resumed, _ = fit(options, Wide(), ckpt_path=path, max_epochs=1)
    return {str(state["mask"].dtype) for state in resumed.optimizers[0].state.values()}


def test_states_of_parameters_of_another_dtype(pool2: RankPool, tmp_path: Path) -> None:
    """Are cast with their parameters, as ever: kernels want both of one dtype."""
    assert pool2.run(_load_as_other_precision, {}, str(tmp_path / "last.ckpt")) == [{"torch.float64"}] * 2


class InOrder(AdamModule):
    """Trains two groups of parameters, in their order or from the last to the first."""

    def __init__(self, step: int, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.step = step

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": part[:: self.step]} for part in (parameters[:4], parameters[4:])]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def _resume_in_another_order(options: dict[str, Any], path: str) -> float:
    fit(options, InOrder(1))[0].save_checkpoint(path)
    _, resumed = fit(options, InOrder(-1, CASE.seed + 2), ckpt_path=path, max_epochs=2)
    _, uninterrupted = fit(options, InOrder(1), max_epochs=2)
    return deviation(full_weights(resumed.model), full_weights(uninterrupted.model))


@pytest.mark.every_case
@pytest.mark.parametrize("form", ["shards", "replicated"])
def test_another_order_of_parameters(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Each gets its own state; other parameters are refused (`test_damage.py`)."""
    for found in pool2.run(_resume_in_another_order, FORMS[form], str(tmp_path / "last.ckpt")):
        assert found <= TOLERANCE
