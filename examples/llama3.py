"""Llama 3 8B and 70B for a plan of their training, without their weights; docs/scale.md.

python -m lightning_automodel.plan examples.llama3:build_8b --world-size 64
"""

from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_automodel import token_loss

SHAPES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
LENGTH = 8192


class Llama3(L.LightningModule):
    """Trains a Llama 3 of one of the shapes on whole sequences."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        others = {
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "rope_theta": 500_000.0,
            "use_cache": False,
        }
        config = LlamaConfig(
            **SHAPES[shape], **others, max_position_embeddings=LENGTH, attn_implementation="sdpa"
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if "labels" not in name}
        hidden = self.model.model(**inputs).last_hidden_state  # [b, s, d]
        loss, n = token_loss(hidden, self.model.lm_head, batch["labels"])
        return loss / n.clamp(min=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def build_8b() -> tuple[L.LightningModule, Any]:
    """The 8B shape, and one sequence of 8,192 tokens, labels already shifted."""
    return Llama3("8b"), _batch()


def build_70b() -> tuple[L.LightningModule, Any]:
    """The 70B shape, and the same batch."""
    return Llama3("70b"), _batch()


def _batch() -> dict[str, Tensor]:
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
