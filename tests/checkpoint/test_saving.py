"""A save happens whole or not at all: failures on one rank, in the background, kills, and what is removed when."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from pytest_mock import MockerFixture
from torch import Tensor

from lightning_automodel.checkpoint import CheckpointError, paths, shard_directory, single_file
from lightning_automodel.checkpoint.saving import CheckpointSaver
from lightning_automodel.checkpoint.shard_directory import ShardDirectory
from lightning_automodel.checkpoint.single_file import load_file
from lightning_automodel.options import StrategyOptions
from tests.checkpoint.checkpoints import (
    ACCUMULATE,
    FORMS,
    NUM_BATCHES,
    AdamModule,
    Saves,
    assert_equal,
    batches,
    fit,
    forms,
    leftovers,
    load_only,
    no_space_for_files,
    save,
)
from tests.processes import forked
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.plain import train_model_plainly
from tests.trainer.runs import CASE

PATIENCE_S = 60


def _fail_to_save(
    options: dict[str, Any], path: str, failing: int
) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Save, train on, fail to save again at the same place; the message, the weights saved first and those loaded."""
    trainer, module = fit(options)
    trainer.save_checkpoint(path)
    saved = full_weights(module.model)
    fit(options, module)
    with pytest.raises(CheckpointError) as raised:  # noqa: SIM117
        with no_space_for_files(1500) if dist.get_rank() == failing else nullcontext():
            trainer.save_checkpoint(path)
    return str(raised.value), saved, load_only(options, path)


@pytest.mark.parametrize(("form", "failing"), [("shards", 1), *((form, 0) for form in FORMS)])
def test_full_disk(pool2: RankPool, tmp_path: Path, form: str, failing: int) -> None:
    """On one rank: an error on every rank that names it, and the older checkpoint is whole."""
    path = tmp_path / "last.ckpt"
    for message, saved, found in pool2.run(_fail_to_save, FORMS[form], str(path), failing):
        assert message.startswith(f"Cannot save {path}: rank {failing}: OSError: [Errno 27] File too large")
        assert_equal([found], saved)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


class SavesEachStep(Callback):
    """Saves after each optimizer step, keeps the weights of that time, and tells when a later step was taken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights: dict[str, dict[str, Tensor]] = {}
        self.went_on = threading.Event()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            if self.weights:
                self.went_on.set()  # after a step that the first save must not see
            path = str(self.folder / f"step={trainer.global_step}.ckpt")
            self.weights[path] = full_weights(trainer.lightning_module.model)
            trainer.save_checkpoint(path)


@contextmanager
def before_writing(act: Callable[[], None]) -> Iterator[None]:
    """What a save does before it writes the data of a directory, or a file."""

    def acting(write: Callable[..., Any]) -> Callable[..., Any]:
        def act_and_write(*args: Any) -> Any:
            act()
            return write(*args)

        return act_and_write

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((shard_directory.ShardWriter, "write_data"), (single_file, "save_file")):
            patch.setattr(owner, name, acting(getattr(owner, name)))
        yield


def _save_while_training(
    options: dict[str, Any], folder: str
) -> tuple[dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]], list[Any]]:
    """Weights when a save began and those that it holds, by path; the first save waits for a later step.

    And the threads that are left.
    """
    recorder = SavesEachStep(Path(folder))

    def wait() -> None:
        assert recorder.went_on.wait(PATIENCE_S), "training does not go on"

    with before_writing(wait):
        fit({**options, "async_checkpoint": True}, callbacks=[recorder], max_epochs=2)
    left = [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name.lower()]
    saved = {path: (weights, load_only(options, path)) for path, weights in recorder.weights.items()}
    return saved, left


@pytest.mark.parametrize("form", forms("shards", "replicated"))
def test_training_goes_on_while_a_checkpoint_is_written(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """It holds what the weights were when the save began; the last one is on disk when `fit` returns."""
    for saved, left in pool2.run(_save_while_training, FORMS[form], str(tmp_path)):
        assert left == []
        assert len(saved) == 4
        for weights, found in saved.values():
            assert_equal([found], weights)
        first = next(iter(saved.values()))[0]
        last = list(saved.values())[-1][0]
        assert any(not torch.equal(first[name], last[name]) for name in first)
    assert leftovers(tmp_path) == []


class SavesOnce(Callback):
    """After the second optimizer step, and counts the micro-batches from then on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.batches_after = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches_after += trainer.global_step >= 2
        if self.batches_after == 1:
            trainer.save_checkpoint(self.path)
            trainer.strategy._saver.wait_for_pending_save()  # else one rank may know a step before the other


def _no_space() -> None:
    raise OSError(28, "No space left on device")


def _fail_in_background(options: dict[str, Any], path: str, epochs: int) -> tuple[str, int]:
    callback = SavesOnce(path)
    fails = dist.get_rank() == 1 or "data_parallel" in options  # files are rank 0's
    with before_writing(_no_space) if fails else nullcontext(), pytest.raises(RuntimeError) as raised:
        fit({**options, "async_checkpoint": True}, callbacks=[callback], max_epochs=epochs)
    return str(raised.value), callback.batches_after


@pytest.mark.each_value
@pytest.mark.parametrize("epochs", [500, 1], ids=["in a step", "of the last save"])
@pytest.mark.parametrize("form", ["shards", "replicated"])
def test_failure_in_the_background(pool2: RankPool, tmp_path: Path, form: str, epochs: int) -> None:
    """Is raised in one of the next steps, or by `fit`, on every rank, and the older checkpoint is whole."""
    path = str(tmp_path / "last.ckpt")
    saved = pool2.run(save, FORMS[form], path)[0]
    for message, batches_after in pool2.run(_fail_in_background, FORMS[form], path, epochs):
        assert "No space left on device" in message
        assert path in message
        assert batches_after == 1
    assert_equal(pool2.run(load_only, FORMS[form], path), saved)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def _keep_the_newest(
    options: dict[str, Any], folder: str, save_last: Any
) -> tuple[str, str, list[tuple[int, int]]]:
    """Best and last path, and how many checkpoints were there whenever one was about to be replaced."""
    seen: list[tuple[int, int]] = []
    replace = paths.replace

    def count(staging: Path, target: Path) -> None:
        whole = [path for path in Path(folder).glob("epoch*.ckpt") if path.exists()]
        dangling = [path for path in Path(folder).iterdir() if path.is_symlink() and not path.exists()]
        seen.append((len(whole), len(dangling)))
        replace(staging, target)

    callback = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=save_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "replace", count)
        fit(options, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    return callback.best_model_path, callback.last_model_path, seen


@pytest.mark.parametrize(
    ("form", "save_last", "in_background"),
    [
        ("shards", "link", True),
        ("shards", None, False),
        ("replicated", True, True),
        ("replicated", "link", False),
    ],
)
def test_the_newest_is_kept_until_a_newer_one_is_there(
    pool2: RankPool, tmp_path: Path, form: str, save_last: Any, in_background: bool
) -> None:
    """`ModelCheckpoint` keeps one: it is removed after the next was there, and a link to the last never dangles."""
    options = {**FORMS[form], "async_checkpoint": in_background}
    results = pool2.run(_keep_the_newest, options, str(tmp_path), save_last)
    best, last, seen = results[0]
    assert len(seen) >= 6
    assert all(whole >= 1 for whole, _ in seen[1:]), "there was no checkpoint for a moment"
    assert all(dangling == 0 for _, dangling in seen)
    kept = [path for path in tmp_path.iterdir() if path.name.startswith("epoch")]
    assert [str(path) for path in kept] == [best]
    if save_last is not None:
        assert Path(last).exists()
        assert Path(last).is_symlink() == (save_last == "link")
    assert leftovers(tmp_path) == []


def _two_callbacks(options: dict[str, Any], folder: str) -> list[str]:
    """Both keep one, in the same directory, under the same names."""
    callbacks = [ModelCheckpoint(dirpath=folder, every_n_train_steps=number) for number in (1, 2)]
    fit(options, callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
    return [callback.best_model_path for callback in callbacks]


@pytest.mark.sweep
@pytest.mark.parametrize(("form", "in_background"), [("shards", True), ("replicated", False)])
def test_two_callbacks_do_not_share_a_file(
    pool2: RankPool, tmp_path: Path, form: str, in_background: bool
) -> None:
    """Else one removes what is the best of the other."""
    for first, second in pool2.run(
        _two_callbacks, {**FORMS[form], "async_checkpoint": in_background}, str(tmp_path)
    ):
        assert sorted(str(path) for path in tmp_path.iterdir()) == sorted({first, second})
        assert first != second


def _save_on_one_rank(options: dict[str, Any], path: str) -> None:
    """The mistake that other strategies forgive."""
    callbacks = [Saves("on_train_batch_end", ACCUMULATE, path)] if dist.get_rank() == 0 else []
    fit({**options, "timeout": timedelta(seconds=2)}, callbacks=callbacks, max_epochs=2)


@pytest.mark.parametrize("form", ["shards", "replicated"])
def test_saving_on_one_rank_is_told(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """After the timeout, on both; the process used to be aborted where two different collectives met."""
    with pytest.raises(RankError) as raised:
        pool2.run(_save_on_one_rank, FORMS[form], str(tmp_path / "last.ckpt"))
    text = "".join(raised.value.failures.values())
    # Which rank notices first decides whether the barrier, or the connection that it closed, is named.
    assert any(
        what in text for what in ("('save_checkpoint') for ranks 1:", "pair closure", "closed by peer")
    )
    assert list(tmp_path.iterdir()) == []


def _remove_afterwards(options: dict[str, Any], path: str) -> bool:
    trainer, _ = fit(options)
    trainer.save_checkpoint(path)
    trainer.strategy.remove_checkpoint(path)
    trainer.strategy.barrier()
    return Path(path).exists()


@pytest.mark.parametrize("form", ["shards", "replicated"])
def test_removing_after_a_run(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """No step follows to wait for."""
    assert pool2.run(_remove_afterwards, FORMS[form], str(tmp_path / "last.ckpt")) == [False] * 2


class Removes(Saves):
    """And then removes what nobody can."""

    def _called(self, trainer: Trainer, *args: Any) -> None:
        super()._called(trainer)
        if self.when == 0:
            trainer.strategy.remove_checkpoint("/proc/version")


def _fail_to_remove(options: dict[str, Any], path: str, at_step: int) -> None:
    fit(options, callbacks=[Removes("on_train_batch_end", ACCUMULATE * at_step, path)], max_epochs=2)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("form", "in_background", "at_step"), [("shards", False, 4), ("replicated", True, 1)]
)
def test_a_removal_that_fails(
    pool2: RankPool, tmp_path: Path, form: str, in_background: bool, at_step: int
) -> None:
    """On rank 0, in the next step or at the end: both ranks end with the cause, and the new checkpoint is whole."""
    path = str(tmp_path / "last.ckpt")
    options = {**FORMS[form], "async_checkpoint": in_background}
    with pytest.raises(RankError) as raised:
        pool2.run(_fail_to_remove, options, path, at_step)
    failures = raised.value.failures
    cause = "Cannot remove an older checkpoint, or link to the new one: rank 0: PermissionError:"
    assert sorted(failures) == [0, 1]
    assert f"CheckpointError: {cause}" in failures[0].splitlines()[-1]
    assert "RankFailedError: rank 0" in failures[1].splitlines()[-1]
    assert cause in failures[1].splitlines()[-1]
    pool2.run(load_only, FORMS[form], path)


def test_saving_alone_makes_directories(tmp_path: Path) -> None:
    """After a failure, a replicated model can be saved where nothing was saved before."""
    saver = CheckpointSaver(StrategyOptions(data_parallel="ddp", save_distributed_checkpoint=False))
    saver.save_alone({"state_dict": {}}, tmp_path / "new" / "last.ckpt")
    assert (tmp_path / "new" / "last.ckpt").exists()


class NoOptimizer(AdamModule):
    """Trains nothing, as a run that gathers statistics does."""

    def configure_optimizers(self) -> None:
        return None


def _go_on_without_optimizer(options: dict[str, Any], other: dict[str, Any], path: str) -> int:
    fit(options, NoOptimizer())[0].save_checkpoint(path)
    trainer, module = fit(other, NoOptimizer(), ckpt_path=path, max_epochs=2)
    assert weight_error(full_weights(module.model), full_weights(NoOptimizer().model)) == 0
    return trainer.current_epoch


@pytest.mark.parametrize(("form", "other"), [("shards", "shards"), ("replicated", "shards")])
def test_no_optimizer(pool2: RankPool, tmp_path: Path, form: str, other: str) -> None:
    """`configure_optimizers` that returns None: saved, and resumed from."""
    path = str(tmp_path / "run.ckpt")
    assert pool2.run(_go_on_without_optimizer, FORMS[form], FORMS[other], path) == [2, 2]


# --- SIGKILL at a random moment: all checkpoints in sight are whole ---------------------------------------------------


KILLED: dict[str, dict[str, Any]] = {
    "shards": {},
    "shards_in_background": {"async_checkpoint": True},
    "replicated": {"data_parallel": "ddp"},
    "replicated_in_background": {"data_parallel": "ddp", "async_checkpoint": True},
}
NUM_STEPS = 400


def _train_until_killed(rank: int, options: dict[str, Any], save_last: Any, folder: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    callback = ModelCheckpoint(dirpath=f"{folder}/saved", every_n_train_steps=1, save_last=save_last)
    fit(
        {**options, "timeout": 0.1},
        callbacks=[callback],
        enable_checkpointing=True,
        max_epochs=-1,
        max_steps=NUM_STEPS,
    )


def run_and_kill(seed: int, options: dict[str, Any], folder: Path) -> None:
    """Train on two ranks until a checkpoint is complete; a random time later kill one or both, and wait for the end."""
    generator = random.Random(seed)
    save_last = generator.choice([True, "link"])
    victims = generator.choice([(0,), (1,), (0, 1)])
    delay_s = generator.uniform(0, 1.5)
    (folder / "saved").mkdir()
    ranks = [
        forked().Process(
            target=_train_until_killed, args=(rank, options, save_last, str(folder)), daemon=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120
    while not whole_names(folder / "saved"):
        assert time.monotonic() < deadline, "no checkpoint came"
        assert all(process.is_alive() for process in ranks), "a rank ended by itself"
        time.sleep(0.005)
    time.sleep(delay_s)
    for victim in victims:
        ranks[victim].kill()
    for process in ranks:
        process.join(60)
        assert not process.is_alive(), "the other rank hangs"


def whole_names(folder: Path) -> list[Path]:
    """What a user, or ``ckpt_path="last"``, would take for checkpoints."""
    return sorted(path for path in folder.glob("*.ckpt") if path.exists())


def weights_in(path: Path) -> tuple[int, dict[str, Tensor]]:
    """Global step and weights of a checkpoint, after all of its files were checked. In this process alone."""
    if path.is_dir():
        shards = ShardDirectory(str(path), weights_only=None)
        checkpoint = shards.read_all(shards.tree)
        return checkpoint["global_step"], checkpoint["state_dict"]
    checkpoint = load_file(str(path), None)
    return checkpoint["global_step"], checkpoint["state_dict"]


def expected_weights(num_steps: int) -> list[dict[str, Tensor]]:
    """Weights after each step of an undisturbed run of plain PyTorch on the same batches, from 0 steps on."""
    module = AdamModule()
    configured = module.configure_optimizers()
    schedule = configured["lr_scheduler"]["scheduler"]
    weights = [full_weights(module)]

    def end_step(*_: Any) -> None:
        schedule.step()
        weights.append(full_weights(module))

    optimizer = configured["optimizer"]
    optimizer.register_step_post_hook(end_step)
    settings: dict[str, Any] = {"epochs": num_steps, "max_steps": num_steps, "by_rank": [list(batches())]}
    case = replace(CASE, num_batches=NUM_BATCHES)
    train_model_plainly(module.model, ACCUMULATE, case, make_optimizer=lambda _: optimizer, **settings)
    return weights


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Tensor]]:
    return expected_weights(NUM_STEPS)


def newest_step(folder: Path, expected: list[dict[str, Tensor]]) -> int:
    """The newest step that was saved. Every checkpoint in sight must load and have the weights of its step."""
    steps = []
    for path in whole_names(folder):
        step, weights = weights_in(path)
        steps.append(step)
        worst = max(float((weights[name] - value).abs().max()) for name, value in expected[step].items())
        assert worst <= 1e-10, (path, step, worst)
    assert steps, "nothing to resume from"
    return max(steps)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("form", "kills"),
    [("shards_in_background", 1), *(pytest.param(form, 30, marks=pytest.mark.sweep) for form in KILLED)],
)
def test_kills(tmp_path: Path, expected: list[dict[str, Tensor]], form: str, kills: int) -> None:
    """At random moments, of random victims: some of thirty come within a save."""
    steps = set()
    within_a_save = 0
    for seed in range(kills):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_and_kill(seed, KILLED[form], folder)
        steps.add(newest_step(folder / "saved", expected))
        within_a_save += len(leftovers(folder / "saved")) > 0
    assert max(steps) < NUM_STEPS, "the run had ended"
    if kills > 1:
        assert len(steps) > 5, "all were killed at the same few steps"
        assert within_a_save > 0, "no kill came within a save"


# --- Checkpoints appear, are replaced and disappear whole -------------------------------------------------------------


def make_file(path: Path, content: str) -> None:
    path.write_text(content)


def make_directory(path: Path, content: str) -> None:
    path.mkdir()
    (path / "file").write_text(content)


def make_link(path: Path, content: str) -> None:
    target = path.with_name(f"target of {path.name}")
    make_directory(target, content)
    path.symlink_to(target.name)


def content(path: Path) -> str:
    return (path / "file" if path.is_dir() else path).read_text()


KINDS: dict[str, Callable[[Path, str], None]] = {
    "file": make_file,
    "directory": make_directory,
    "link": make_link,
}


@pytest.mark.parametrize("old", [None, *KINDS])
@pytest.mark.parametrize("new", KINDS)
def test_replace(tmp_path: Path, new: str, old: str | None) -> None:
    """Whatever was there is replaced, and nothing else is left; the new one goes, and what a link led to stays."""
    target = tmp_path / "last.ckpt"
    staging = tmp_path / paths.temporary_name()
    if old is not None:
        KINDS[old](target, "old")
    KINDS[new](staging, "new")
    paths.replace(staging, target)
    assert content(target) == "new"
    assert not os.path.lexists(staging)
    assert leftovers(tmp_path) == []
    if old == "link":
        assert content(tmp_path / "target of last.ckpt") == "old"
    paths.remove(str(target))
    assert not os.path.lexists(target)
    assert leftovers(tmp_path) == []
    paths.remove(str(target))


def test_a_crash_between_two_names_leaves_both(tmp_path: Path, mocker: MockerFixture) -> None:
    """The directory that stood there is whole, and has a name that `ckpt_path="last"` finds."""
    target = tmp_path / "last.ckpt"
    staging = tmp_path / paths.temporary_name()
    make_directory(target, "old")
    make_directory(staging, "new")
    mocker.patch.object(paths.os, "replace", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        paths.replace(staging, target)
    (old,) = tmp_path.glob("last*.ckpt")
    assert (content(old), content(staging)) == ("old", "new")


def test_other_directories_are_not_replaced(tmp_path: Path) -> None:
    """A directory of the user's that a checkpoint was to be called like stays; an empty one is taken."""
    path = tmp_path / "results"
    path.mkdir()
    paths.prepare_place(str(path))
    (path / "thesis.tex").write_text("years of work")
    message = r"not a checkpoint \(it has no \.metadata\), and saving would replace it: choose .*last\.ckpt"
    with pytest.raises(CheckpointError, match=message):
        paths.prepare_place(str(path))


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(tmp_path: Path, mocker: MockerFixture) -> None:
    """Its name is gone before the first file is."""
    target = tmp_path / "old.ckpt"
    make_directory(target, "old")
    mocker.patch.object(paths.shutil, "rmtree", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        paths.remove(str(target))
    mocker.stopall()
    assert not target.exists()
    (leftover,) = leftovers(tmp_path)
    assert leftover.name.startswith(".unfinished-")


@pytest.mark.parametrize("old", [None, *KINDS])
def test_link(tmp_path: Path, old: str | None) -> None:
    """`last.ckpt` leads to the newest, whatever it was."""
    newest = tmp_path / "step=2.ckpt"
    last = tmp_path / "last.ckpt"
    make_directory(newest, "new")
    if old is not None:
        KINDS[old](last, "old")
    paths.link(newest, last)
    assert last.is_symlink()
    assert content(last) == "new"
    paths.link(newest, newest)
    assert not newest.is_symlink()
