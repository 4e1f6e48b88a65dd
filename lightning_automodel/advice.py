"""Warnings and notes for the user, each given once."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_automodel.context_parallel.hugging_face import outermost_hugging_face_models
from lightning_automodel.context_parallel.slices import SHIFTED_LABELS
from lightning_automodel.distributed.mesh import DATA, REPLICATE, SHARD
from lightning_automodel.gradients.loss_graph import Kind, LossTerm, loss_terms
from lightning_automodel.gradients.token_loss import Count, TokenWeighting, count_samples, has_count
from lightning_automodel.sharding.precision import HALF

_LOOKS = 4
"""Of how many micro-batches in a run the loss is looked at. Each look reads the device."""
_SAME = 1e-4
"""Relative difference of weights that rounding may make: class weights are summed in float32."""
_REMEDIES: dict[Kind, str] = {
    "labels": "Return what the loss divides by as num_label_tokens, or say what to count by label_key=, ignore_index=,"
    " label_shift= or count_label_tokens=. If parts of the loss divide by different numbers, no single count is right:"
    " see 'Losses with two denominators' in docs/recipes.md.",
    "class weights": "It divides by the class weights of its labels: return {'loss': loss, 'num_label_tokens':"
    " weight[labels].sum()} from training_step.",
    "probabilities": "Its targets are probabilities, and there torch divides by the rows, with class weights as well:"
    " count rows (count='samples' where each sample is one).",
    "sum": "It is a sum: pass loss_reduction='sum', or divide it by the label tokens.",
}


class Advice:
    """Says each thing once, on rank 0."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._looks_left = _LOOKS
        self._losses: dict[tuple[Kind, ...], tuple[list[LossTerm], float]] = {}
        self._count_is_checked = False

    def say_once(self, message: str, say: Callable[[str], None] = rank_zero_warn) -> None:
        """Say ``message`` unless it has been said."""
        if message not in self._said:
            self._said.add(message)
            say(message)

    def about_half_precision(self, loss: Tensor, count: Count) -> None:
        """Warn about a loss [] or a count in half precision, which is rounded before the loss is weighed."""
        if loss.dtype in HALF:
            self.say_once(
                f"training_step returned a {loss.dtype} loss, which is rounded before it is weighed: compute the loss"
                " in float32 (logits.float()) for exact gradients."
            )
        if isinstance(count, Tensor) and count.dtype in HALF:
            limit = 2048 if count.dtype == torch.float16 else 256
            self.say_once(
                f"The number of label tokens is a {count.dtype} tensor, which rounds numbers above {limit}: count in"
                " integers or float32 (mask.sum(dtype=torch.float32)) for exact gradients."
            )

    def about_loss(
        self, module: nn.Module, weighting: TokenWeighting, loss: Tensor, count: Count, accumulate: int
    ) -> None:
        """Warn, in the first micro-batches of a run, if a loss [] divides by something else than is counted.

        Two micro-batches tell: what the loss divides by, over the count, must be the same in both. ``accumulate`` is
        what Lightning has divided the loss by. Reads the device, up to four times in a run.
        """
        if not (self._looks_left and weighting.per_token_loss):
            return
        self._looks_left -= 1
        num_tokens = float(count)
        terms = loss_terms(loss, module) if num_tokens > 0 else []
        terms = [LossTerm(each.kind, each.divisor / accumulate) for each in terms]
        if not terms or not all(0 < each.divisor < math.inf for each in terms):
            return
        earlier_terms, earlier_tokens = self._losses.setdefault(tuple(each.kind for each in terms), (terms, num_tokens))
        counts = earlier_tokens, num_tokens
        for earlier, term in zip(earlier_terms, terms, strict=True):
            divisors = earlier.divisor, term.divisor
            if term.kind in ("all ranks", "metric"):
                self._about_all_ranks(module, weighting, term.kind, divisors, counts)
            else:
                self._about_divisor(module, weighting, term.kind, divisors, counts)

    def about_master_weights(self, precision: str, module: nn.Module) -> None:
        """Warn about a mixed ``precision`` whose optimizer updates half-precision parameters."""
        halves = [p.dtype for p in module.parameters() if p.requires_grad and p.dtype in HALF]
        if halves and precision.endswith("-mixed"):
            self.say_once(
                f"precision={precision!r} updates parameters in their own dtype, and {len(halves)} trainable ones are"
                f" {halves[0]}: small updates are lost. Load the model in float32 (model.float()), or pass"
                " precision='bf16-true' or '16-true' if that is intended."
            )

    def about_count(self, module: nn.Module, weighting: TokenWeighting, output: Any) -> None:
        """Warn, in the first step without a count of its own, if a Hugging Face model drops other labels."""
        if self._count_is_checked or has_count(output) or not weighting.per_token_loss:
            return
        self._count_is_checked = True
        if weighting.count_label_tokens is None:
            self._about_label_shift(module, weighting)

    def about_class_weights(self, module: nn.Module, weighting: TokenWeighting, output: Any) -> None:
        """Warn, in an evaluation that returns no count, of losses with class weights; of training, see `about_loss`."""
        if has_count(output) or not weighting.per_token_loss:
            return
        if weighting.count_label_tokens not in (None, count_samples):
            return
        for name, loss in module.named_modules():
            is_mean = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.reduction == "mean"
            if is_mean and loss.weight is not None:
                self.say_once(
                    f"{type(module).__name__}.{name} divides by the class weights of its labels, but each label counts"
                    " as one. Return {'loss': loss, 'num_label_tokens': weight[labels].sum()} from the step."
                )

    def _about_divisor(
        self,
        module: nn.Module,
        weighting: TokenWeighting,
        kind: Kind,
        divisors: tuple[float, float],
        counts: tuple[float, float],
    ) -> None:
        """Warn if two micro-batches do not get the weights that they have in one batch."""
        weights = counts if weighting.loss_reduction == "mean" else (1.0, 1.0)
        if math.isclose(weights[0] * divisors[1], weights[1] * divisors[0], rel_tol=_SAME):
            return
        remedy = _REMEDIES[kind]
        if weighting.loss_reduction == "sum":
            remedy = "loss_reduction='sum' expects a sum: leave it out where the loss is a mean."
        self.say_once(
            f"The loss of {type(module).__name__} holds a cross-entropy that is divided by {divisors[0]:g} in one"
            f" micro-batch and by {divisors[1]:g} in another, where {counts[0]:g} and {counts[1]:g} {weighting.unit}s"
            f" are counted: gradients are not those of one batch. {remedy}"
        )

    def _about_all_ranks(
        self,
        module: nn.Module,
        weighting: TokenWeighting,
        kind: Kind,
        divisors: tuple[float, float],
        counts: tuple[float, float],
    ) -> None:
        """Warn if a loss of all ranks is weighed by the counts of two micro-batches as if it were of one rank."""
        is_divided_by_count = not math.isclose(*divisors, rel_tol=_SAME)
        if weighting.loss_reduction == "sum" or math.isclose(*counts, rel_tol=_SAME) or is_divided_by_count:
            return
        if kind == "metric":
            self.say_once(
                f"The loss of {type(module).__name__} holds a metric with dist_sync_on_step=True, which has averaged"
                f" over all ranks: weighed by {weighting.unit}s on top, gradients are not those of one batch. Pass"
                " per_token_loss=False, and multiply the metric by the number of ranks, since its gradient is that of"
                " this rank's part alone. Or leave dist_sync_on_step out, and return this rank's mean and its count."
            )
            return
        self.say_once(
            f"The loss of {type(module).__name__} is gathered from all ranks, with gradients, and each rank's weighs"
            f" the same, however many {weighting.unit}s it has: gradients are not those of one batch. Return this"
            f" rank's loss, which the strategy weighs by its {weighting.unit}s (self.log(..., sync_dist=True) shows"
            " the mean over ranks). If each rank and each micro-batch shall weigh the same, pass per_token_loss=False."
        )

    def _about_label_shift(self, module: nn.Module, weighting: TokenWeighting) -> None:
        """Warn about a Hugging Face model whose own loss drops other labels than ``label_shift`` says."""
        is_shifted = weighting.label_shift > 0 or weighting.label_key == SHIFTED_LABELS
        if not is_shifted and contains_hugging_face_causal_lm(module):
            self.say_once(
                "Label tokens are counted with label_shift=0, but Hugging Face causal language models drop the"
                " first label of each row: pass label_shift=1 if training_step returns the model's own loss."
            )
        if weighting.label_shift > 0 and any(map(_is_encoder_decoder, outermost_hugging_face_models(module))):
            self.say_once(
                f"Label tokens are counted with label_shift={weighting.label_shift}, but Hugging Face encoder-decoders"
                " use every label: they shift the decoder's inputs instead. Leave label_shift at 0 if training_step"
                " returns the model's own loss."
            )


def contains_hugging_face_causal_lm(module: nn.Module) -> bool:
    """Whether a model whose own loss shifts the labels by one is at or below ``module``. Does not import transformers.

    Of nested models the outermost decides, since it computes the loss. A ``...ForConditionalGeneration`` that is not an
    encoder-decoder is a vision or audio model, and shifts like the language model inside it.
    """
    shifting = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    models = outermost_hugging_face_models(module)
    return any(type(m).__name__.endswith(shifting) and not _is_encoder_decoder(m) for m in models)


def _is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a Hugging Face model is an encoder-decoder, whose own loss uses every label."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def summary(described: dict[str, Any]) -> str:
    """The result of ``describe()`` in one line."""
    sizes = {name: size for name, size in described["mesh"].items() if size > 1}
    if sizes.keys() & {REPLICATE, SHARD}:
        sizes.pop(DATA, None)  # their product
    ranks = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "one rank"
    units = described.get("units")
    parts = [
        f"{described['data_parallel']} over {ranks}",
        *([f"{len(units)} FSDP units beside the root"] if isinstance(units, list) else []),
        f"precision {described['precision']['trainer']}",
        f"gradients per {described['gradient_denominator']}",
    ]
    return f"AutomodelStrategy: {', '.join(parts)}; trainer.strategy.describe() has the details."
