"""Whatever stops a fit, it goes on as if nothing had: an error, SIGTERM, a limit, a callback, dying ranks."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor
from torchmetrics import SumMetric

from tests.rank_pool import RankPool
from tests.resume.resuming import (
    DDP,
    FSDP2,
    Calm,
    Counts,
    Learner,
    Saver,
    Setting,
    Still,
    Stop,
    collate,
    compare,
    compare_stop,
    counting,
    differences_of_weights,
    disturb,
    make_trainer,
    run,
)
from tests.trainer.exactness import full_weights
from tests.trainer.runs import first_by_default

WINDOWS = {"precision": "64-true", "accumulate_grad_batches": 3, "val_check_interval": 2}


class Ends(Callback):
    """Ends the run in a hook, when it is called for the `when`-th time."""

    def __init__(self, hook: str, when: int, end: str) -> None:
        self.when = when
        self.end = end
        self.calls = 0
        setattr(self, hook, self._called)

    def _called(self, trainer: Trainer, *args: Any) -> None:
        self.calls += not trainer.sanity_checking
        if self.end == "SIGTERM" and self.calls > self.when:
            time.sleep(0.2)  # for the ranks to agree in time
        if self.calls != self.when or trainer.sanity_checking:
            return
        if self.end == "error":
            raise Stop
        if self.end == "SIGTERM" and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_by_signal(engine: dict[str, Any], when: int, folder: Path) -> list[str]:
    """Runs on every rank: what differs after SIGTERM came before batch `when`."""
    setting = Setting(engine, WINDOWS, callbacks=counting)
    saves = OnExceptionCheckpoint(folder, "stopped")
    ends = Ends("on_train_batch_start", when, "SIGTERM")
    return compare_stop(setting, setting, folder / "stopped.ckpt", ends, saves)


@pytest.mark.parametrize(("engine", "when"), [(FSDP2, 3), (DDP, 4)])
@pytest.mark.timeout(400)
def test_stopped(pool2: RankPool, engine: dict[str, Any], when: int, tmp_path: Path) -> None:
    for differing in pool2.run(stopped_by_signal, engine, when, tmp_path, timeout_s=300):
        assert differing == []


QUIET_RUN = {"module": Calm, "loader": "quiet distributed"}


def fail(engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs on every rank: the outcome of a fit, once another one has raised after a step."""
    setting = Setting(engine, WINDOWS, **QUIET_RUN)
    with pytest.raises(Stop):
        run(setting, Ends("on_train_batch_end", 3, "error"), OnExceptionCheckpoint(folder, "failed"))
    return run(setting)[1]


def go_on(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Runs on every rank: the outcome of the fit that goes on from `path`, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        outcome = run(Setting(DDP, WINDOWS, **QUIET_RUN), seed=2, ckpt_path=path)[1]
    return outcome, [str(warning.message) for warning in caught]


def test_after_an_error(pool2: RankPool, tmp_path: Path) -> None:
    """Under DDP rank 0 saves alone: the weights go on, and the run says what does not. No shards are saved."""
    expected = pool2.run(fail, DDP, tmp_path)
    told: list[str] = []
    for undisturbed, (resumed, said) in zip(
        expected, pool2.run(go_on, tmp_path / "failed.ckpt"), strict=True
    ):
        assert differences_of_weights(undisturbed, resumed) == []
        told += said
    assert any(text.startswith("The checkpoint holds the states of 1 ranks") for text in told)
    pool2.run(fail, FSDP2, tmp_path / "sharded")
    assert not list(tmp_path.glob("sharded/*"))


def limited(limit: dict[str, Any], folder: Path) -> list[str]:
    """Runs on every rank: what differs where a limit was reached, and the fit goes on without it."""
    path = folder / "stopped.ckpt"
    setting = Setting(FSDP2, WINDOWS)
    if "max_time" in limit:  # which causes a validation more, that uses random numbers
        setting = replace(setting, module=Calm, loader="quiet own generator")
        run(replace(setting, trainer={**WINDOWS, **limit}))[0].save_checkpoint(path)
        return differences_of_weights(run(setting)[1], run(setting, seed=2, ckpt_path=path)[1])
    found = compare_stop(setting, replace(setting, trainer={**WINDOWS, **limit}), path)
    # Lightning has reset the metrics of the epoch when fit ended within it.
    return [differing for differing in found if not differing.startswith("metrics:")]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "limit", [{"max_steps": 2}, {"max_epochs": 1}, {"max_steps": 4}, {"max_time": {"seconds": 0}}], ids=str
)
@pytest.mark.timeout(400)
def test_saved_after_fit(pool2: RankPool, limit: dict[str, Any], tmp_path: Path) -> None:
    """At an early end within an epoch, the rest of it is trained when more is allowed."""
    for differing in pool2.run(limited, limit, tmp_path, timeout_s=300):
        assert differing == []


class ByHand(Learner):
    """Accumulates two batches by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        output = super().training_step(batch, batch_idx)
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(output["loss"], num_label_tokens=output["num_label_tokens"])
            if batch_idx % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()


class Counting(ModelCheckpoint):
    """Counts its calls in a hook of its class, and in one of the instance."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.of_class = self.of_instance = 0
        hook = self.on_train_batch_end

        def counts_too(*args: Any) -> None:
            self.of_instance += 1
            hook(*args)

        self.on_train_batch_end = counts_too

    def on_train_batch_end(self, *args: Any) -> None:
        self.of_class += 1
        super().on_train_batch_end(*args)


def saved_by_own_hooks(folder: Path) -> tuple[int, int, list[str]]:
    """Runs on every rank: how often hooks of a checkpoint callback were called, and what it has saved."""
    callback = Counting(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    run(Setting(DDP, {"max_epochs": 1, "limit_train_batches": 6}), callback)
    return callback.of_class, callback.of_instance, sorted(path.name for path in folder.iterdir())


def test_hooks_of_an_instance(pool1: RankPool, tmp_path: Path) -> None:
    """A checkpoint callback's own hook is called with each batch, whether its class has it or the instance."""
    assert pool1.run(saved_by_own_hooks, tmp_path) == [(6, 6, ["step=3.ckpt", "step=6.ckpt"])]


class WithBackbone(Learner):
    """Parameters of it are unfrozen in a group of their own."""

    @property
    def backbone(self) -> torch.nn.Module:
        return self.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


class OwnFinetuning(BackboneFinetuning):
    """A user's, whose hooks are called once in a fit, whether it is resumed or not."""

    num_starts = 0

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        super().on_fit_start(trainer, module)
        self.num_starts += 1
        assert self.num_starts == 1


def finetuning() -> list[Callback]:
    return [OwnFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01)]


class Keeping(Learner):
    """Keeps metrics that are not logged themselves, one of them no submodule."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.newest = SumMetric()
        self.held = {"train": [SumMetric()]}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        output = super().training_step(batch, batch_idx)
        for name, metric in {"newest": self.newest, "held": self.held["train"][0]}.items():
            metric.update(output["loss"].detach())
            self.log(name, metric.compute())
        return output


class Totals(Callback):
    """Counts in a metric of its own."""

    def __init__(self) -> None:
        self.totals = {"train": SumMetric()}

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        self.totals["train"].update(1)
        self.log("batches so far", self.totals["train"].compute())


def totals() -> list[Callback]:
    return [Totals()]


class OneCycle(Learner):
    """Its schedule is made from the number of steps, for which set-up loads the data before the checkpoint is read."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def early_stopping() -> list[Callback]:
    return [EarlyStopping("val_loss", patience=1), WeightAveraging()]


DOUBLE = {"precision": "64-true"}
TWO = {"accumulate_grad_batches": 2}
PLATEAU = {"schedule": "plateau"}


FOURTH = ("on_train_batch_end", 4)
LIMITED = {"max_epochs": 3, "max_steps": 20, **TWO}
CASES = (
    (Setting(FSDP2, DOUBLE, module=ByHand), [("on_train_batch_end", 2)]),
    (Setting(FSDP2, TWO, module=OneCycle, loader="distributed", callbacks=totals), [FOURTH]),
    (
        Setting(FSDP2, {**DOUBLE, "max_epochs": 3}, module=WithBackbone, callbacks=finetuning),
        [("on_train_batch_end", 10), ("on_validation_end", 2)],
    ),
    (Setting(DDP, DOUBLE, module=Keeping), [FOURTH]),
    (Setting(DDP, DOUBLE, module=ByHand), [FOURTH]),  # DDP leaves each rank its own statistics
    (
        Setting(FSDP2, {"max_epochs": 5}, PLATEAU, callbacks=early_stopping),
        [FOURTH, ("on_validation_end", 1)],
    ),
    (Setting(DDP, LIMITED, module=OneCycle, loader="stateful stream"), [FOURTH, ("on_train_epoch_end", 2)]),
)


@pytest.mark.parametrize(("setting", "stops"), first_by_default(CASES, 2))
@pytest.mark.every_case
@pytest.mark.timeout(400)
def test_with(pool2: RankPool, setting: Setting, stops: Any, tmp_path: Path) -> None:
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []


def fit_ragged(accumulate: int, path: Path, saves: bool) -> tuple[int, dict[str, Tensor]]:
    """Runs on every rank: validations of two epochs, the first of which others may have trained; and weights."""
    disturb(torch.distributed.get_rank())
    trainer_options = {**DOUBLE, "accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0}
    counts = Counts()
    savers = [Saver("on_train_batch_end", 4, path)] if saves else []
    trainer = make_trainer(Setting(FSDP2, trainer_options, loader="distributed"), [counts, *savers])
    learner = Calm(optimizer="sgd")
    rows, others = (torch.utils.data.Subset(Still(), range(size)) for size in (13, 4))
    loaders = [
        torch.utils.data.DataLoader(each, batch_size=2, collate_fn=collate) for each in (rows, others)
    ]
    trainer.fit(learner, *loaders, ckpt_path=None if saves else path)
    return counts.counts["validations"], full_weights(learner)


def test_validates_on_other_ranks(pool2: RankPool, pool1: RankPool, tmp_path: Path) -> None:
    """Saved with the last of four ragged batches, of which one process has seven: its validation is still due."""
    path = tmp_path / "shared.ckpt"
    validations, expected = pool2.run(fit_ragged, 2, path, True)[0]
    ((resumed, found),) = pool1.run(fit_ragged, 4, path, False)
    assert resumed == validations == 2
    assert max(float((found[name] - weight).abs().max()) for name, weight in expected.items()) < 1e-12


def averaging() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)]


def resume_averaging(path: Path) -> None:
    """Runs on one rank: a fit that resumes where weights were averaged."""
    setting = Setting(DDP, {**DOUBLE, "max_epochs": 3}, callbacks=averaging)
    run(setting, Saver("on_train_batch_end", 3, path))
    told = "^StochasticWeightAveraging had begun to average when the checkpoint was written"
    with pytest.raises(ValueError, match=told):
        run(setting, ckpt_path=path)


def test_averaging_is_refused(pool1: RankPool, tmp_path: Path) -> None:
    """Its schedule would be missing: Lightning loads it after it was needed."""
    pool1.run(resume_averaging, tmp_path / "stopped.ckpt", timeout_s=120)
