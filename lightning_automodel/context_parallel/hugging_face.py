"""Attention of Hugging Face models over sequences that are sliced across ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel.context_parallel import attention
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import not_compiled
from lightning_automodel.sharding.units import is_a, outermost

NAME = "context_parallel"
"""Name under which both functions below are registered: transformers looks attention and masks up by one name."""

_CHANGES_SCORES = ("softcap", "position_bias", "s_aux", "head_mask")


def let_models_attend_across(module: nn.Module, patches: PatchStack) -> bool:
    """Let the Hugging Face models in ``module`` attend by :func:`attend_across`, within steps.

    Returns whether there are any.
    """
    models: list[Any] = outermost_hugging_face_models(module)
    if not models:
        return False
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)
    for model in models:
        patches.callback(model.register_forward_pre_hook(_check_inputs, with_kwargs=True).remove)
        patches.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(NAME)
        # The cache would hold keys and values of the slice only.
        patches.set(model.config, "use_cache", False)
    return True


def outermost_hugging_face_models(module: nn.Module) -> list[nn.Module]:
    """The Hugging Face models at or below ``module`` that are not inside another one. Does not import transformers."""
    return outermost([module], lambda submodule: is_a(submodule, "PreTrainedModel"))


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: by itself a model would count a slice's positions from 0, and shift labels within the slice."""
    if attention.current() is None:
        return
    if isinstance(kwargs.get("labels"), Tensor) and kwargs.get("shift_labels") is None:
        raise RuntimeError(
            f"{type(model).__name__} would shift the labels of a slice of a sequence by itself: pass"
            " label_shift=1."
        )
    if kwargs.get("position_ids") is None and len(args) <= 2:  # input_ids, attention_mask, position_ids
        raise RuntimeError(
            f"{type(model).__name__} was called on a slice of a sequence without position_ids: with"
            " context_parallel_size > 1 pass it those of the batch, as self.model(**batch) does."
        )


@not_compiled
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls for the attention of each layer: [b, h, s, d] to [b, s, h, d]."""
    if attention.current() is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if found := [name for name in _CHANGES_SCORES if kwargs.get(name) is not None]:
        raise RuntimeError(
            f"{type(module).__name__} computes attention with {', '.join(found)}, which has not been checked"
            " with context_parallel_size > 1: leave it at 1."
        )
    options = {
        "dropout_p": kwargs.get("dropout", 0.0),
        "scale": kwargs.get("scaling"),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    is_causal = kwargs.get("is_causal") is not False and getattr(module, "is_causal", True)
    mixed = attention.attend_across(query, key, value, attention_mask, is_causal, options)
    return mixed.transpose(1, 2).contiguous(), None


def _make_mask(**kwargs: Any) -> Tensor | None:
    """What transformers calls for a layer type's mask: [b, 1, s, w * s] in whole sequences; None if purely causal."""
    from transformers import masking_utils

    slices = attention.current()
    if slices is None:
        return masking_utils.sdpa_mask(**kwargs)
    function = kwargs["mask_function"]
    attention_mask = kwargs["attention_mask"]
    device = kwargs["device"]
    if attention_mask is None or kwargs.get("use_vmap"):
        raise RuntimeError(
            "With context_parallel_size > 1 pass the batch's attention_mask and position_ids to the model,"
            " as in self.model(**batch), and no mask function of your own: a model makes masks for its slice"
            " otherwise."
        )
    documents = slices.documents
    if function is masking_utils.causal_mask_function and documents is None and not slices.is_masked:
        return None
    rows = slices.own_positions(device)
    whole = slices.gather_mask(attention_mask)
    batch, columns = (torch.arange(size, device=device) for size in whole.shape)
    mask = function(batch[:, None, None, None], batch.new_zeros(1, 1, 1, 1), rows[:, None], columns)
    mask = mask & whole[:, None, None]
    if documents is not None:
        # The first step is checked with the first positions alone.
        mask = mask & (documents[:, None, rows, None] == documents[:, None, None, : len(columns)])
    return mask
