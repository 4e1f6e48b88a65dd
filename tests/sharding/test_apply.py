"""Tensors that are sent to every rank, parameters that FSDP2 cannot take, and models that differ between ranks."""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding.apply import broadcast_tensors
from tests.rank_pool import RankPool
from tests.trainer.exactness import VOCABULARY, WIDTH, TinyDecoder, full_weights, weight_error
from tests.trainer.plain import ModelModule, fill, filled_decoder, plain_weights, prefixed
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, loader, make_trainer

ACCUMULATE = 3
T = TypeVar("T")


def _broadcast() -> list[complex]:
    tensors = [torch.tensor(values) for values in ([1.5], [True, False], [1 + 2j], [])]
    if dist.get_rank() > 0:
        tensors = list(map(torch.zeros_like, tensors))
    broadcast_tensors(tensors, dist.group.WORLD)
    return [complex(value) for tensor in tensors for value in tensor]


def test_tensors_of_any_dtype_are_sent(pool2: RankPool) -> None:
    assert pool2.run(_broadcast) == [[1.5, 1.0, 0.0, 1 + 2j]] * 2


class Complex(nn.Module):
    """A decoder beside complex weights, in the model and in a block of it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = TinyDecoder(seed=1)
        fill(self)
        generator = torch.Generator().manual_seed(7)
        self.turn = nn.Parameter(torch.randn(VOCABULARY, dtype=torch.complex128, generator=generator))
        self.decoder.blocks[0].turn = nn.Parameter(
            torch.randn(WIDTH, dtype=torch.complex128, generator=generator)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        turned = self.decoder(input_ids) * self.turn
        return turned.real + turned.imag * self.decoder.blocks[0].turn.abs().sum()


def _fit_complex() -> tuple[dict[str, Tensor], list[str]]:
    module = ModelModule(Complex())
    strategy = AutomodelStrategy(**STRATEGIES["kept"])
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return _real(full_weights(module)), strategy.describe()["replicated"]


def _real(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.view_as_real(w) if w.is_complex() else w for name, w in weights.items()}


def test_complex_parameters_stay_whole(pool2: RankPool) -> None:
    expected = _real(prefixed(plain_weights(Complex(), ACCUMULATE)))
    for weights, replicated in pool2.run(_fit_complex):
        assert weight_error(weights, expected) <= TOLERANCE
        assert replicated == ["model.turn", "model.decoder.blocks.0.turn"]


DIFFERENT = {
    "shape": "(12, 7) and trainable",
    "requires_grad": "(11, 7) and not trainable",
}


def _differ() -> list[str]:
    """What is raised of each difference, under each engine."""
    messages = []
    for by in DIFFERENT:
        for options in ({}, STRATEGIES["ddp"]):
            module = ModelModule(filled_decoder())
            if by == "shape":
                module.model.head = nn.Linear(WIDTH, VOCABULARY + dist.get_rank()).double()
            else:
                module.model.head.weight.requires_grad_(dist.get_rank() == 0)
            with pytest.raises(ValueError, match="different models") as raised:
                make_trainer(AutomodelStrategy(**options)).fit(module, loader(CASE))
            messages.append(str(raised.value))
    return messages


def test_ranks_with_different_models_raise(pool2: RankPool) -> None:
    for messages in pool2.run(_differ):
        assert messages == [
            f"Ranks hold different models: model.head.weight is (11, 7) and trainable on rank 0 and {second}"
            " on rank 1. Build and freeze the same model on every rank."
            for second in DIFFERENT.values()
            for _ in range(2)
        ]
