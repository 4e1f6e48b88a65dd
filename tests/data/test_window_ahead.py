"""Windows that are counted ahead, and unequal loaders, beside the plain case: once wrong, or a hang."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_automodel import AutomodelStrategy
from tests.data.plain import loader_of, own_batches, train_windows
from tests.data.test_uneven_inputs import Estimating
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import LEARNING_RATE, Batch, assert_exact, full_weights, micro_batches
from tests.trainer.runs import CASE, LabelledModule, loader, make_trainer

# --- Misuse -----------------------------------------------------------------------------------------------------------


class HasAuxiliaryLoss(LabelledModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        aux = 0.1 * next(self.parameters()).square().sum()
        return {"loss": self(batch) + aux, "aux_loss": aux}


class ModelOutput(dict):
    """Named as transformers names it."""


class ReturnsModelOutput(HasAuxiliaryLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ModelOutput(super().training_step(batch, batch_idx))


class ReturnsAnotherCount(LabelledModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self(batch), "num_label_tokens": 1234}


class DropsLabels(LabelledModule):
    """After the batch was drawn: gradients would be divided by another number of tokens than they hold."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        labels = batch["labels"].clone()
        labels[:, ::2] = -100
        return {**batch, "labels": labels}


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


def _misuse(module: type[LabelledModule], options: dict[str, Any]) -> None:
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=2)
    trainer.fit(module(), DataLoader(own_batches((4, 4)), batch_size=None))


AHEAD = {"count_window_ahead": True}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ReturnsModelOutput, AHEAD, r"model.config.router_aux_loss_coef \* out.aux_loss"),
        (HasAuxiliaryLoss, {}, "at its first backward. Pass count_window_ahead=True, or per_token"),
        (ReturnsAnotherCount, AHEAD, r"has counted \d+ label tokens .* training_step has 1234"),
        (DropsLabels, AHEAD, r"has counted \d+ label tokens .* training_step has \d+: change labels in the"),
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
        (StepsInBackward, {**AHEAD, "data_parallel": "ddp"}, "before they are final"),
        (LabelledModule, {**AHEAD, "label_key": "targets"}, "counts a batch before training_step sees it"),
    ],
)
def test_misuse_is_told(pool2: RankPool, module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool2.run(_misuse, module, options)


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
    trainer.fit(module, DataLoader(own_batches((6, 6)), batch_size=None))
    return full_weights(module.model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_within_the_backward(pool2: RankPool, accumulate: int) -> None:
    model = LabelledModule().model
    starts = range(0, 6, accumulate)
    train_windows(
        model,
        [
            [batch for own in micro_batches(CASE) for batch in own[start : start + accumulate]]
            for start in starts
        ],
    )
    assert_exact(pool2.run(_step_in_backward, accumulate), full_weights(model))


# --- Unequal loaders in evaluation ------------------------------------------------------------------------------------

TIMEOUT_MINUTES = 0.3


def strategy(**options: Any) -> AutomodelStrategy:
    return AutomodelStrategy(timeout=TIMEOUT_MINUTES, **options)


class Counts(LabelledModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()

    def validation_step(self, batch: list[Batch | None], batch_idx: int) -> None:
        for each in batch:
            if each is not None:
                self(each)
                self.seen.update(1.0)
        self.log("seen", self.seen)


def _combine(counts: list[tuple[int, int]], is_stream: bool) -> float:
    loaders = [loader_of(each, is_stream) for each in counts]
    trainer = make_trainer(strategy())
    return trainer.validate(Counts(), CombinedLoader(loaders, "min_size"), verbose=False)[0]["seen"]


UNKNOWN = "Ranks may have unequally many batches, and the last one is not known in a step that takes a dataloader_iter"


def test_batches_of_several_loaders_at_once(pool2: RankPool) -> None:
    """With equal lengths they are evaluated."""
    for counts, is_stream in (([(5, 3), (2, 4)], False), ([(5, 5), (4, 4)], True)):
        with pytest.raises(RankError, match=UNKNOWN):
            pool2.run(_combine, counts, is_stream)
    assert pool2.run(_combine, [(5, 5), (4, 4)], False) == [16, 16]


class DrawsWhenever(LabelledModule):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        return self(next(dataloader_iter)[0])

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        self(next(dataloader_iter)[0])


def _draw(counts: tuple[int, int]) -> None:
    make_trainer(strategy()).validate(DrawsWhenever(), loader_of(counts), verbose=False)


def _draw_to_train(counts: tuple[int, int]) -> int:
    trainer = make_trainer(strategy(per_token_loss=False))
    trainer.fit(DrawsWhenever(), loader_of(counts, is_stream=True))
    return trainer.global_step


def test_a_step_that_draws_its_batches(pool2: RankPool) -> None:
    with pytest.raises(RankError, match=UNKNOWN):
        pool2.run(_draw, (5, 3))
    assert pool2.run(_draw, (3, 3)) == [None, None]
    assert pool2.run(_draw_to_train, (3, 3)) == [3, 3]
    with pytest.raises(RankError, match="The train data of rank 1 ends with batch 2"):
        pool2.run(_draw_to_train, (4, 2))


SYNCED: dict[str, Any] = {"on_step": True, "on_epoch": True, "batch_size": 1, "sync_dist": True}
START, END, STEP = "on_validation_batch_start", "on_validation_batch_end", "validation_step"
COMMUNICATES: dict[str, tuple[str, Any]] = {
    "logs in a hook": (END, lambda module, *_: module.log("x", 1.0, **SYNCED)),
    "logs each step": (STEP, lambda module, batch, _: module.log("x", module(batch), **SYNCED)),
    "gathers": (START, lambda module, *_: module.all_gather(torch.ones(1))),
    "reads weights": (
        STEP,
        lambda module, *_: module.log("norm", sum(p.norm() for p in module.parameters())),
    ),
    "reads the log directory": (STEP, lambda module, *_: print(module.trainer.log_dir)),
    "calls the model": (END, lambda module, outputs, batch, *_: print(module(batch).shape)),
    "waits": (END, lambda module, *_: module.trainer.strategy.barrier("each batch")),
    "saves": (END, lambda module, *args: args[2] == 3 and module.trainer.save_checkpoint("never written")),
}
"""Where a module communicates, and how."""


class GathersFirst(LabelledModule):
    """In hooks to which all ranks come: those of the first batch of each of several loaders, twice."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self(batch)

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 0:
            self.all_gather(torch.ones(1))
            float(sum(weight.norm() for weight in self.parameters()))


def _validate(how: str, counts: tuple[int, int]) -> None:
    module: Any = type("Communicates", (LabelledModule,), dict([COMMUNICATES[how]]))
    make_trainer(strategy()).validate(module(), loader_of(counts), verbose=False)


def _validate_twice() -> None:
    trainer = make_trainer(strategy())
    for _ in range(2):
        trainer.validate(GathersFirst(), [loader_of((4, 3)), loader_of((2, 3))], verbose=False)


@pytest.mark.every_case
@pytest.mark.parametrize("how", COMMUNICATES)
def test_communication_within_a_batch(pool2: RankPool, how: str) -> None:
    """Raises at once where a rank has ended; the other waits in its own last step, before the hook."""
    where, _ = COMMUNICATES[how]
    with pytest.raises(RankError, match=f"within {where}, but not on rank 1, whose data has ended"):
        pool2.run(_validate, how, (4, 3))
    assert pool2.run(_validate, how, (3, 3)) == [None, None]


def test_communication_before_any_rank_has_ended(pool2: RankPool) -> None:
    assert pool2.run(_validate_twice) == [None, None]


# --- Unequal loaders in training --------------------------------------------------------------------------------------


class Reloads(LabelledModule):
    def __init__(self, plan: list[tuple[int, int]]) -> None:
        super().__init__()
        self.plan = list(plan)
        self.fillers = 0

    def train_dataloader(self) -> DataLoader:
        return loader_of(self.plan.pop(0))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.fillers += self.trainer.strategy.is_filler
        return self(batch)


def _reload(plan: list[tuple[int, int]], ahead: bool) -> tuple[int, int, int]:
    module = Reloads(plan)
    trainer = make_trainer(
        strategy(uneven_inputs="pad", count_window_ahead=ahead),
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(module)
    return module.fillers, trainer.global_step, trainer.num_training_batches


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loader_that_is_equal_after_one_that_was_not(pool2: RankPool, ahead: bool) -> None:
    """It is padded no more, and its length is known."""
    assert pool2.run(_reload, [(2, 4), (3, 3)], ahead) == [(2, 7, 3), (0, 7, 3)]
    assert pool2.run(_reload, [(3, 3), (2, 4)], ahead) == [(2, 7, 4), (0, 7, 4)]


def _train_on_a_part(options: dict[str, Any], is_own: bool) -> tuple[int, float]:
    own = own_batches((6, 4))
    loader = DataLoader(own, batch_size=None, sampler=Estimating(len(own), len(own)) if is_own else None)
    trainer = make_trainer(strategy(uneven_inputs="pad"), **options)
    trainer.fit(LabelledModule(), loader, loader_of((1, 1)))
    return trainer.global_step, trainer.val_check_batch


@pytest.mark.parametrize(
    ("options", "part", "number"),
    [
        ({"limit_train_batches": 0.5}, (3, 3), {"limit_train_batches": 3}),
        ({"val_check_interval": 0.34}, (6, 2), {"val_check_interval": 2}),
    ],
)
def test_a_part_of_the_batches(
    pool2: RankPool, options: dict[str, Any], part: tuple[int, int], number: dict[str, Any]
) -> None:
    """Of a sampler of the user's, whose length may say nothing, a number is needed."""
    assert pool2.run(_train_on_a_part, options, False) == [part, part]
    with pytest.raises(
        RankError, match="a sampler or an __iter__ of yours, may end before its length: pass a"
    ):
        pool2.run(_train_on_a_part, options, True)
    assert [steps for steps, _ in pool2.run(_train_on_a_part, number, True)] == [part[0]] * 2


class GrowsBatches(Callback):
    """Sets another batch size for each later epoch, as a warm-up of batch sizes does."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.train_dataloader.batch_sampler.batch_size = 4


class Halves(BoringModel):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def _grow() -> tuple[int, list[float], bool]:
    grows = GrowsBatches()
    options = {"max_epochs": 3, "accumulate_grad_batches": 3, "use_distributed_sampler": True}
    trainer = make_trainer(strategy(per_token_loss=False), callbacks=[grows], **options)
    trainer.fit(Halves(), DataLoader(RandomDataset(32, 13), batch_size=1))
    return trainer.global_step, grows.rates, isinstance(trainer.train_dataloader, DataLoader)


def test_another_batch_size_in_later_epochs(pool2: RankPool) -> None:
    """Windows and schedules end with epochs that have another number of batches: 7 on one rank, then 2 on both."""
    assert pool2.run(_grow) == [(3 + 1 + 1, [0.1, 0.05, 0.025], True)] * 2


class Peeks(Callback):
    """Looks at the data on one rank, as callbacks do that log samples, and once goes through all of it."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            self.num_peeked = len(list(trainer.train_dataloader))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            next(iter(trainer.train_dataloader))


def _peek(counts: tuple[int, int], options: dict[str, Any]) -> tuple[int, int]:
    callback = Peeks()
    trainer = make_trainer(
        strategy(**options), callbacks=[callback], max_epochs=2, accumulate_grad_batches=2
    )
    trainer.fit(LabelledModule(), loader_of(counts, is_stream=True))
    assert len(list(trainer.train_dataloader)) == counts[dist.get_rank()]
    return trainer.global_step, getattr(callback, "num_peeked", 0)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "counts", "steps"),
    [({}, (3, 3), 4), ({"uneven_inputs": "pad"}, (3, 5), 6), ({"count_window_ahead": True}, (4, 4), 4)],
)
def test_user_code_that_draws_batches_on_one_rank(
    pool2: RankPool, options: dict[str, Any], counts: tuple[int, int], steps: int
) -> None:
    """It gets the loader's own batches; training draws its own, and ranks compare those alone."""
    assert pool2.run(_peek, counts, options) == [(steps, counts[0]), (steps, 0)]


def _seconds_drawing(**options: Any) -> float:
    """Runs on every rank."""
    seconds: list[float] = []
    keep = LambdaCallback(on_train_end=lambda trainer, _: seconds.append(trainer.strategy.seconds_drawing))
    trainer = make_trainer(strategy(**options), accumulate_grad_batches=4, callbacks=[keep])
    trainer.fit(LabelledModule(), loader())
    return seconds[0]


def test_seconds_drawing(pool2: RankPool) -> None:
    """Of the batches that are drawn ahead alone."""
    assert min(pool2.run(functools.partial(_seconds_drawing, count_window_ahead=True))) > 0
    assert pool2.run(_seconds_drawing) == [0, 0]
