"""Tiny models of the families of transformers, each from its configuration, with a batch for its own loss.

`transformers` is imported where it is used: it takes seconds, and most tests never need it.

Shapes: b rows, s positions, v vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 29
ROWS = 4
LENGTH = 8

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_PAIR: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_IMAGE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}


@dataclass(frozen=True)
class Family:
    """A model class, sizes of its configuration, the kind of its batch, and why ranks differ, if they do."""

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    batch: str = "causal"
    differs: str | None = None


_DECODERS = {
    name: Family(f"{model}ForCausalLM", _GROUPED)
    for name, model in {
        "Llama": "Llama",
        "Mistral": "Mistral",
        "Qwen2": "Qwen2",
        "Qwen3": "Qwen3",
        "Gemma": "Gemma",
        "Gemma 2": "Gemma2",
        "Gemma 3": "Gemma3",
        "Phi-3": "Phi3",
        "OLMo 2": "Olmo2",
        "Granite": "Granite",
        "Cohere": "Cohere",
        "StarCoder2": "Starcoder2",
        "StableLM": "StableLm",
        "SmolLM3": "SmolLM3",
    }.items()
}
_ENCODERS = {
    name: Family(f"{model}ForMaskedLM", {**_TEXT, **sizes}, "masked")
    for name, model, sizes in (
        ("BERT", "Bert", {}),
        ("RoBERTa", "Roberta", {}),
        ("XLM-RoBERTa", "XLMRoberta", {}),
        ("ALBERT", "Albert", {"embedding_size": 8}),
        ("ELECTRA", "Electra", {"embedding_size": 8}),
        ("DeBERTa-v2", "DebertaV2", {}),
        ("ModernBERT", "ModernBert", {"cls_token_id": 1, "sep_token_id": 2}),
    )
}
_SHORT = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 2}
_DISTILLED = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "pad_token_id": 0}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "num_heads": [1, 2], "window_size": 2}
_STAGES = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3}
_MEL = {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16}
_UNSUPPRESSED = {"suppress_tokens": None, "begin_suppress_tokens": None}

FAMILIES = {
    **_DECODERS,
    "GPT-2": Family("GPT2LMHeadModel", {**_SHORT, "n_embd": 16}),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", _TEXT),
    "GPT-J": Family("GPTJForCausalLM", {**_SHORT, "n_embd": 16, "rotary_dim": 4}),
    "OPT": Family("OPTForCausalLM", {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "BLOOM": Family("BloomForCausalLM", {**_SHORT, "hidden_size": 16}),
    "Falcon": Family("FalconForCausalLM", _TEXT),
    "Mixtral": Family("MixtralForCausalLM", {**_GROUPED, **_EXPERTS, "num_local_experts": 4}),
    "Qwen3-MoE": Family(
        "Qwen3MoeForCausalLM", {**_GROUPED, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 12}
    ),
    "Mamba": Family(
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    ),
    **_ENCODERS,
    "DistilBERT": Family("DistilBertForMaskedLM", {"vocab_size": VOCABULARY, **_DISTILLED}, "masked"),
    "T5": Family("T5ForConditionalGeneration", {"vocab_size": VOCABULARY, **_T5}, "translated"),
    "BART": Family("BartForConditionalGeneration", _PAIR, "translated"),
    "Marian": Family("MarianMTModel", _PAIR, "translated"),
    "Pegasus": Family("PegasusForConditionalGeneration", _PAIR, "translated"),
    "M2M100": Family("M2M100ForConditionalGeneration", _PAIR, "translated"),
    "ViT": Family("ViTForImageClassification", _IMAGE, "images"),
    "DeiT": Family("DeiTForImageClassification", _IMAGE, "images"),
    "DINOv2": Family("Dinov2ForImageClassification", _IMAGE, "images"),
    "Swin": Family("SwinForImageClassification", {**_SWIN, "depths": [1, 1], "num_labels": 3}, "images"),
    "ConvNeXt": Family(
        "ConvNextForImageClassification", {**_STAGES, "num_stages": 2, "patch_size": 2}, "images"
    ),
    "ResNet": Family(
        "ResNetForImageClassification",
        {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
        "images",
        "batch normalisation: its statistics are those of the batch on each rank",
    ),
    "Whisper": Family("WhisperForConditionalGeneration", {**_PAIR, **_MEL, **_UNSUPPRESSED}, "speech"),
    "CLIP": Family(
        "CLIPModel",
        {"projection_dim": 8},
        "pairs",
        "contrastive: its loss compares each sample with all others of the batch",
    ),
    "CLIP, embeddings gathered": Family("CLIPModel", {"projection_dim": 8}, "pairs"),
    "LLaVA": Family("LlavaForConditionalGeneration", {}, "seen"),
}


def make_model(name: str) -> nn.Module:
    """The family's tiny model with seeded random weights, in float32 and training mode, without dropout."""
    transformers = importlib.import_module("transformers")
    family = FAMILIES[name]
    cls = getattr(transformers, family.model)
    sizes = dict(family.sizes)
    if family.batch in ("pairs", "seen"):
        vision = transformers.CLIPVisionConfig(**_IMAGE, projection_dim=8)
        text = {**_TEXT, "projection_dim": 8} if family.batch == "pairs" else _GROUPED
        if family.batch == "pairs":
            sizes.update(text_config=text, vision_config=vision.to_dict())
        else:
            sizes.update(
                text_config=transformers.LlamaConfig(**text),
                vision_config=vision,
                image_token_id=VOCABULARY - 1,
                vision_feature_layer=-1,
            )
    torch.manual_seed(3)
    config = cls.config_class(**sizes)
    without_dropout(config)
    model = cls(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def without_dropout(config: Any) -> None:
    """Set every probability of dropping something to zero."""
    for key, value in vars(config).items():
        if isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
            setattr(config, key, 0.0)
        elif hasattr(value, "to_dict"):
            without_dropout(value)
    config.apply_spec_augment = False


def make_batch(name: str) -> dict[str, Tensor]:
    """One batch of four rows, of which the first two have fewer labels."""
    kind = FAMILIES[name].batch
    generator = torch.Generator().manual_seed(4)

    def integers(*shape: int, low: int = 3, high: int = VOCABULARY - 1) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    ids = integers(ROWS, LENGTH)
    labels = integers(ROWS, LENGTH)
    side = 16 if name in ("Swin", "ConvNeXt", "ResNet") else 8
    images = torch.randn(ROWS, 3, side, side, generator=generator)
    labels[:2, 3:] = -100
    labels[3, :2] = -100
    if kind in ("causal", "masked", "translated"):
        return {"input_ids": ids, "labels": labels}
    if kind == "images":
        return {"pixel_values": images, "labels": integers(ROWS, low=0, high=3)}
    if kind == "speech":
        return {"input_features": torch.randn(ROWS, 4, 16, generator=generator), "labels": labels}
    if kind == "seen":
        ids[:, :4] = VOCABULARY - 1  # one for each patch
        return {"input_ids": ids, "pixel_values": images, "labels": labels}
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": images}


def shift(name: str) -> int:
    """The `label_shift` of its loss."""
    return int(FAMILIES[name].batch in ("causal", "seen"))


def own_loss(
    name: str, model: Any, batch: dict[str, Tensor], gather: Callable[[Tensor], Tensor] = lambda local: local
) -> Tensor:
    """[] the loss that the model computes itself, or of the embeddings that all ranks have."""
    if FAMILIES[name].batch != "pairs":
        return model(**batch).loss
    if "gathered" not in name:
        return model(**batch, return_loss=True).loss
    output = model(**batch)
    logits = gather(output.text_embeds) @ gather(output.image_embeds).t() * model.logit_scale.exp()  # [b, b]
    diagonal = torch.arange(len(logits))
    return (F.cross_entropy(logits, diagonal) + F.cross_entropy(logits.t(), diagonal)) / 2
