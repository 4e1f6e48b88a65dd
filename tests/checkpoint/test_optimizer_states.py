"""States of optimizers of every form come back, or are refused at the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.checkpoint.checkpoints import (
    FORMS,
    AdamModule,
    deviation,
    fit,
    refused,
    resume,
    save,
    uninterrupted,
)
from tests.rank_pool import RankPool
from tests.trainer.runs import CASE, TOLERANCE


class HookedEntries(torch.optim.SGD):
    """Adds an entry to its state dict by torch's hooks: the rate of a step is their number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.phase = 0
        self.register_state_dict_post_hook(lambda _, state: {**state, "phase": self.phase})
        self.register_load_state_dict_pre_hook(self._load)

    def _load(self, _: Any, state: dict[str, Any]) -> None:
        self.phase = state["phase"]

    def step(self, closure: Any = None) -> Any:
        self.phase += 1
        for group in self.param_groups:
            group["lr"] = 0.05 * self.phase
        return super().step(closure)


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
    """Keeps plain tensors of its rank's part, an object that hides shards, or another number on each rank."""

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
                elif self.what == "object":
                    self.state[parameter]["hidden"] = {"objects": HidesTensors(torch.zeros_like(parameter))}
        return loss


class Module(AdamModule):
    def __init__(self, kind: Any, *args: Any, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.kind = kind
        self.args = args

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), *self.args)


@pytest.mark.parametrize(
    ("saving", "resuming", "kind"),
    [
        ("replicated", "shards", Lookahead),
        ("replicated_directory", "one_file_of_shards", HookedEntries),
    ],
)
@pytest.mark.every_case
def test_under_the_other_engine(
    pool2: RankPool, tmp_path: Path, saving: str, resuming: str, kind: Any
) -> None:
    """Whole tensors become shards, and the reverse; the search draws more states."""
    path = str(tmp_path / "last.ckpt")
    pool2.run(save, FORMS[saving], path, Module, (kind,))
    expected = pool2.run(uninterrupted, FORMS[saving], Module, (kind,))[0]
    for weights in pool2.run(resume, FORMS[resuming], path, Module, (kind,)):
        assert deviation(weights, expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("what", "entry"),
    [
        (
            "object",
            "['state']['model.embedding.weight']['hidden']['objects'] cannot be pickled: it is an object",
        ),
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


class InOrder(AdamModule):
    """Trains two groups of parameters, in their order or from the last to the first."""

    def __init__(self, step: int, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.step = step

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": part[:: self.step]} for part in (parameters[:4], parameters[4:])]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


@pytest.mark.every_case
@pytest.mark.parametrize("form", ["shards", "replicated"])
def test_another_order_of_parameters(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Each gets its own state; other parameters are refused (`test_damage.py`)."""
    path = str(tmp_path / "last.ckpt")
    pool2.run(save, FORMS[form], path, InOrder, (1,))
    (expected, _) = pool2.run(uninterrupted, FORMS[form], InOrder, (1,))
    for weights in pool2.run(resume, FORMS[form], path, InOrder, (-1, CASE.seed + 2)):
        assert deviation(weights, expected) <= TOLERANCE
