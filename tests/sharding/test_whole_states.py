"""Whole tensors loaded into a sharded model by `load_state_dict`: what projects do with a file that they kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.rank_pool import RankPool
from tests.sharding.fits import fit_module
from tests.trainer.exactness import TinyDecoder, full_weights
from tests.trainer.runs import CASE, LabelledModule


def other_weights() -> dict[str, Tensor]:
    return TinyDecoder(CASE.seed + 2).double().state_dict()


def _altered(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in state.items()}
    first = next(iter(state))
    if how == "missing":
        del state[first]
    elif how == "unexpected":
        state["model.more"] = torch.zeros(2)
    elif how == "shape":
        state[first] = state[first][1:]
    elif how == "dtype":
        state = {name: value.float() for name, value in state.items()}
    return state


def _outcomes(module: nn.Module, whole: dict[str, Tensor]) -> list[Any]:
    """What `load_state_dict` does with each alteration: its error, or its answer and the weights."""
    found: list[Any] = []
    for how in ("none", "missing", "unexpected", "shape", "dtype"):
        for strict in (True, False):
            state = _altered(whole, how)
            try:
                answer = module.load_state_dict(state, strict=strict)
            except RuntimeError as error:
                found.append(str(error))
                continue
            weights = {name: value.sum().item() for name, value in full_weights(module.model).items()}
            found.append((tuple(answer), weights))
    return found


def _load_after_a_fit() -> tuple[list[Any], list[Any]]:
    """Outcomes with a sharded model, and with a plain one."""
    module = LabelledModule()
    whole = {f"model.{name}": value for name, value in other_weights().items()}
    fit_module(module, {})
    plain = LabelledModule()
    plain.load_state_dict({f"model.{name}": value for name, value in full_weights(module.model).items()})
    return _outcomes(module, whole), _outcomes(plain, whole)


def test_after_a_fit(pool2: RankPool) -> None:
    """Strict or not, with other keys, shapes and dtypes: what torch does with a whole model, in its words."""
    for sharded, plain in pool2.run(_load_after_a_fit):
        assert sharded == plain


class Assigns(LabelledModule):
    """Replaces its parameters instead of writing to them."""

    def on_train_start(self) -> None:
        self.load_state_dict(
            {f"model.{name}": value for name, value in other_weights().items()}, assign=True
        )


def _assign() -> str:
    with pytest.raises(AttributeError) as raised:
        fit_module(Assigns(), {})
    return str(raised.value)


def test_assigned_parameters_are_refused(pool2: RankPool) -> None:
    """FSDP2 would train shards that the module does not have."""
    for message in pool2.run(_assign):
        assert message.startswith("load_state_dict(..., assign=True), or an initialiser")


def _load_on_one_rank() -> bool:
    module = LabelledModule()
    fit_module(module, {})
    before = {name: p.to_local().detach().clone() for name, p in module.named_parameters()}
    if torch.distributed.get_rank() == 1:
        module.load_state_dict({f"model.{name}": value for name, value in other_weights().items()})
    changed = [
        not torch.equal(p.to_local(), before[name])
        for name, p in module.named_parameters()
        if p.to_local().numel()
    ]
    assert all(isinstance(p, DTensor) for p in module.parameters())
    return all(changed)


def test_is_not_a_collective(pool2: RankPool) -> None:
    assert pool2.run(_load_on_one_rank) == [False, True]
