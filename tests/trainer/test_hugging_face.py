"""Hugging Face models train to the weights of one process on the loss that they compute themselves.

No code knows one architecture: what becomes a unit is what the model says must not be split.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.advice import contains_hugging_face_causal_lm
from lightning_automodel.sharding.units import plan_sharding
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import Batch, full_weights, weight_error
from tests.trainer.hugging_face import (
    ACCUMULATE,
    CAUSAL,
    EQUAL_WEIGHTS,
    SEQ2SEQ,
    OwnLoss,
    lora_llama,
    mixtral,
    t5,
    tied_llama,
    train_plainly,
    untied_gpt2,
)
from tests.trainer.plain import differ_by_rank, prefixed
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, loader, make_trainer

ENGINES = {name: STRATEGIES[name] for name in ("kept", "resharded", "ddp")}
MODELS: dict[str, tuple[Callable[[], nn.Module], Case, list[str]]] = {
    "tied_decoder": (tied_llama, CAUSAL, [f"model.model.layers.{i} (LlamaDecoderLayer)" for i in range(2)]),
    "untied_decoder": (untied_gpt2, CAUSAL, [f"model.transformer.h.{i} (GPT2Block)" for i in range(2)]),
    "encoder_decoder": (
        t5,
        SEQ2SEQ,
        [f"model.{stack}.block.{i} (T5Block)" for stack in ("encoder", "decoder") for i in range(2)],
    ),
}


def fit(
    make_model: Callable[[], nn.Module],
    case: Case,
    options: dict[str, Any],
    make_module: Callable[[nn.Module], Any] = OwnLoss,
) -> tuple[dict[str, Tensor], dict[str, Any], list[str], dict[str, Tensor]]:
    """Train, from different weights on every rank; return weights, description, warnings and logged values."""
    module = make_module(make_model())
    differ_by_rank(module)
    strategy = AutomodelStrategy(**{"label_shift": case.label_shift, **options})
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(case))
    logged = {name: value.cpu() for name, value in trainer.callback_metrics.items()}
    return full_weights(module), strategy.describe(), [str(warning.message) for warning in caught], logged


def error(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return weight_error(weights, prefixed(expected))


def tiny_llava() -> nn.Module:
    """A language model that sees, for the meta device."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    seeing = CLIPVisionConfig(num_hidden_layers=2)
    writing = LlamaConfig(num_hidden_layers=2)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=seeing, text_config=writing))


def units(model: nn.Module) -> list[str]:
    """Classes of the units that the strategy would make, in order."""
    return [type(unit).__name__ for unit in plan_sharding(OwnLoss(model), None, root_is_model=True).units]


@pytest.mark.parametrize("tied", [True, False])
def test_units_of_tied_embeddings(tied: bool) -> None:
    """Embeddings that a model lists as one block stay in the root where the head shares their matrix."""
    from transformers import BertConfig, BertForMaskedLM

    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(num_hidden_layers=2, tie_word_embeddings=tied))
    assert units(model) == [*([] if tied else ["BertEmbeddings"]), "BertLayer", "BertLayer"]


def test_units_of_nested_models() -> None:
    """A model made of two others has the blocks of both, and a model without a list its outermost repeated blocks."""
    from transformers import MarianConfig, MarianMTModel

    with torch.device("meta"):
        seeing = tiny_llava()
        translating = MarianMTModel(MarianConfig(encoder_layers=1, decoder_layers=2))
    assert units(seeing) == ["CLIPVisionEmbeddings", *["CLIPEncoderLayer"] * 2, *["LlamaDecoderLayer"] * 2]
    assert not translating._no_split_modules
    assert units(translating) == ["MarianEncoderLayer", *["MarianDecoderLayer"] * 2]


@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
@pytest.mark.parametrize(("make_model", "case", "expected_units"), MODELS.values(), ids=MODELS)
def test_own_loss(
    pool2: RankPool,
    make_model: Callable[[], nn.Module],
    case: Case,
    expected_units: list[str],
    options: dict[str, Any],
) -> None:
    """`label_shift=1` weighs the loss of a causal model right, 0 that of an encoder-decoder, and no warning is due."""
    expected, _ = train_plainly(make_model(), case)
    for weights, described, said, _ in pool2.run(fit, make_model, case, options):
        assert error(weights, expected) <= TOLERANCE
        assert not any("label_shift" in message for message in said)
        if "data_parallel" not in options:
            assert described["units"] == expected_units
            assert described["replicated"] == []


def test_which_models_shift_labels() -> None:
    """Told by the outermost model, which computes the loss: decoders, also those that see, but no encoder-decoder."""
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    config = BertConfig(num_hidden_layers=1)
    with torch.device("meta"):
        pair = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(config, config))
        seeing = tiny_llava()
    assert contains_hugging_face_causal_lm(OwnLoss(lora_llama()))
    assert contains_hugging_face_causal_lm(OwnLoss(seeing))
    assert not contains_hugging_face_causal_lm(OwnLoss(t5()))
    assert type(pair.decoder).__name__ == "BertLMHeadModel"
    assert not contains_hugging_face_causal_lm(OwnLoss(pair))


@pytest.mark.parametrize(
    ("make_model", "case", "shift", "advice"),
    [
        (tied_llama, CAUSAL, 0, "pass label_shift=1"),
        (t5, SEQ2SEQ, 1, "label_key=, ignore_index=, label_shift= or"),
    ],
)
def test_wrong_shift(
    pool2: RankPool, make_model: Callable[[], nn.Module], case: Case, shift: int, advice: str
) -> None:
    """Counting a label that the loss drops, or dropping one that it uses, is said once and seen in the weights."""
    expected, _ = train_plainly(make_model(), case)
    results = pool2.run(fit, make_model, case, {"label_shift": shift})
    said = [[message for message in messages if advice in message] for _, _, messages, _ in results]
    assert [len(messages) for messages in said] == [1, 0]
    assert all(error(weights, expected) > 1e-4 for weights, _, _, _ in results)


class SumOfTokenLosses(OwnLoss):
    """Asks the model for a sum, by the name under which newer models take the divisor of their loss."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.model(**batch, num_items_in_batch=1).loss


@pytest.mark.parametrize("options", by_default(ENGINES, "ddp"))
def test_num_items_in_batch(pool2: RankPool, options: dict[str, Any]) -> None:
    """A model told to divide by one returns the sum of its token losses."""
    expected, _ = train_plainly(tied_llama(), CAUSAL)
    options = {**options, "loss_reduction": "sum"}
    for weights, _, _, _ in pool2.run(fit, tied_llama, CAUSAL, options, SumOfTokenLosses):
        assert error(weights, expected) <= TOLERANCE


class ReturnsAuxLoss(OwnLoss):
    """Tells which part of the loss is no token loss."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        outputs = self.model(**batch)
        return {"loss": outputs.loss, "aux_loss": self.model.router_aux_loss_coef * outputs.aux_loss}


@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
@pytest.mark.parametrize(
    ("case", "make_module"),
    [(CAUSAL, OwnLoss), (EQUAL_WEIGHTS, ReturnsAuxLoss)],
    ids=["by_tokens", "equally"],
)
def test_aux_loss_that_trains(
    pool2: RankPool, case: Case, make_module: type[OwnLoss], options: dict[str, Any]
) -> None:
    """In the model's own loss it weighs like the rest: by label tokens, or with `per_token_loss=False` equally."""
    weigh = {"label_shift": 1} if case.per_token_loss else {"label_shift": 0, "per_token_loss": False}

    def own_loss(case: Case, model: Any, batch: Batch) -> Tensor:
        return model(**batch).loss * (case.num_label_tokens(batch) if case.per_token_loss else 1)

    expected, _ = train_plainly(mixtral(), case, own_loss)
    unbalanced = mixtral()
    unbalanced.router_aux_loss_coef = 0.0
    without, _ = train_plainly(unbalanced, case, own_loss)
    for weights, _, _, _ in pool2.run(fit, mixtral, case, {**options, **weigh}, make_module):
        assert error(weights, expected) <= TOLERANCE
        assert error(weights, without) > 1e-4
