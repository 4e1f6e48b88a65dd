"""EvaluationLoss gives the value of one process over the whole set.

The reference knows neither ranks nor batches: the sum of the token losses of the whole set over its label
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, EvaluationLoss
from tests.data.plain import Stream
from tests.rank_pool import RankPool
from tests.trainer.exactness import SILENT, Batch, TinyDecoder, full_weights
from tests.trainer.runs import (
    CASE,
    TOLERANCE,
    LabelledModule,
    count_labels,
    make_trainer,
    mean_loss,
    shares,
)

COUNTS = (5, 3)  # batches of each data-parallel rank; some of them have no label token


def in_rows(batches: list[Batch]) -> list[Batch]:
    """The same data, one row a batch."""
    return [
        {k: v[i : i + 1] for k, v in batch.items()} for batch in batches for i in range(len(batch["labels"]))
    ]


def without_labels(batches: list[Batch]) -> list[Batch]:
    return [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in batches]


def hidden(batches: list[Batch]) -> list[Any]:
    """Batches in which nobody finds labels."""
    return [(batch["input_ids"], batch["labels"]) for batch in batches]


def expected(batches: list[Batch], model: torch.nn.Module | None = None) -> float:
    model = TinyDecoder(CASE.seed).double() if model is None else model
    with torch.no_grad():
        losses = [float(mean_loss(model, batch, "sum")) for batch in batches]
    return math.fsum(losses) / max(sum(map(count_labels, batches)), 1)


def expected_by_batch(weight: Callable[[Batch], int]) -> float:
    """The mean of the means of batches with label tokens."""
    model = TinyDecoder(CASE.seed).double()
    batches = [batch for share in shares(COUNTS) for batch in share if count_labels(batch)]
    with torch.no_grad():
        losses = [float(mean_loss(model, batch)) * weight(batch) for batch in batches]
    return math.fsum(losses) / sum(map(weight, batches))


def is_near(found: Any, wanted: float) -> bool:
    return abs(float(found) - wanted) <= TOLERANCE * abs(wanted)


class Evaluated(LabelledModule):
    """Returns its loss in a given way."""

    def __init__(self, way: str = "labels") -> None:
        super().__init__()
        self.way = way

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if self.way == "tuple":
            batch = {"input_ids": batch[0], "labels": batch[1]}
        loss = mean_loss(self.model, batch, "sum" if self.way == "sum" else "mean")
        if self.way == "nothing":
            return None
        if self.way == "returned":
            return {"loss": loss, "num_label_tokens": count_labels(batch)}
        return loss

    test_step = validation_step


def evaluate(trainer: Trainer, way: str, batches: Any, stage: str = "validate") -> dict[str, float]:
    """What is logged."""
    loader = DataLoader(batches, batch_size=None)
    (values,) = getattr(trainer, stage)(Evaluated(way), loader, verbose=False)
    return values


# --- Ways to tell the count -------------------------------------------------------------------------------------------

# For each way: what the strategy is told, and whether batches hide their labels.
WAYS: dict[str, dict[str, Any]] = {
    "returned": {},
    "labels": {},
    "tuple": {"count_label_tokens": lambda batch: (batch[1] != -100).sum()},
    "sum": {"loss_reduction": "sum"},
}


def _evaluate_ways(engine: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    own = shares(COUNTS)[dist.get_rank()]
    for way, options in WAYS.items():
        found[way] = []
        for stage, batches in (("validate", own), ("test", in_rows(own))):
            trainer = make_trainer(
                AutomodelStrategy(data_parallel=engine, **options),
                callbacks=[EvaluationLoss("{stage}/loss")],
            )
            values = evaluate(trainer, way, hidden(batches) if way == "tuple" else batches, stage)
            found[way].append(values[{"validate": "val", "test": "test"}[stage] + "/loss"])
    return found


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_each_way_to_tell_the_count(pool2: RankPool, engine: str) -> None:
    """Whole batches and single rows, on ranks with unequally many, have the value of one process."""
    wanted = expected([batch for share in shares(COUNTS) for batch in share])
    for found in pool2.run(_evaluate_ways, engine):
        assert set(found) == set(WAYS)
        for values in found.values():
            assert all(is_near(value, wanted) for value in values), found


def _evaluate_otherwise() -> list[float]:
    own = [batch for batch in shares(COUNTS)[dist.get_rank()] if count_labels(batch)]
    found: list[float] = []
    for options, batches in (
        ({"per_token_loss": False}, own),
        ({"count": "samples"}, own),
        ({}, without_labels(own)),
    ):
        trainer = make_trainer(AutomodelStrategy(**options), callbacks=[EvaluationLoss()])
        found.append(evaluate(trainer, "labels", batches)["val_loss"])
    return found


def test_means_of_batches_of_samples_and_of_nothing(pool2: RankPool) -> None:
    """Batches weigh what they weigh in training; a set without label tokens has no mean."""
    for by_batch, by_sample, nothing in pool2.run(_evaluate_otherwise):
        assert is_near(by_batch, expected_by_batch(lambda batch: 1))
        assert is_near(by_sample, expected_by_batch(lambda batch: len(batch["labels"])))
        assert math.isnan(nothing)


# --- Layouts, loaders, and a fit --------------------------------------------------------------------------------------


def _fit(folder: str) -> tuple[Any, ...]:
    module = Evaluated("labels")
    best = ModelCheckpoint(folder, monitor="val_loss", save_weights_only=True)
    stopping = EarlyStopping("val_loss", min_delta=100.0, patience=2)
    own = shares(COUNTS)[dist.get_rank()]
    trainer = make_trainer(
        AutomodelStrategy(),
        callbacks=[EvaluationLoss(perplexity="{stage}_perplexity"), best, stopping],
        enable_checkpointing=True,
        num_sanity_val_steps=2,
        max_epochs=5,
    )
    trainer.fit(module, DataLoader(own[:3], batch_size=None), DataLoader(own, batch_size=None))
    value = float(trainer.callback_metrics["val_loss"])
    score = float(best.best_model_score)
    assert is_near(trainer.callback_metrics["val_perplexity"], math.exp(value))
    return value, score, trainer.current_epoch, full_weights(module.model)


def test_a_fit_that_watches_it(pool2: RankPool, tmp_path: Path) -> None:
    """After a sanity check, at the end of each epoch, on all ranks, for what saves and stops by it."""
    model = TinyDecoder(CASE.seed).double()
    for value, score, epochs, weights in pool2.run(_fit, str(tmp_path)):
        model.load_state_dict(weights)
        assert is_near(value, expected([batch for share in shares(COUNTS) for batch in share], model))
        assert score <= value
        assert epochs == 3  # it never improves by 100


# --- Other strategies, and what is refused ----------------------------------------------------------------------------


EMPTY = (5, 0)


def _evaluate_under_ddp() -> float:
    trainer = make_trainer(DDPStrategy(), callbacks=[EvaluationLoss()])
    # A stream, since Lightning skips the evaluation on a rank that knows that it has nothing.
    return evaluate(trainer, "returned", Stream(shares(EMPTY)[dist.get_rank()]))["val_loss"]


def test_under_lightnings_own_strategy(pool2: RankPool) -> None:
    """Also where a rank has no batch at all."""
    wanted = expected([batch for share in shares(EMPTY) for batch in share])
    assert all(is_near(value, wanted) for value in pool2.run(_evaluate_under_ddp))


def test_in_one_process_without_a_group() -> None:
    """The module runs as it is under the strategy."""
    (own, _) = shares(COUNTS)
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=[EvaluationLoss()], **SILENT)
    assert is_near(evaluate(trainer, "returned", own)["val_loss"], expected(own))


def _refusals() -> list[str]:
    messages = []
    own = shares((2, 2))[dist.get_rank()]
    for strategy, way, batches in (
        (AutomodelStrategy(), "nothing", own),
        (AutomodelStrategy(), "tuple", hidden(own)),
        (DDPStrategy(), "labels", own),
    ):
        trainer = make_trainer(strategy, callbacks=[EvaluationLoss()])
        with pytest.raises(ValueError, match="label") as raised:
            evaluate(trainer, way, batches, "test")
        messages.append(str(raised.value))
    return messages


def test_a_step_that_tells_too_little(pool2: RankPool) -> None:
    """What it returned, and what it should return."""
    for none, no_count, other_strategy in pool2.run(_refusals):
        assert "test_step returned None: return {'loss': loss, 'num_label_tokens': n}" in none
        assert "found no count (the batch is a list; label_key is" in no_count
        assert "return {'loss': loss, 'num_label_tokens': n} from test_step" in no_count
        assert "DDPStrategy does not count them (AutomodelStrategy does). Return" in other_strategy
        assert "{'loss': mean, 'num_label_tokens': n}" in other_strategy
