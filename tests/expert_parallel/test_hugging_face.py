"""Hugging Face models spread their experts by their own plan, and train as without expert parallelism."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.distributed.mesh import num_expert_ranks
from tests.expert_parallel.mixtures import ACCUMULATE, data_of_rank, error
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import VOCABULARY, full_weights
from tests.trainer.plain import fill, plain_weights, sgd
from tests.trainer.runs import by_default, make_trainer

pytest.importorskip("transformers")

ROUNDING = 1e-15
"""Sums over the tokens of an expert in another order. What is float32 in these models is the same on each rank."""
FLOAT32 = 1e-7
"""These models normalise and take softmaxes in float32, where a last digit in float64 can flip one of 6e-8."""
WRONG = 1e-4
CASE = Case(seed=37, telling="labels", num_batches=4, num_ranks=4, gap="micro_batches", label_shift=1)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "router_aux_loss_coef": 0.3,
}


def make_model(kind: str) -> nn.Module:
    """A tiny model of random weights."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES)
    # Its other implementations do not compute in float64.
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    fill(model)
    return model


class Mixture(LightningModule):
    """Trains on the model's own loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = make_model(kind)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Balanced(Mixture):
    """With the balancing loss of the routers, which is no token loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = self.model(**batch, use_cache=False, output_router_logits=True)
        return {"loss": output.loss, "aux_loss": self.model.router_aux_loss_coef * output.aux_loss}


class Logits(nn.Module):
    """[b, s] ids to [b, s, v] logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = make_model(kind)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def fit(kind: str, options: dict[str, Any], make: type[Mixture] = Mixture) -> tuple[dict[str, Tensor], list[str]]:
    """Train on every rank; return full weights, and which of them are spread over ranks."""
    module = make(kind)
    strategy = AutomodelStrategy(label_shift=1, **options)
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE).fit(module, data_of_rank(CASE))
    spread = [name for name, parameter in module.model.named_parameters() if num_expert_ranks(parameter) > 1]
    return full_weights(module.model), spread


OPTIONS: dict[str, dict[str, Any]] = {
    "two ranks": {"expert_parallel_size": 2},
    "four ranks": {"expert_parallel_size": 4},
    "resharded": {"expert_parallel_size": 2, "reshard_during_accumulation": True},
    "recomputed": {"expert_parallel_size": 4, "activation_checkpointing": True},
}


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(OPTIONS, "two ranks"))
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_as_without_expert_parallelism(pool4: RankPool, kind: str, options: dict[str, Any]) -> None:
    (expected, whole), *_ = pool4.run(fit, kind, {})
    assert whole == []
    for weights, spread in pool4.run(fit, kind, options):
        assert error(weights, expected) <= ROUNDING
        assert error(weights, full_weights(make_model(kind))) > WRONG
        assert sorted({name.rpartition(".")[2] for name in spread}) == ["down_proj", "gate_up_proj"]
        assert len(spread) == 2 * SIZES["num_hidden_layers"]
