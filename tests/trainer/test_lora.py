"""LoRA adapters of PEFT on a frozen Hugging Face model: every unit mixes frozen and trainable parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import export_hugging_face
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.dtensor import GRAD
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, micro_batches, relative_error, weight_error
from tests.trainer.hugging_face import ACCUMULATE, CAUSAL, OwnLoss, lora_llama, tied_llama, train_plainly
from tests.trainer.plain import differ_by_rank, prefixed
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, loader, make_trainer

ENGINES = {name: STRATEGIES[name] for name in ("kept", "resharded", "ddp")}
CLIP_NORM = 0.3


class Adapted(OwnLoss):
    """Notes between the micro-batches of a window whose gradients FSDP2 holds back; last, generates and saves."""

    def __init__(self, adapter: Path) -> None:
        super().__init__(lora_llama())
        self.adapter = adapter
        self.held: list[set[str]] = []
        self.generated: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % ACCUMULATE and batch_idx + 1 < CAUSAL.num_batches:
            self.held.append(
                {
                    name
                    for group in fsdp2.fsdp_param_groups(self)
                    for param in group.fsdp_params
                    for name in [str(param._param_fqn)]
                    if param.unsharded_accumulated_grad is not None
                    or GRAD.__get__(param.unsharded_param) is not None
                }
            )

    def on_train_end(self) -> None:
        self.generated = generate(self.model)
        export_hugging_face(self, self.adapter, adapter_only=True)


def generate(model: Any) -> list[int]:
    """The likeliest continuation. PEFT hands this to the model inside of it, past its own forward."""
    return model.generate(input_ids=torch.tensor([[1, 3, 5]]), max_new_tokens=8, do_sample=False)[0].tolist()


class Fitted(NamedTuple):
    """What a run left: weights, the last gradient norm, whose gradients were held back, what it generated."""

    weights: dict[str, Tensor]
    grad_norm: float
    held: list[set[str]]
    generated: list[int]
    described: dict[str, Any]


def fit(options: dict[str, Any], adapter: Path) -> Fitted:
    """Train from different weights on every rank."""
    module = Adapted(adapter)
    differ_by_rank(module)
    strategy = AutomodelStrategy(label_shift=1, **options)
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, gradient_clip_val=CLIP_NORM).fit(
        module, loader(CAUSAL)
    )
    assert strategy.last_step is not None
    grad_norm = strategy.last_step.grad_norm.item()
    return Fitted(full_weights(module), grad_norm, module.held, module.generated, strategy.describe())


@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
def test_lora(pool2: RankPool, options: dict[str, Any], tmp_path: Path) -> None:
    """Adapters train and are clipped like those of one process, the base stays bit for bit, nothing is held for it."""
    from peft import PeftModel

    adapter = tmp_path / "adapter"
    plain = lora_llama()
    before = full_weights(plain)
    trainable = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    adapter_bytes = sum(before[name].nbytes for name in trainable)
    expected, norms = train_plainly(plain, CAUSAL, clip_norm=CLIP_NORM)
    assert min(norms) > CLIP_NORM

    for weights, grad_norm, held, generated, described in pool2.run(fit, options, adapter):
        assert weight_error(weights, prefixed(expected)) <= TOLERANCE
        assert all(
            torch.equal(weights[f"model.{name}"], before[name]) == (name not in trainable) for name in before
        )
        assert relative_error(grad_norm, norms[-1]) <= TOLERANCE
        assert generated == generate(plain)
        if "data_parallel" not in options:
            assert held == [{f"model.{name}" for name in trainable}] * len(held)
            assert len(held) == 4
            assert described["estimated_extra_bytes"]["deferred_gradients"] == adapter_bytes

    files = {path.name for path in adapter.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert (adapter / "adapter_model.safetensors").stat().st_size < 2 * adapter_bytes + 4096
    loaded = PeftModel.from_pretrained(tied_llama(), adapter)
    batch = micro_batches(CAUSAL)[0][0]
    # Which computes parts in float32.
    assert relative_error(loaded(**batch).logits, plain(**batch).logits) <= 1e-7
