"""Callbacks beside spread experts: checked against one process, averaged, and loaded from whole tensors."""

from __future__ import annotations

from typing import Any

import torch

from lightning_automodel import ExactnessCheck
from tests.expert_parallel.mixtures import ACCUMULATE, CASE, MixtureDecoder, SpreadModule, error, fit
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.plain import plain_weights
from tests.trainer.runs import TOLERANCE


class Grouped(SpreadModule):
    """Keeps a process group on the module, which no copy of it can have."""

    def configure_model(self) -> None:
        super().configure_model()
        self.group = self.device_mesh["expert_parallel"].get_group()

    def __init__(self, model: MixtureDecoder) -> None:
        super().__init__(model)
        self.group = None


def _checked(options: dict[str, Any]) -> tuple[str | None, str]:
    check = ExactnessCheck(steps=1)
    fit(options, Grouped, callbacks=[check], accumulate=1, max_steps=2)
    return check.verdict, check.report


def test_exactness_check(pool4: RankPool) -> None:
    """Rank 0 replays with all experts, by the module before `configure_model`."""
    for verdict, report in pool4.run(_checked, {}):
        assert verdict == "exact", report


class LoadsWhole(SpreadModule):
    """Loads whole tensors into the sharded module before the first step."""

    def on_fit_start(self) -> None:
        self.model.load_state_dict(_scaled().state_dict())
        self.loaded = full_weights(self.model)

    def on_train_start(self) -> None:
        expected = _scaled().state_dict()
        assert all(weight.cpu().equal(expected[name]) for name, weight in self.loaded.items())


def _scaled() -> MixtureDecoder:
    model = MixtureDecoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def test_whole_states(pool4: RankPool) -> None:
    expected = plain_weights(_scaled(), ACCUMULATE, CASE)
    for found in pool4.run(fit, {}, LoadsWhole):
        assert error(found.weights, expected) <= TOLERANCE
