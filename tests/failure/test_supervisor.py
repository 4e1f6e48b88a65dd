"""What a run and the guard around it leave behind: the handler of SIGTERM, threads, children, sockets, the next run."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, destroy_global_state
from lightning_automodel.distributed.failures import RankFailure
from lightning_automodel.distributed.meeting import FAILURE, make, parse_failure
from lightning_automodel.failure.supervisor import Supervisor
from lightning_automodel.failure.watch import Watch
from tests.failure import faults
from tests.processes import forked
from tests.rank_pool import RankPool
from tests.trainer.exactness import micro_batches
from tests.trainer.runs import CASE, LabelledModule, loader, make_trainer


class FailsOnce(LabelledModule):
    """Raises in its first training step, on every rank alike."""

    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails:
            self.fails = False
            raise ValueError("bad batch")
        return super().training_step(batch, batch_idx)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_automodel")]


def _fit_after_a_failure() -> tuple[bool, bool, list[str], int]:
    before = signal.getsignal(signal.SIGTERM)
    module = FailsOnce()
    trainer = make_trainer(AutomodelStrategy(), max_steps=2)
    with pytest.raises(ValueError, match="bad batch"):
        trainer.fit(module, loader())
    dist.barrier()
    is_restored = signal.getsignal(signal.SIGTERM) is before
    trainer = make_trainer(AutomodelStrategy(), max_steps=2)
    trainer.fit(LabelledModule(), loader())
    return is_restored, signal.getsignal(signal.SIGTERM) is before, _threads(), trainer.global_step


def test_nothing_is_left_after_a_failure_that_was_caught(pool2: RankPool) -> None:
    """Neither handler nor thread; and the next fit trains."""
    assert pool2.run(_fit_after_a_failure) == [(True, True, [], 2)] * 2


def _stack_after_a_fit() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.register(signal.SIGUSR2, file, all_threads=False)
        make_trainer(AutomodelStrategy(), max_steps=1).fit(LabelledModule(), loader())
        os.kill(os.getpid(), signal.SIGUSR2)
        faulthandler.unregister(signal.SIGUSR2)
        file.seek(0)
        return file.read()


def test_faulthandler_outlives_a_fit(pool2: RankPool) -> None:
    """Lightning restores what Python knows of all handlers. Without it, a later crash would leave no stack."""
    for stack in pool2.run(_stack_after_a_fit):
        assert f"in {_stack_after_a_fit.__name__}" in stack


def _say_ready_and_sleep(pipe: Any) -> None:
    pipe.send(None)
    time.sleep(60)


class Forks(LabelledModule):
    """Starts a process in a hook and ends it by SIGTERM."""

    exit_code: int | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            child = context.Process(target=_say_ready_and_sleep, args=(theirs,))
            child.start()
            # CPython drops a signal that reaches a child before it has finished forking, so a second one may
            # follow; a handler that speaks for this process would swallow them all.
            assert ours.poll(20)
            for _ in range(2):
                child.terminate()
                child.join(5)
            self.exit_code = child.exitcode
            child.kill()


def _fork() -> tuple[int | None, int]:
    module = Forks()
    trainer = make_trainer(AutomodelStrategy(), max_steps=4)
    trainer.fit(module, loader())
    return module.exit_code, trainer.global_step


def test_forked_child_ends_by_sigterm(pool2: RankPool) -> None:
    """It inherits the handler but not the run."""
    assert pool2.run(_fork) == [(-signal.SIGTERM, 4)] * 2


@pytest.mark.parametrize(
    ("timeout_s", "heartbeat_timeout_s", "limit_s"),
    [(1800, 120, 120), (1800, 3600, 1795), (20, 120, 15), (6, 120, 3)],
)
def test_how_long_a_rank_may_be_silent(timeout_s: float, heartbeat_timeout_s: float, limit_s: float) -> None:
    """Not for half an hour, because a collective may take as long."""
    timeouts = [timedelta(seconds=seconds) for seconds in (timeout_s, heartbeat_timeout_s)]
    assert Watch(0, 2, dist.HashStore(), *timeouts, str).silence_s == limit_s


def test_teardown_after_a_failure_does_not_hide_it(caplog: pytest.LogCaptureFixture) -> None:
    """A device that has failed raises in each later call."""
    guard = Supervisor(lambda: None, lambda: None)
    with guard.tearing_down():
        pass
    with pytest.raises(RuntimeError, match="device-side assert"), guard.tearing_down():
        raise RuntimeError("device-side assert")
    guard.has_failed = True
    with guard.tearing_down():
        raise RuntimeError("device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")
    (record,) = caplog.records
    assert record.message == (
        "Tearing down after a failure has raised too:"
        " RuntimeError('device-side assert triggered\\nCompile with TORCH_USE_CUDA_DSA')"
    )


def test_a_rank_that_the_records_name_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the others know of it as a note; it does not report itself as another rank's failure."""
    error = dist.DistError("the collective failed")
    found = RankFailure(0, "here", "training_step", "DistError", "the collective failed at train.py:7")
    store = dist.HashStore()
    watch = Watch(0, 2, store, timedelta(seconds=60), timedelta(seconds=60), lambda: "training_step")
    monkeypatch.setattr(watch, "why", lambda own: found)
    supervisor = Supervisor(lambda: None, lambda: None)
    supervisor.watch = watch
    supervisor.has_failed = True
    supervisor._leave(error)
    assert watch.leaves_by_itself.is_set()
    make(store, [FAILURE])
    assert parse_failure(store.get(FAILURE)) is None
    assert error.__notes__ == ["at train.py:7"]


# --- After a process group --------------------------------------------------------------------------------------------

ROUNDS = 3
LEFT = [3, 0]  # sockets by rank: rank 0 keeps a store and its connections
STRATEGIES: list[dict[str, Any]] = [{}, {"data_parallel": "ddp"}]


def _count() -> dict[str, int]:
    threads = len(os.listdir("/proc/self/task"))
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    sockets = sum(target.startswith("socket:") for target in targets)
    return {"threads": threads, "descriptors": len(targets), "sockets": sockets}


def _train_again_and_again(queue: Any, rank: int, port: int, folder: Path) -> None:
    faults.become_rank(rank, 2, port, folder)

    def train(options: dict[str, Any]) -> None:
        settings = {
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 1.0,
            "max_steps": 1,
            "limit_val_batches": 1,
        }
        trainer = faults.make_trainer(2, 1800.0, options=options, **settings)
        trainer.fit(LabelledModule(), DataLoader(micro_batches(CASE)[rank], batch_size=None))

    counts = []
    for index in range(ROUNDS):
        train(STRATEGIES[index % len(STRATEGIES)])
        assert dist.is_initialized()
        destroy_global_state()
        assert not dist.is_initialized()
        counts.append(_count())
    # The store's thread closes connections somewhat later than their other ends are closed.
    deadline = time.monotonic() + 5
    while counts[-1]["sockets"] > LEFT[rank] and time.monotonic() < deadline:
        time.sleep(0.1)
        counts[-1] = _count()
    queue.put(counts)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
def test_trainings_again_and_again_in_one_process(tmp_path: Path) -> None:
    """Many trainings, each with a process group of its own: rank 0 keeps the store, and nothing else is left."""
    queue = forked().Queue()
    processes = faults.started_ranks(_train_again_and_again, queue, tmp_path, 2)
    with faults.killed_at_the_end(processes):
        statuses = faults.exit_statuses(processes, 240)
    assert statuses == (0, 0), faults.outputs_in(tmp_path, 2)
    found = sorted((queue.get(timeout=5) for _ in processes), key=lambda counts: counts[-1]["sockets"])
    for counts in found:
        assert len(counts) == ROUNDS
        assert all(counts[-1][each] <= counts[0][each] for each in counts[0]), counts
    assert [counts[-1]["sockets"] for counts in found] == sorted(LEFT)
    assert torch.get_num_threads() == 1
