"""Equal buffers on every rank, parameters that FSDP2 cannot take, and classes that it cannot extend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding.apply import broadcast_tensors
from tests.rank_pool import RankPool
from tests.trainer.exactness import VOCABULARY, WIDTH, Outcome, TinyDecoder, full_weights, weight_error
from tests.trainer.plain import ModelModule, fill, filled_decoder, plain_weights, prefixed
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, loader, make_trainer

ACCUMULATE = 3
T = TypeVar("T")


class Normalised(nn.Module):
    """A decoder whose logits are normalised by batch, with a constant that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = TinyDecoder(seed=1)
        self.by_batch = nn.BatchNorm1d(VOCABULARY)
        self.register_buffer("constant", torch.ones(()), persistent=False)
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.by_batch(self.decoder(input_ids).transpose(1, 2)).transpose(1, 2) * self.constant


class SameBatch(ModelModule):
    """Validates on one batch, the same on every rank, in mid-epoch and at its end."""

    def __init__(self) -> None:
        super().__init__(Normalised())
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(
            float(self({"input_ids": torch.ones(2, 3).long(), "labels": torch.ones(2, 3).long()}))
        )


def _statistics(options: dict[str, Any], folder: str) -> tuple[list[float], Tensor, Tensor]:
    """Validation losses; running means after the fit, and as somebody finds them who loads the checkpoint."""
    module = SameBatch()
    loaded = SameBatch()
    path = f"{folder}/checkpoint"
    trainer = make_trainer(
        AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE, val_check_interval=4
    )
    trainer.fit(module, loader(), [0])
    trainer.save_checkpoint(path)
    make_trainer(AutomodelStrategy(**options)).validate(loaded, [0], path, verbose=False)
    return module.losses, *(m.model.by_batch.running_mean.clone() for m in (module, loaded))


def test_running_statistics_are_those_of_the_first_rank(pool2: RankPool, tmp_path: Path) -> None:
    """As under DDP: every rank evaluates with the same ones, and a checkpoint holds them."""
    (expected, mean, _), _ = pool2.run(_statistics, STRATEGIES["ddp"], str(tmp_path / "ddp"))
    assert len(expected) == 2
    for name in ("kept", "resharded"):
        for losses, found, loaded in pool2.run(_statistics, STRATEGIES[name], str(tmp_path / name)):
            assert losses == pytest.approx(expected, rel=TOLERANCE)
            assert torch.allclose(found, mean, rtol=TOLERANCE)
            assert torch.equal(found, loaded)


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


def _fit(make_module: Any, options: dict[str, Any]) -> tuple[Outcome, Any]:
    module = make_module()
    strategy = AutomodelStrategy(**options)
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return Outcome(full_weights(module)), strategy.describe()


def _complex() -> ModelModule:
    return ModelModule(Complex())


def _real(outcome: Outcome) -> Outcome:
    weights = {n: torch.view_as_real(w) if w.is_complex() else w for n, w in outcome.weights.items()}
    return Outcome(weights)


def test_complex_parameters_stay_whole(pool2: RankPool) -> None:
    expected = prefixed(plain_weights(Complex(), ACCUMULATE))
    for outcome, described in pool2.run(_fit, _complex, STRATEGIES["kept"]):
        assert weight_error(_real(outcome), _real(expected)) <= TOLERANCE
        assert described["replicated"] == ["model.turn", "model.decoder.blocks.0.turn"]


def _differs(by: str, options: dict[str, Any]) -> str:
    module = ModelModule(filled_decoder())
    if by == "shape":
        module.model.head = nn.Linear(WIDTH, VOCABULARY + dist.get_rank()).double()
    else:
        module.model.head.weight.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ValueError, match="different models") as raised:
        make_trainer(AutomodelStrategy(**options)).fit(module, loader(CASE))
    return str(raised.value)


@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}], ids=["fsdp2", "ddp"])
@pytest.mark.parametrize(
    ("by", "second"), [("shape", "(12, 7) and trainable"), ("requires_grad", "(11, 7) and not trainable")]
)
def test_ranks_with_different_models_raise(
    pool2: RankPool, by: str, second: str, options: dict[str, Any]
) -> None:
    for message in pool2.run(_differs, by, options):
        assert message == (
            f"Ranks hold different models: model.head.weight is (11, 7) and trainable on rank 0 and {second}"
            " on rank 1. Build and freeze the same model on every rank."
        )
