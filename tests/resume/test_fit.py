"""A fit that is stopped and resumed equals one that never stopped, bit for bit, on Lightning's own loops."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch.utils._pytree import tree_map

from lightning_automodel.resume import fit
from tests.rank_pool import RankPool
from tests.resume.resuming import (
    DDP,
    FSDP2,
    Calm,
    Learner,
    Saver,
    Setting,
    compare,
    counting,
    differences,
    run,
    training_loader,
)

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
    parts = "at buffers extra_states flags generators loaders logged metrics own random seen"
    assert (state["format"], " ".join(sorted(state["ranks"][0]))) == (6, parts)
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
    resume: Any = SimpleNamespace(_can_resume=True, _trainer=trainer, _module=LightningModule())
    with pytest.raises(
        ValueError, match="has format 1, and this version of lightning_automodel knows format 6"
    ):
        fit.Resume.load(resume, {"format": 1}, {}, {}, 0)
