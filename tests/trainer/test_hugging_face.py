"""Hugging Face models train to the weights of one process on the loss that they compute themselves.

No code knows one architecture: what becomes a unit is what the model says must not be split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.advice import contains_hugging_face_causal_lm
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import Batch, full_weights, relative_error, weight_error
from tests.trainer.hugging_face import (
    ACCUMULATE,
    CAUSAL,
    SEQ2SEQ,
    OwnLoss,
    llama,
    lora_llama,
    mixtral,
    t5,
    train_plainly,
)
from tests.trainer.plain import differ_by_rank, prefixed
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, loader, make_trainer, warnings_of

ENGINES = {name: STRATEGIES[name] for name in ("kept", "resharded", "ddp")}
MODELS: dict[str, tuple[Callable[[], nn.Module], Case, list[str]]] = {
    "tied_decoder": (llama, CAUSAL, [f"model.model.layers.{i} (LlamaDecoderLayer)" for i in range(2)]),
    "encoder_decoder": (
        t5,
        SEQ2SEQ,
        [f"model.{stack}.block.{i} (T5Block)" for stack in ("encoder", "decoder") for i in range(2)],
    ),
}


def fit(
    make_model: Callable[[], nn.Module], case: Case, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Train, from different weights on every rank; return weights, description and warnings."""
    module = OwnLoss(make_model())
    differ_by_rank(module)
    strategy = AutomodelStrategy(**{"label_shift": case.label_shift, **options})
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
    said = warnings_of("", trainer.fit, module, loader(case))
    return full_weights(module), strategy.describe(), said


def error(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return weight_error(weights, prefixed(expected))


def tiny_llava() -> nn.Module:
    """A language model that sees, for the meta device."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    seeing = CLIPVisionConfig(num_hidden_layers=2)
    writing = LlamaConfig(num_hidden_layers=2)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=seeing, text_config=writing))


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
    for weights, described, said in pool2.run(fit, make_model, case, options):
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


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make_model", "case", "shift", "advice"),
    [(llama, CAUSAL, 0, "pass label_shift=1"), (t5, SEQ2SEQ, 1, "any other needs label_shift=0")],
)
def test_wrong_shift(
    pool2: RankPool, make_model: Callable[[], nn.Module], case: Case, shift: int, advice: str
) -> None:
    """Counting a label that the loss drops, or dropping one that it uses, is said once and seen in the weights."""
    expected, _ = train_plainly(make_model(), case)
    results = pool2.run(fit, make_model, case, {"label_shift": shift})
    said = [[message for message in messages if advice in message] for _, _, messages in results]
    assert [len(messages) for messages in said] == [1, 0]
    assert all(error(weights, expected) > 1e-4 for weights, _, _ in results)


@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
def test_aux_loss_that_trains(pool2: RankPool, options: dict[str, Any]) -> None:
    """In the model's own loss it weighs like the rest, by label tokens."""

    def own_loss(case: Case, model: Any, batch: Batch) -> Tensor:
        return model(**batch).loss * case.num_label_tokens(batch)

    expected, _ = train_plainly(mixtral(), CAUSAL, own_loss)
    unbalanced = mixtral()
    unbalanced.router_aux_loss_coef = 0.0
    without, _ = train_plainly(unbalanced, CAUSAL, own_loss)
    for weights, _, _ in pool2.run(fit, mixtral, CAUSAL, options):
        assert error(weights, expected) <= TOLERANCE
        assert error(weights, without) > 1e-4


# --- LoRA adapters of PEFT: every unit mixes frozen and trainable parameters

CLIP_NORM = 0.3


class Adapted(OwnLoss):
    """Generates in the end."""

    def __init__(self) -> None:
        super().__init__(lora_llama())
        self.generated: list[int] = []

    def on_train_end(self) -> None:
        self.generated = generate(self.model)


def generate(model: Any) -> list[int]:
    """The likeliest continuation. PEFT hands this to the model inside of it, past its own forward."""
    return model.generate(input_ids=torch.tensor([[1, 3, 5]]), max_new_tokens=8, do_sample=False)[0].tolist()


def fit_adapted(options: dict[str, Any]) -> tuple[dict[str, Tensor], float, Any, dict[str, Any]]:
    """Train from different weights on every rank."""
    module = Adapted()
    differ_by_rank(module)
    strategy = AutomodelStrategy(label_shift=1, **options)
    settings = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP_NORM}
    make_trainer(strategy, **settings).fit(module, loader(CAUSAL))
    norm = float(strategy.last_step.grad_norm)
    return full_weights(module), norm, module.generated, strategy.describe()


@pytest.mark.parametrize("options", by_default(ENGINES, "kept"))
def test_lora(pool2: RankPool, options: dict[str, Any]) -> None:
    """Adapters train and are clipped like those of one process, the base stays bit for bit, nothing is held for it."""
    plain = lora_llama()
    before = full_weights(plain)
    trainable = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    expected, norms = train_plainly(plain, CAUSAL, clip_norm=CLIP_NORM)
    assert min(norms) > CLIP_NORM
    for weights, grad_norm, generated, described in pool2.run(fit_adapted, options):
        assert weight_error(weights, prefixed(expected)) <= TOLERANCE
        assert all(
            torch.equal(weights[f"model.{name}"], before[name]) == (name not in trainable) for name in before
        )
        assert relative_error(grad_norm, norms[-1]) <= TOLERANCE
        assert generated == generate(plain)
        if "data_parallel" not in options:
            adapter_bytes = sum(before[name].nbytes for name in trainable)
            assert described["estimated_extra_bytes"]["deferred_gradients"] == adapter_bytes
