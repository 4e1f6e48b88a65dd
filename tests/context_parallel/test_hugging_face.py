"""Context parallelism of Hugging Face causal models on their own loss, against one process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.expert_parallel.test_hugging_face import make_model as make_mixture
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import VOCABULARY, Batch, full_weights, weight_error
from tests.trainer.hugging_face import SIZES, OwnLoss, filled, llama, t5, untied_gpt2
from tests.trainer.plain import plain_weights
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import TOLERANCE, by_default, make_trainer

CONTEXT = 2
ACCUMULATE = 2
NUM_BATCHES = 4
MAX_LENGTH = 15


def qwen3() -> nn.Module:
    """Layers with and without a window, and norms within attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    return filled(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4, **layers)))


def mistral() -> nn.Module:
    """A window in all layers."""
    from transformers import MistralConfig, MistralForCausalLM

    return filled(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3)))


def mixture(kind: str) -> nn.Module:
    """Which expert gets a position, and whether any gets one, depends on the positions of a slice."""
    model = make_mixture(kind)
    model.config._attn_implementation = "sdpa"
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen3": qwen3,
    "mistral": mistral,
    "gpt2": untied_gpt2,
    "qwen3 moe": functools.partial(mixture, "Qwen3Moe"),
    "mixtral": functools.partial(mixture, "Mixtral"),
}
CASES = {
    f"{model}, {kind}": (model, kind) for model in MODELS for kind in ("plain", "left", "right", "packed")
}
DEFAULT = (
    *("qwen3, left", "qwen3, packed"),
    *("qwen3 moe, plain", "qwen3 moe, left", "qwen3 moe, right", "mixtral, plain"),
)


@functools.cache
def make_batches(kind: str) -> list[Batch]:
    """Ragged batches; positions without label, padded on one side, or several documents."""
    rng = random.Random(f"{kind} 1")
    return [make_batch(kind, rng) for _ in range(NUM_BATCHES)]


def make_batch(kind: str, rng: random.Random) -> Batch:
    num_rows = rng.randint(1, 3)
    length = rng.randint(4, MAX_LENGTH)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    ids, labels = (torch.randint(VOCABULARY, (num_rows, length), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    batch = {"input_ids": ids, "labels": labels}
    positions = torch.arange(length).expand(num_rows, -1)
    if kind == "packed":
        cut = rng.randint(1, length - 1)
        batch["position_ids"] = torch.where(positions < cut, positions, positions - cut)
    elif kind != "plain":
        real = torch.tensor([[rng.randint(1, length)] for _ in range(num_rows)])
        mask = positions >= length - real if kind == "left" else positions < real
        batch["attention_mask"] = mask.long()
        labels[~mask] = -100
    return batch


def train_plainly(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Weights of one process."""

    def sums(model: Any, batch: Batch) -> tuple[Tensor, int]:
        count = int((batch["labels"][:, 1:] != -100).sum())
        output = model(**batch, use_cache=False)
        return (output.loss * count if count else 0 * output.logits.sum()), count

    case = Case(seed=0, num_batches=NUM_BATCHES)
    return plain_weights(model, ACCUMULATE, case, sums=sums, by_rank=[make_batches(kind)])


def fit(make_model: Callable[[], nn.Module], kind: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Runs on every rank: full weights, and what was replaced on the model's configuration afterwards."""
    module = OwnLoss(make_model())
    strategy = AutomodelStrategy(context_parallel_size=CONTEXT, label_shift=1)
    trainer = make_trainer(strategy, accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, DataLoader(make_batches(kind), batch_size=None))
    config = module.model.config
    return full_weights(module.model), [config._attn_implementation, config.use_cache]


@pytest.mark.every_case
@pytest.mark.parametrize("case", by_default(CASES, *DEFAULT))
def test_as_one_process(pool2: RankPool, case: tuple[str, str]) -> None:
    """Layers with and without a window, and mixtures of experts."""
    model, kind = case
    plain = MODELS[model]()
    found = [plain.config._attn_implementation, plain.config.use_cache]
    expected = train_plainly(plain, kind)
    for weights, left in pool2.run(fit, MODELS[model], kind):
        assert weight_error(weights, expected) <= TOLERANCE
        assert left == found


class LeavesOut(OwnLoss):
    """Passes all but one entry of the batch to the model."""

    def __init__(self, left_out: str) -> None:
        super().__init__(llama())
        self.left_out = left_out

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step(
            {name: each for name, each in batch.items() if name != self.left_out}, batch_idx
        )


class ShiftsInTheModel(OwnLoss):
    """Lets the model shift what belongs to its slice."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        own = {name: each for name, each in batch.items() if name != "shift_labels"}
        return self.model(**(own | {"labels": batch["shift_labels"]})).loss


def linear_attention() -> nn.Module:
    """A layer that mixes positions by a recurrence."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    layers = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0, "head_dim": 4}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    return filled(
        Qwen3NextForCausalLM(
            Qwen3NextConfig(**SIZES, **layers, **linear, linear_key_head_dim=4, linear_value_head_dim=4)
        )
    )


def refused(make_module: Callable[[], Any], sentence: str) -> Refused:
    options = {"context_parallel_size": CONTEXT, "label_shift": 1}
    return Refused(make_module, (sentence,), lambda: make_batches("plain"), options)


REFUSED = {
    "positions": refused(
        lambda: LeavesOut("position_ids"), "LlamaForCausalLM was called on a slice of a sequence without"
    ),
    "masks": refused(
        lambda: LeavesOut("attention_mask"), "pass the batch's attention_mask and position_ids to the model"
    ),
    "shifted labels": refused(lambda: LeavesOut("shift_labels"), "take batch['shift_labels']"),
    "shifted again": refused(
        lambda: ShiftsInTheModel(llama()), "would shift the labels of a slice of a sequence by"
    ),
    "encoder-decoder": refused(lambda: OwnLoss(t5()), "computes attention with position_bias"),
    "linear attention": refused(
        lambda: OwnLoss(linear_attention()), "linear_attn.out_proj (Linear) gives something else"
    ),
}


@pytest.mark.sweep
def test_what_would_be_wrong_in_slices_is_refused(pool2: RankPool) -> None:
    check_refused(pool2, __name__)
