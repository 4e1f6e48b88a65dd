"""A fit that is stopped, whatever stops it, and resumed equals one that never stopped, bit for bit."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from torch import Tensor
from torch.utils._pytree import tree_map
from torchmetrics import SumMetric

from lightning_automodel.resume import fit
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
    differences,
    differences_of_weights,
    disturb,
    make_trainer,
    run,
    training_loader,
)
from tests.trainer.exactness import full_weights
from tests.trainer.runs import first_by_default

DOUBLE = {"precision": "64-true"}
WINDOWS = {"precision": "32-true", "accumulate_grad_batches": 3, "val_check_interval": 2}

USUAL = (("on_train_batch_end", 6), ("on_validation_end", 3), ("on_train_epoch_end", 1))
REPEATED = (
    ("on_before_optimizer_step", 2),
    ("on_train_batch_start", 5),
    ("on_train_batch_end", 2),
    ("on_after_backward", 7),
    ("on_validation_batch_end", 2),
    ("on_validation_end", 1),
)
SOMEWHERE = (("on_train_batch_end", 4), ("on_validation_end", 1), ("on_train_epoch_end", 1))


@pytest.mark.parametrize(
    ("setting", "stops"),
    [
        (
            Setting(FSDP2, WINDOWS, {"schedule": "plateau"}, loader="global generator", callbacks=counting),
            USUAL,
        ),
        (Setting(FSDP2, WINDOWS, module=Calm, loader="quiet own generator"), REPEATED),
        *(
            (Setting(engine, {"precision": precision}, learner), SOMEWHERE)
            # AdamW's epsilon is zero in float16: its weights would be NaN.
            for precision, learner in (
                ("bf16-mixed", {}),
                ("bf16-true", {}),
                ("16-true", {"optimizer": "sgd"}),
            )
            for engine in (FSDP2, DDP)
            if (engine, precision) != (DDP, "bf16-true")
        ),
    ],
    ids=lambda value: value.strategy["data_parallel"] if isinstance(value, Setting) else "",
)
@pytest.mark.timeout(400)
def test_from_everywhere(pool2: RankPool, setting: Setting, stops: Any, tmp_path: Path) -> None:
    """Within a window, which is repeated, or after it, before a validation or in the midst of it.

    The search draws hooks, loaders and callbacks in double precision.
    """
    for differing in pool2.run(compare, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []


@pytest.mark.sweep
@pytest.mark.parametrize(
    "setting",
    [
        Setting({**DDP, "ddp_kwargs": {"find_unused_parameters": True}}, DOUBLE),
        Setting({"data_parallel_replicate_size": 2}, WINDOWS),
        Setting({"tensor_parallel_size": 2}, DOUBLE, {"tensor_parallel": True, "optimizer": "sgd"}),
    ],
    ids=["ddp", "replicas", "tensor parallel"],
)
@pytest.mark.timeout(400)
def test_layouts_of_four_ranks(pool4: RankPool, setting: Setting, tmp_path: Path) -> None:
    stops = (("on_train_batch_end", 3), *SOMEWHERE[2:])
    for differing in pool4.run(compare, setting, tmp_path, *stops, timeout_s=300):
        assert differing == []


# --- On one rank ------------------------------------------------------------------------------------------------------


class Taught(Learner):
    """Keeps an average of its head where Lightning saves before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("teacher", torch.zeros(()))

    def on_train_batch_end(self, *args: Any) -> None:
        self.teacher.mul_(0.5).add_(self.trainer.global_step)


def save_plainly(folder: Path) -> Any:
    """Runs on one rank: what a checkpoint holds, the files that callbacks wrote, and what differs from `last`."""
    os.environ["PL_GLOBAL_SEED"] = "5"
    setting = Setting(DDP, WINDOWS, loader="distributed", module=Taught)
    steps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    expected = run(setting, steps)[1]
    os.environ["PL_GLOBAL_SEED"] = "7"
    found = differences(expected, run(setting, seed=2, ckpt_path=folder / "step=2.ckpt")[1])
    state = torch.load(folder / "step=2.ckpt", weights_only=True)["lightning_automodel"]
    return state, found, (folder / "last.ckpt").exists()


def test_checkpoint_callback_and_other_seed(pool1: RankPool, tmp_path: Path) -> None:
    """One state a rank, all of it loadable with `weights_only`; the seed of the order is that of the saving run."""
    state, found, has_last = pool1.run(save_plainly, tmp_path, timeout_s=120)[0]
    assert list(state) == ["format", "sizes", "ranks"]
    # A part that an older checkpoint lacks is a new FORMAT: else resuming from one ends in a KeyError.
    parts = "at buffers flags generators loaders logged metrics own random seen"
    assert (state["format"], " ".join(sorted(state["ranks"][0]))) == (7, parts)
    assert sorted(state["ranks"][0]["own"]) == ["last_step", "range_scale"]
    assert [(rank["at"]["stage"], rank["at"]["batches"]) for rank in state["ranks"]] == [("step", 6)]
    assert found == []
    assert has_last


class Hooked(Learner):
    """A hook of its sees gradients that are not yet those of the window's mean."""

    def on_train_start(self) -> None:
        self.head.register_full_backward_hook(lambda *_: None)


def resume_with_a_hook(path: Path) -> list[str]:
    """Runs on one rank: what a resumed run warns of hooks."""
    run(Setting(DDP), Saver("on_train_batch_end", 2, path))
    with warnings.catch_warnings(record=True) as caught:
        run(Setting(DDP, module=Hooked), seed=2, ckpt_path=path)
    return [str(each.message) for each in caught if "have backward hooks" in str(each.message)]


def test_a_resumed_run_looks_at_its_first_window(pool1: RankPool, tmp_path: Path) -> None:
    """The report on the last step comes from the checkpoint, and does not pass for a window of this run."""
    (warned,) = pool1.run(resume_with_a_hook, tmp_path / "saved.ckpt")
    assert len(warned) == 1


class OwnState(Callback):
    """Notes what the strategy would save of itself, as a fit starts and before each of its batches."""

    def on_fit_start(self, trainer: Trainer, *args: Any) -> None:
        self.states = [trainer.strategy._run.state()]

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.states.append(trainer.strategy._run.state())


def resume_own_state(folder: Path) -> tuple[dict[str, Any], ...]:
    """Runs on one rank: the strategy's own state before a checkpoint is taken up, in it, and after that."""
    setting = Setting(DDP, {"precision": "16-true", "max_epochs": 1}, {"optimizer": "sgd"})
    path = folder / "a.ckpt"
    run(setting, Saver("on_train_batch_end", 2, path))
    run(setting, noted := OwnState(), ckpt_path=path)
    saved = torch.load(path, weights_only=True)["lightning_automodel"]["ranks"][0]["own"]
    return noted.states[0], saved, noted.states[1]


def test_own_state_comes_back(pool1: RankPool, tmp_path: Path) -> None:
    """Every part of it, each of which a fresh run has otherwise: most comparisons above only see where fits end."""
    fresh, saved, resumed = (
        tree_map(str, each) for each in pool1.run(resume_own_state, tmp_path, timeout_s=120)[0]
    )
    assert resumed == saved
    assert [name for name in saved if fresh[name] == saved[name]] == []


class Raises(Learner):
    """Its fourth step raises, once."""

    number = 0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        self.number += 1
        if self.number == 4:
            raise Stop
        return super().training_step(batch, batch_idx)


def resume_what_has_raised(path: Path) -> list[str]:
    """Runs on one rank: what differs where a module whose step has raised goes on in the same process."""
    setting = Setting(DDP, DOUBLE, module=cache(Raises))  # one object for both runs
    with pytest.raises(Stop):
        run(setting, Saver("on_train_batch_end", 2, path))
    return differences(run(replace(setting, module=Learner))[1], run(setting, seed=2, ckpt_path=path)[1])


def test_a_module_whose_step_has_raised(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(resume_what_has_raised, tmp_path / "saved.ckpt") == [[]]


def resume_with_used_up_timer(folder: Path) -> int:
    """Runs on one rank: steps of a fit whose timer was used up before."""
    path = folder / "stopped.ckpt"
    run(Setting(DDP, callbacks=lambda: [Timer("00:01:00:00")]), Saver("on_train_batch_end", 2, path))
    return run(Setting(DDP, callbacks=lambda: [Timer({"microseconds": 1})]), ckpt_path=path)[0].global_step


def test_used_up_timer(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(resume_with_used_up_timer, tmp_path, timeout_s=120) == [2]


def save_after_validating(folder: Path) -> list[str]:
    """Runs on one rank: where a fit would go on by a checkpoint that is saved after it, and after a validation."""
    trainer = run(Setting(DDP, {"max_epochs": 1}))[0]
    found = []
    for path in (folder / "ended.ckpt", folder / "validated.ckpt"):
        trainer.save_checkpoint(path)
        found.append(str(torch.load(path, weights_only=True)["lightning_automodel"]))
        trainer.validate(trainer.lightning_module, training_loader("own generator", 0, 1), verbose=False)
    return found


def test_saved_after_a_later_validation(pool1: RankPool, tmp_path: Path) -> None:
    """No fit is there any more, but where it has ended."""
    ended, validated = pool1.run(save_after_validating, tmp_path, timeout_s=120)[0]
    assert ended == validated
    assert "random" in ended


def test_another_format_is_refused() -> None:
    trainer = SimpleNamespace(callbacks=[])
    resume: Any = SimpleNamespace(_trainer=trainer, _module=LightningModule())
    with pytest.raises(
        ValueError, match="has format 1, and this version of lightning_automodel knows format 7"
    ):
        fit.Resume.load(resume, {"format": 1}, {}, {})


# --- Whatever stops a fit: an error, SIGTERM, a limit, a callback, dying ranks ----------------------------------------


DOUBLE_WINDOWS = {"precision": "64-true", "accumulate_grad_batches": 3, "val_check_interval": 2}


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
    setting = Setting(engine, DOUBLE_WINDOWS, callbacks=counting)
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
    setting = Setting(engine, DOUBLE_WINDOWS, **QUIET_RUN)
    with pytest.raises(Stop):
        run(setting, Ends("on_train_batch_end", 3, "error"), OnExceptionCheckpoint(folder, "failed"))
    return run(setting)[1]


def go_on(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Runs on every rank: the outcome of the fit that goes on from `path`, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        outcome = run(Setting(DDP, DOUBLE_WINDOWS, **QUIET_RUN), seed=2, ckpt_path=path)[1]
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
    setting = Setting(FSDP2, DOUBLE_WINDOWS)
    if "max_time" in limit:  # which causes a validation more, that uses random numbers
        setting = replace(setting, module=Calm, loader="quiet own generator")
        run(replace(setting, trainer={**DOUBLE_WINDOWS, **limit}))[0].save_checkpoint(path)
        return differences_of_weights(run(setting)[1], run(setting, seed=2, ckpt_path=path)[1])
    found = compare_stop(setting, replace(setting, trainer={**DOUBLE_WINDOWS, **limit}), path)
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


def saved_by_own_hook(folder: Path) -> tuple[int, list[str]]:
    """Runs on every rank: how often the own hook of a checkpoint callback was called, and what it has saved."""
    callback = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    callback.on_train_batch_end = hook = Mock(wraps=callback.on_train_batch_end)
    run(Setting(DDP, {"max_epochs": 1, "limit_train_batches": 6}), callback)
    return hook.call_count, sorted(path.name for path in folder.iterdir())


def test_hook_of_an_instance(pool1: RankPool, tmp_path: Path) -> None:
    """It is called with each batch, as what a class has."""
    assert pool1.run(saved_by_own_hook, tmp_path) == [(6, ["step=3.ckpt", "step=6.ckpt"])]


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


TWO = {"accumulate_grad_batches": 2}


FOURTH = ("on_train_batch_end", 4)
CASES = (
    (Setting(FSDP2, DOUBLE, module=ByHand), [("on_train_batch_end", 2)]),
    (Setting(FSDP2, TWO, module=OneCycle, loader="distributed", callbacks=totals), [FOURTH]),
    (
        Setting(FSDP2, {**DOUBLE, "max_epochs": 3}, module=WithBackbone, callbacks=finetuning),
        [("on_train_batch_end", 10), ("on_validation_end", 2)],
    ),
    (Setting(DDP, DOUBLE, module=ByHand), [FOURTH]),  # DDP leaves each rank its own statistics
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
