"""Hugging Face models are computed by several ranks as their own plan says, without code for any of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.sharding.test_tensor_parallel import ACCUMULATE, CLIP, TENSOR
from tests.trainer.cases import Case
from tests.trainer.exactness import VOCABULARY, Outcome, full_weights, micro_batches, weight_error
from tests.trainer.plain import ModelModule, fill, plain_weights
from tests.trainer.runs import first_by_default, make_trainer

ROUNDING = 1e-7
"""These models normalise and take softmaxes in float32, where a last digit in float64 can flip one of 6e-8."""
WRONG = 1e-4
CASE = Case(seed=32, telling="labels", num_batches=4, num_ranks=1)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


class Logits(nn.Module):
    """[b, s] ids to [b, s, v] logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def make_model(kind: str, **sizes: int) -> nn.Module:
    """A tiny model of random weights."""
    import transformers

    config = getattr(transformers, f"{kind.removesuffix('-tied')}Config")(
        **(SIZES | sizes), tie_word_embeddings="tied" in kind
    )
    model = Logits(transformers.AutoModelForCausalLM.from_config(config))
    fill(model)
    return model


def fit(kind: str) -> tuple[dict[str, Tensor], list[str]]:
    """Train on the strategy; return full weights, and which of them tensor parallelism has cut."""
    module = ModelModule(make_model(kind))
    strategy = AutomodelStrategy(tensor_parallel_size=TENSOR)
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, gradient_clip_val=CLIP)
    trainer.fit(module, DataLoader(micro_batches(CASE)[0], batch_size=None))
    cut = [
        name
        for name, p in module.model.named_parameters()
        if isinstance(p, DTensor) and p.device_mesh.ndim == 2
    ]
    return full_weights(module.model), cut


@pytest.mark.parametrize("kind", first_by_default(["Qwen3-tied", "Llama", "Llama-tied", "Qwen3"]))
def test_trains_like_one_process(pool2: RankPool, kind: str) -> None:
    """Norms of whole rows stay plain; Qwen3's norms of single heads are whole with gradients to be added up."""
    pytest.importorskip("transformers")
    expected = plain_weights(
        make_model(kind),
        ACCUMULATE,
        CASE,
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, CLIP),
    )
    for weights, cut in pool2.run(fit, kind):
        assert weight_error(Outcome(weights), Outcome(expected)) <= ROUNDING
        assert weight_error(Outcome(weights), Outcome(plain_weights(make_model(kind), 1, CASE))) > WRONG
        assert any("q_proj" in name for name in cut)
        assert any("embed_tokens" in name for name in cut)
        assert ("lm_head.weight" in " ".join(cut)) == ("tied" not in kind)
        assert any("q_norm" in name for name in cut) == ("Qwen3" in kind)
