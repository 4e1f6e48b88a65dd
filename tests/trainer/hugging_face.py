"""Tiny Hugging Face models with random weights, a module that trains on their own loss, and the plain loop beside it.

`transformers` is imported where it is used: it takes seconds, and most tests never need it.

Shapes: b rows, s positions, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.trainer.cases import Case
from tests.trainer.exactness import VOCABULARY, Batch, full_weights
from tests.trainer.plain import fill, sgd, train_model_plainly

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACCUMULATE = 4
CAUSAL = Case(seed=33, telling="labels", num_batches=6, gap="micro_batches", label_shift=1)
SEQ2SEQ = Case(seed=34, telling="labels", num_batches=6, gap="micro_batches")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(is_tied: bool = True) -> PreTrainedModel:
    """A decoder; its embedding and head may be one matrix, as SmolLM2's are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return filled(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied)))


def untied_gpt2() -> PreTrainedModel:
    """A decoder with learned positions, biases, and a head of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=6,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    return filled(GPT2LMHeadModel(config))


def t5() -> PreTrainedModel:
    """An encoder-decoder: four modules share one embedding, and the first block of a stack makes biases for all."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
    )
    return filled(T5ForConditionalGeneration(config))


def mixtral() -> PreTrainedModel:
    """A mixture of four experts that adds a weighted balance loss to its loss and returns it beside it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.3,
        experts_implementation="eager",  # the grouped matrix product knows no float64
    )
    return filled(MixtralForCausalLM(config))


def lora_llama(**options: Any) -> nn.Module:
    """`llama`, frozen, with adapters of rank 2 beside the queries and the first feed-forward matrix."""
    from peft import LoraConfig

    modules = ["q_proj", "up_proj"]
    return _adapted(LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=modules, **options))


def vera_llama() -> nn.Module:
    """`llama` with VeRA, whose random projections are buffers that PEFT saves with the adapters."""
    from peft import VeraConfig

    return _adapted(VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))


def _adapted(config: Any) -> nn.Module:
    from peft import get_peft_model

    model = get_peft_model(llama(), config)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return filled(model, only=trainable)


def filled(model: Any, only: set[str] | None = None) -> Any:
    """Give parameters (those named in `only`) seeded values away from zero, in float64."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fill(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only is not None and name not in only:
                parameter.copy_(values[name])
    return model


class OwnLoss(LightningModule):
    """Returns the model's own loss; the strategy counts the labels of the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def token_sum(case: Case, model: nn.Module, batch: Batch) -> Tensor:
    """[] sum of token losses, from the logits alone. Causal models compute theirs in float32, so this does too."""
    # An encoder-decoder needs the labels to make the decoder's inputs.
    logits = model(**batch).logits  # [b, s, v]
    if case.label_shift:
        logits = logits.float()[:, : -case.label_shift]
    return F.cross_entropy(
        logits.flatten(0, 1),
        case.used_labels(batch).flatten(),
        ignore_index=case.ignore_index,
        reduction="sum",
    )


def train_plainly(
    model: nn.Module,
    case: Case,
    objective: Callable[[Case, nn.Module, Batch], Tensor] = token_sum,
    clip_norm: float | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train `model` in place on one process; return its weights and the gradient norms of the windows."""

    def sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        return objective(case, model, batch), case.num_label_tokens(batch) if case.per_token_loss else 1

    def clip(parameters: list[nn.Parameter]) -> None:
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)

    seen = train_model_plainly(model, ACCUMULATE, case, sums, clip)
    norms = [nn.utils.get_total_norm(list(gradients.values())).item() for gradients in seen]
    return full_weights(model), norms
