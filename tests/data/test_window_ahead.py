"""`count_window_ahead`: every loss is weighed before its backward, however batches reach the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_automodel import AutomodelStrategy
from tests.data.test_padded_training import Saves
from tests.data.test_uneven_inputs import Stream
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import (
    LEARNING_RATE,
    VOCABULARY,
    WIDTH,
    Outcome,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, make_trainer, mean_loss

ENGINES: dict[str, dict[str, Any]] = {"fsdp2": {}, "ddp": {"data_parallel": "ddp"}}


def _batches(count: int = CASE.num_batches) -> list[Any]:
    return [dict(batch) for batch in micro_batches(CASE)[dist.get_rank()][:count]]


def _fit(kind: str, ahead: bool, **options: Any) -> dict[str, Tensor]:
    module = LabelledModule()
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "max_epochs": 2}
    batches: list[Any] = _batches()
    if kind == "none":
        batches[3] = batches[4] = None  # opens a window, stands in it
    loader: Any = DataLoader(Stream(batches) if kind == "stream" else batches, batch_size=None)
    if kind == "workers":
        loader = DataLoader(batches, batch_size=None, num_workers=2)
    if kind == "limit":
        settings["limit_train_batches"] = 5
    if kind == "scheduler":
        settings |= {
            "accumulate_grad_batches": 1,
            "callbacks": [GradientAccumulationScheduler({0: 2, 1: 3})],
        }
    if kind == "validation in mid-window":
        settings |= {"val_check_interval": 2}
    trainer = make_trainer(AutomodelStrategy(count_window_ahead=ahead, **options), **settings)
    trainer.fit(module, loader, DataLoader(_batches(2), batch_size=None))
    return full_weights(module.model)


KINDS = ("stream", "workers", "limit", "scheduler", "none", "validation in mid-window")


IN_THE_SWEEP = ("workers", "limit", "validation in mid-window", "none", "scheduler")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.sweep] if kind in IN_THE_SWEEP else []) for kind in KINDS]
)
def test_is_what_comes_without(pool2: RankPool, kind: str) -> None:
    """The other mode is compared with one process elsewhere."""
    for engine in ENGINES.values() if kind == "stream" else [ENGINES["fsdp2"]]:
        for with_it, without in zip(
            pool2.run(_fit, kind, True, **engine), pool2.run(_fit, kind, False, **engine), strict=True
        ):
            assert weight_error(Outcome(with_it, None), Outcome(without, None)) <= TOLERANCE


def _fit_padded(ahead: bool) -> dict[str, Tensor]:
    module = LabelledModule()
    trainer = make_trainer(
        AutomodelStrategy(count_window_ahead=ahead, uneven_inputs="pad"),
        accumulate_grad_batches=3,
        max_epochs=2,
    )
    trainer.fit(module, DataLoader(Stream(_batches((7, 2)[dist.get_rank()])), batch_size=None))
    return full_weights(module.model)


def test_beside_padding(pool2: RankPool) -> None:
    for with_it, without in zip(pool2.run(_fit_padded, True), pool2.run(_fit_padded, False), strict=True):
        assert weight_error(Outcome(with_it, None), Outcome(without, None)) <= TOLERANCE


# --- Resuming ---------------------------------------------------------------------------------------------------------


def _resume(kind: str, folder: Path, after: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights = []
    for kwargs in ({}, {"ckpt_path": folder / "checkpoint"}):
        module = LabelledModule()
        batches = _batches()
        make = StatefulDataLoader if "stateful" in kind else DataLoader
        loader = make(Stream(batches) if "stream" in kind else batches, batch_size=None)
        trainer = make_trainer(
            AutomodelStrategy(count_window_ahead=True),
            max_epochs=2,
            accumulate_grad_batches=3,
            callbacks=[] if kwargs else [Saves(folder, after)],
            enable_checkpointing=True,
        )
        trainer.fit(module, loader, **kwargs)
        weights.append(full_weights(module.model))
    return weights[0], weights[1]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "kind",
    ["rows", *(pytest.param(k, marks=pytest.mark.sweep) for k in ("stateful rows", "stateful stream"))],
)
def test_resuming(pool2: RankPool, tmp_path: Path, kind: str) -> None:
    """From a step and from mid-window, batches that were drawn ahead and not trained on are drawn again."""
    for after in (3, 5):
        folder = tmp_path / str(after)
        for calm, resumed in pool2.run(_resume, kind, folder, after):
            assert {name: float((calm[name] - resumed[name]).abs().max()) for name in calm} == dict.fromkeys(
                calm, 0.0
            )


# --- Auxiliary losses -------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two experts behind a router, and how unequally it loads them, as in the Switch Transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(2))
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(batch["input_ids"]).flatten(0, 1)
        probabilities = self.router(hidden).softmax(-1)
        logits = sum(
            share[:, None] * expert(hidden)
            for share, expert in zip(probabilities.T, self.experts, strict=True)
        )
        chosen = F.one_hot(probabilities.argmax(-1), 2).double()
        balance = 2 * (chosen.mean(0) * probabilities.mean(0)).sum()  # not linear in the tokens of a batch
        return logits, 0.3 * balance


class MixtureOfExperts(LabelledModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Experts()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, aux = self.model(batch)
        count = (batch["labels"] != -100).sum()
        mean = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / count.clamp(min=1)
        return {"loss": mean + aux, "aux_loss": aux, "num_label_tokens": count}


def _fit_experts(ahead: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    module = MixtureOfExperts()
    trainer = make_trainer(AutomodelStrategy(count_window_ahead=ahead, **options), accumulate_grad_batches=3)
    trainer.fit(module, DataLoader(_batches((8, 5)[dist.get_rank()]), batch_size=None))
    return full_weights(module.model)


def _experts_of_one_process(counts: tuple[int, int]) -> dict[str, Tensor]:
    model = Experts()
    by_rank = micro_batches(CASE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for start in range(0, max(counts), 3):
        window = [b for own, n in zip(by_rank, counts, strict=True) for b in own[:n][start : start + 3]]
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
        outputs = [(model(batch), batch["labels"].flatten()) for batch in window]
        losses = [F.cross_entropy(logits, labels, reduction="sum") for (logits, _), labels in outputs]
        loss = torch.stack(losses).sum() / tokens + torch.stack([aux for (_, aux), _ in outputs]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return full_weights(model)


@pytest.mark.every_case
@pytest.mark.parametrize("engine", ENGINES)
def test_auxiliary_loss(pool2: RankPool, engine: str) -> None:
    """Mean over the window's micro-batches on all ranks, of which one has fewer, beside the mean over its tokens."""
    expected = Outcome(_experts_of_one_process((8, 5)), None)
    for weights in pool2.run(_fit_experts, True, {"uneven_inputs": "pad", **ENGINES[engine]}):
        assert weight_error(Outcome(weights, None), expected) <= TOLERANCE


def test_auxiliary_loss_without_it(pool2: RankPool) -> None:
    with pytest.raises(RankError, match="Pass count_window_ahead=True"):
        pool2.run(_fit_experts, False, {"uneven_inputs": "pad"})


class ModelOutput(dict):
    """Named as transformers names it."""


class ReturnsModelOutput(MixtureOfExperts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ModelOutput(super().training_step(batch, batch_idx))


class ReturnsAnotherCount(LabelledModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self(batch), "num_label_tokens": 1234}


class LengthensTheWindow(LabelledModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.accumulate_grad_batches = 3
        return self(batch)


class DrawsItsBatches(LabelledModule):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self(next(dataloader_iter)[0])


class StepsInBackward(LabelledModule):
    """As torch's tutorial has it: an optimizer for each parameter, and no gradient outlives the backward."""

    def configure_optimizers(self) -> Any:
        optimizers = {p: torch.optim.SGD([p], lr=LEARNING_RATE, momentum=0.9) for p in self.parameters()}

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(step)


def _misuse(module: Any, options: dict[str, Any]) -> None:
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(_batches(4), batch_size=None))


AHEAD = {"count_window_ahead": True}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ReturnsModelOutput, AHEAD, r"model.config.router_aux_loss_coef \* out.aux_loss"),
        (ReturnsAnotherCount, AHEAD, r"has counted \d+ label tokens .* training_step has 1234"),
        (LengthensTheWindow, AHEAD, r"counted ahead as \d micro-batches .* ends after 3 backward"),
        (DrawsItsBatches, AHEAD, "takes the batch instead of a dataloader_iter"),
        (
            StepsInBackward,
            {},
            "_hook on model.embedding.weight, which is sharded: .* with count_window_ahead=True",
        ),
        (
            StepsInBackward,
            {"data_parallel": "ddp"},
            "13 parameters have post-accumulate-gradient hooks .*pass count_window_ahead=True",
        ),
        (StepsInBackward, {**AHEAD, "data_parallel": "ddp"}, "before they are averaged over ranks"),
        (LabelledModule, {**AHEAD, "label_key": "targets"}, "counts a batch before training_step sees it"),
    ],
)
def test_misuse_is_told(pool2: RankPool, module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool2.run(_misuse_of, module, options)


def _misuse_of(module: Any, options: dict[str, Any]) -> None:
    _misuse(module(), options)


# --- Steps in the backward --------------------------------------------------------------------------------------------


class HoldsNoGradient(Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert all(parameter.grad is None for parameter in module.parameters())


def _step_in_backward(accumulate: int) -> dict[str, Tensor]:
    module = StepsInBackward()
    trainer = make_trainer(
        AutomodelStrategy(count_window_ahead=True),
        accumulate_grad_batches=accumulate,
        callbacks=[HoldsNoGradient()],
    )
    trainer.fit(module, DataLoader(_batches(6), batch_size=None))
    return full_weights(module.model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_within_the_backward(pool2: RankPool, accumulate: int) -> None:
    model = LabelledModule().model
    by_rank = micro_batches(CASE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for start in range(0, 6, accumulate):
        window = [batch for own in by_rank for batch in own[start : start + accumulate]]
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
        optimizer.zero_grad()
        (sum(mean_loss(model, batch, "sum") for batch in window) / max(tokens, 1)).backward()
        optimizer.step()
    for weights in pool2.run(_step_in_backward, accumulate):
        assert weight_error(Outcome(weights, None), Outcome(full_weights(model), None)) <= TOLERANCE
