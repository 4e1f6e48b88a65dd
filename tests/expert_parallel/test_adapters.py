"""Adapters beside spread experts of Hugging Face models, and exports of such models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy, ModelExport
from tests.expert_parallel.mixtures import data_of_rank, error
from tests.expert_parallel.test_hugging_face import CASE, ROUNDING, Mixture, make_model
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import full_weights
from tests.trainer.hugging_face import filled
from tests.trainer.runs import make_trainer

SPREAD: dict[str, Any] = {"expert_parallel_size": 4}


def adapted(**where: Any) -> nn.Module:
    """A frozen mixture of experts with adapters of rank 2."""
    model = get_peft_model(make_model("Qwen3Moe"), LoraConfig(r=2, lora_alpha=4, **where))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return filled(model, only=trainable)


class Adapted(Mixture):
    """Trains adapters alone."""

    def __init__(self, **where: Any) -> None:
        super().__init__("Qwen3Moe")
        self.model = adapted(**where)


def _fit(options: dict[str, Any], **where: Any) -> dict[str, Tensor]:
    module = Adapted(**where)
    make_trainer(AutomodelStrategy(label_shift=1, **options)).fit(module, data_of_rank(CASE))
    return full_weights(module.model)


def test_adapters_of_attention(pool4: RankPool) -> None:
    """The frozen experts are spread, and pass gradients on."""
    where = {"target_modules": ["q_proj", "v_proj"]}
    expected = pool4.run(_fit, {}, **where)[0]
    for weights in pool4.run(_fit, SPREAD, **where):
        assert error(weights, expected) <= ROUNDING
    start = full_weights(adapted(**where))
    assert {name.rsplit(".", 3)[1] for name in expected if not expected[name].equal(start[name])} == {
        "lora_A",
        "lora_B",
    }


def test_adapters_of_experts(pool4: RankPool) -> None:
    """PEFT wraps the experts, whose weights then have other names than the plan's."""
    with pytest.raises(RankError, match="an adapter may have wrapped it"):
        pool4.run(_fit, SPREAD, target_modules=[], target_parameters=["experts.gate_up_proj"])


def _export(folder: str) -> dict[str, Tensor]:
    module = Mixture("Qwen3Moe")
    callbacks = [ModelExport(f"{folder}/live")]
    trainer = make_trainer(AutomodelStrategy(label_shift=1, **SPREAD), callbacks=callbacks)
    trainer.fit(module, data_of_rank(CASE))
    return full_weights(module.model)


def test_exports(pool4: RankPool, tmp_path: Path) -> None:
    """Files with whole experts, under the names of the hub, which `from_pretrained` reads."""
    from transformers import AutoModelForCausalLM

    weights = pool4.run(_export, str(tmp_path))[0]
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "live").named_parameters())
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weight) for name, weight in weights.items())
