"""What modules keep beside their state dict comes back, all of one moment: that at which a resumed run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor, nn

from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.sharding.weight_averaging import averaged_models
from tests.checkpoint.checkpoints import FORMS, AdamModule, fit
from tests.rank_pool import RankError, RankPool
from tests.resume.resuming import (
    DDP,
    FSDP2,
    Learner,
    Saver,
    Setting,
    differences,
    make_trainer,
    run,
    training_loader,
)
from tests.trainer.exactness import TOLERANCE, full_weights, weight_error
from tests.trainer.runs import CASE

ENGINES: dict[str, dict[str, Any]] = {"fsdp2": FSDP2, "ddp": DDP}


def _new_value(kind: str) -> Tensor:
    """What two modules share from their first step on."""
    if kind == "sparse":
        return torch.ones(1, 1, dtype=torch.float64).to_sparse()
    if kind == "strides":
        return torch.ones(2, 3, dtype=torch.float64).T
    return torch.ones(2, dtype=torch.float32 if kind == "dtype" else torch.float64)


class Sharing(AdamModule):
    """One module writes a buffer, and the other reads it, which is one tensor or, of kind "apart", no longer.

    A buffer of the module itself has no value any more.
    """

    def __init__(self, kind: str, seed: int = CASE.seed) -> None:
        super().__init__(seed)
        self.kind = kind
        self.writer = nn.Module()
        self.reader = nn.Module()
        first = None if kind == "none" else torch.zeros(1, dtype=torch.float64)
        second = torch.zeros(1, dtype=torch.float64) if kind == "joined" else first
        for part, value in ((self.writer, first), (self.reader, second)):
            if kind == "late":
                part.kept = None
            else:
                part.register_buffer("kept", value, persistent=False)
        self.register_buffer("dropped", torch.ones((), dtype=torch.float64), persistent=False)
        self.has_begun = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.has_begun = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.has_begun:
            self.has_begun = True
            self.dropped = None
            if self.kind == "late":
                value = _new_value(self.kind)
                for part in (self.writer, self.reader):
                    del part.kept
                    part.register_buffer("kept", value, persistent=False)
            elif self.kind == "apart":
                self.reader.kept = self.reader.kept.clone()
            elif self.kind == "joined":
                self.reader.kept = self.writer.kept
            elif self.kind != "grown":
                self.writer.kept = self.reader.kept = _new_value(self.kind)
        if self.kind == "grown":
            self.writer.kept.data = torch.cat([self.writer.kept, self.writer.kept.new_ones(1)])
        elif self.kind == "sparse":
            self.writer.kept.add_(_new_value(self.kind))
        else:
            self.writer.kept += 1
        factor = 1 + self.reader.kept.sum().to_dense() / 10 + (0 if self.dropped is None else 1)
        return super().training_step(batch, batch_idx) * factor


def _stop_and_resume(options: dict[str, Any], kind: str, path: str) -> dict[str, Tensor]:
    fit(options, Sharing(kind))[0].save_checkpoint(path)
    module = Sharing(kind, CASE.seed + 2)
    fit(options, module, ckpt_path=path, max_epochs=2)
    assert "kept" in dict(module.writer.named_buffers())
    return full_weights(module.model)


def _never_stop(kind: str) -> dict[str, Tensor]:
    return full_weights(fit({}, Sharing(kind), max_epochs=2)[1].model)


@pytest.mark.each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["grown", "none", "late", "dtype", "strides", "sparse", "apart", "joined"])
def test_shared_buffers(pool2: RankPool, pool1: RankPool, kind: str, engine: str, tmp_path: Path) -> None:
    """Modules share after a resume what they shared when it was saved, whatever they share at set-up, and no more."""
    if (kind, engine) == ("sparse", "ddp"):
        pytest.skip("DDP does not broadcast sparse buffers")
    expected = pool1.run(_never_stop, kind)[0]
    for weights in pool2.run(_stop_and_resume, ENGINES[engine], kind, str(tmp_path / "a.ckpt")):
        assert weight_error(weights, expected) < TOLERANCE


class Replay(nn.Module):
    """Keeps what it has seen, outside of its tensors."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__()
        self.as_tensor = as_tensor
        self.seen: list[float] = []

    def get_extra_state(self) -> Any:
        return torch.tensor(self.seen) if self.as_tensor else {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state.tolist() if self.as_tensor else list(state["seen"])


class WithReplay(AdamModule):
    """What ranks see differs in the module of that number."""

    def __init__(self, differs: int | None = None) -> None:
        super().__init__()
        self.replays = nn.ModuleList([Replay(as_tensor=True), Replay(as_tensor=False)])
        self.differs = differs
        self.at_start: list[list[float]] = []

    def on_train_start(self) -> None:
        self.at_start = self.seen()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for number, replay in enumerate(self.replays):
            replay.seen.append(float(dist.get_rank()) if number == self.differs else 1.0)

    def seen(self) -> list[list[float]]:
        return [list(replay.seen) for replay in self.replays]


def _save_seen(options: dict[str, Any], path: str, differs: int | None = None) -> list[list[float]]:
    module = WithReplay(differs)
    trainer, _ = fit(options, module)
    trainer.save_checkpoint(path)
    return module.seen()


def _resume_seen(options: dict[str, Any], path: str) -> list[list[float]]:
    module = WithReplay()
    fit(options, module, ckpt_path=path, max_epochs=2)
    return module.at_start


@pytest.mark.every_case
@pytest.mark.parametrize(("form", "differs"), [("shards", 0), ("replicated", 1)])
def test_extra_states_that_differ_by_rank(pool2: RankPool, form: str, differs: int, tmp_path: Path) -> None:
    """Each rank would get rank 0's: refused at the save, on every rank."""
    with pytest.raises(
        RankError, match=rf"Extra states of modules .* replays\.{differs}\._extra_state is \d+ on rank 0"
    ):
        pool2.run(_save_seen, FORMS[form], str(tmp_path / "last.ckpt"), differs)
    assert not (tmp_path / "last.ckpt").exists()


def test_equal_extra_states_on_another_world_size(pool2: RankPool, pool1: RankPool, tmp_path: Path) -> None:
    """Of tensors too, whose pickles differ."""
    path = tmp_path / "last.ckpt"
    saved = pool2.run(_save_seen, FORMS["shards"], str(path))
    assert pool1.run(_resume_seen, FORMS["shards"], str(path)) == saved[:1]
    assert main(["consolidate", str(path), str(tmp_path / "whole.ckpt")]) == 0
    assert WithReplay.load_from_checkpoint(tmp_path / "whole.ckpt").seen() == saved[0]


# --- All of one moment ------------------------------------------------------------------------------------------------


def averaging() -> list[Callback]:
    return [EMAWeightAveraging(decay=0.7)]


def buffers_within_a_validation(path: Path) -> list[tuple[float, ...]]:
    """Runs on every rank: a buffer and its average after a validation, and in a fit that resumes from within it."""
    trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 2}
    setting = Setting(DDP, trainer, callbacks=averaging)
    noted = Notes()
    run(setting, noted, Saver("on_validation_batch_end", 1, path))
    again = Notes()
    run(setting, again, ckpt_path=path)
    return [noted.values[2], again.values[0]]


class Notes(Callback):
    """Notes this rank's running statistics, and their averages, before each batch."""

    def __init__(self) -> None:
        self.values: list[tuple[float, ...]] = []

    def on_train_batch_start(self, trainer: Trainer, module: Learner, *args: Any) -> None:
        averaged = next(iter(averaged_models(module))).module
        self.values.append(tuple(float(each.statistics.running_mean.sum()) for each in (module, averaged)))


def test_buffers_within_a_validation(pool2: RankPool, tmp_path: Path) -> None:
    """The module holds those of the average then, and the average those that are trained."""
    for calm, resumed in pool2.run(buffers_within_a_validation, tmp_path / "a.ckpt"):
        assert resumed == calm
        assert len(set(calm)) == 2


def batch_statistics(strategy: dict[str, Any], folder: Path) -> list[str]:
    """Runs on every rank: what a save between a forward and its backward, or within a window, changes in the fit."""
    trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 1}
    setting = Setting(strategy, {**trainer, "accumulate_grad_batches": 2}, callbacks=averaging)
    stops = (("on_before_zero_grad", 2), ("on_after_backward", 3), ("on_train_batch_end", 2))
    expected = run(setting)[1]
    savers = [Saver(hook, when, folder / hook) for hook, when in stops]
    saving = differences(expected, run(setting, *savers)[1])
    return saving + differences(expected, run(setting, seed=2, ckpt_path=savers[-1].path)[1])


@pytest.mark.parametrize("strategy", [FSDP2, DDP])
@pytest.mark.every_case
def test_each_rank_keeps_its_buffers(pool2: RankPool, strategy: dict[str, Any], tmp_path: Path) -> None:
    """All ranks save the first one's: what a forward has used waits unchanged for the backward.

    Buffers that are not saved are the first rank's where a window begins, also after a validation with
    averages.
    """
    for differing in pool2.run(batch_statistics, strategy, tmp_path):
        assert differing == []


def ended(hook: str, folder: Path) -> tuple[int, int]:
    """Runs on every rank: steps of a fit, and of one that goes on from what a hook saved after its last step."""
    setting = Setting(DDP, {"precision": "64-true", "limit_train_batches": 4, "max_steps": 3})
    path = folder / "ended.ckpt"
    saved = run(setting, Saver(hook, 3 if hook == "on_train_batch_end" else 1, path))[0]
    return saved.global_step, run(setting, ckpt_path=path)[0].global_step


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_end"])
@pytest.mark.every_case
def test_saved_after_the_last_step(pool2: RankPool, hook: str, tmp_path: Path) -> None:
    """As under Lightning, a fit without a step left does nothing."""
    for steps in pool2.run(ended, hook, tmp_path):
        assert steps == (3, 3)


class WithoutLoops(Learner):
    """Saves what a new run begins with."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["loops"], checkpoint["callbacks"]


def begins_anew(path: Path) -> tuple[int, int]:
    """Runs on every rank: steps of a fit, and the number at which one ends that loads what the first one saved."""
    trainer = {"precision": "64-true", "limit_val_batches": 0, "max_epochs": 1, "limit_train_batches": 4}
    setting = Setting(FSDP2, {**trainer, "accumulate_grad_batches": 2}, module=WithoutLoops)
    saving, _ = run(setting, Saver("on_train_batch_end", 3, path))
    again = make_trainer(setting, [])
    again.fit(
        Learner(), training_loader("own generator", dist.get_rank(), dist.get_world_size()), ckpt_path=path
    )
    return saving.global_step, again.global_step


def test_hook_that_drops_loops(pool2: RankPool, tmp_path: Path) -> None:
    """As in plain Lightning, such a checkpoint brings weights and optimizer states to a run that begins."""
    for saving, again in pool2.run(begins_anew, tmp_path / "stopped.ckpt"):
        assert (saving, again) == (2, 2)
