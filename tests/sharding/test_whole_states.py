"""Whole tensors loaded into a sharded model by `load_state_dict`: what projects do with a file that they kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    TinyDecoder,
    assert_exact,
    full_weights,
    micro_batches,
)
from tests.trainer.runs import CASE, STRATEGIES, LabelledModule, loader, make_trainer, mean_loss

ACCUMULATE = 2
LOADED_AFTER = 2


def other_weights() -> dict[str, Tensor]:
    return TinyDecoder(CASE.seed + 2).double().state_dict()


class Loads(LabelledModule):
    """Replaces its weights within a window, as training from the best weights so far does."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == LOADED_AFTER:
            self.load_state_dict({f"model.{name}": value for name, value in other_weights().items()})


def _train(options: dict[str, Any]) -> dict[str, Tensor]:
    module = Loads()
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return full_weights(module.model)


def _train_plainly() -> dict[str, Tensor]:
    model = TinyDecoder(CASE.seed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for start in range(0, CASE.num_batches, ACCUMULATE):
        window = range(start, start + ACCUMULATE)
        all_batches = [by_rank[index] for by_rank in micro_batches(CASE)[:2] for index in window]
        count = max(sum(int((batch["labels"] != -100).sum()) for batch in all_batches), 1)
        optimizer.zero_grad()
        for index in window:
            for by_rank in micro_batches(CASE)[:2]:
                (mean_loss(model, by_rank[index], "sum") / count).backward()
            if index == LOADED_AFTER:
                model.load_state_dict(other_weights())
        optimizer.step()
    return full_weights(model)


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_within_a_window(pool2: RankPool, options: dict[str, Any]) -> None:
    expected = _train_plainly()
    assert_exact(pool2.run(_train, options), expected)


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


def _load_after_a_fit(options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Outcomes with a sharded model, and with a plain one."""
    module = LabelledModule()
    whole = {f"model.{name}": value for name, value in other_weights().items()}
    trainer = make_trainer(AutomodelStrategy(**options))
    trainer.fit(module, loader())
    plain = LabelledModule()
    plain.load_state_dict({f"model.{name}": value for name, value in full_weights(module.model).items()})
    outcomes = _outcomes(module, whole), _outcomes(plain, whole)
    trainer.validate(module, loader(), verbose=False)
    return outcomes


@pytest.mark.parametrize("options", [{}, {"data_parallel_replicate_size": 2}], ids=["shards", "replicas"])
def test_after_a_fit(pool2: RankPool, options: dict[str, Any]) -> None:
    """Strict or not, with other keys, shapes and dtypes: what torch does with a whole model, in its words."""
    for sharded, plain in pool2.run(_load_after_a_fit, options):
        assert sharded == plain


class Assigns(LabelledModule):
    """Replaces its parameters instead of writing to them."""

    def on_train_start(self) -> None:
        self.load_state_dict(
            {f"model.{name}": value for name, value in other_weights().items()}, assign=True
        )


def _assign() -> str:
    with pytest.raises(AttributeError) as raised:
        make_trainer(AutomodelStrategy()).fit(Assigns(), loader())
    return str(raised.value)


def test_assigned_parameters_are_refused(pool2: RankPool) -> None:
    """FSDP2 would train shards that the module does not have."""
    for message in pool2.run(_assign):
        assert message.startswith("load_state_dict(..., assign=True), or an initialiser")


def _load_on_one_rank() -> bool:
    module = LabelledModule()
    make_trainer(AutomodelStrategy()).fit(module, loader())
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
