"""Faults that race, and faults where no step shows them: several at once, a stop, at the end of a run or between two.

Each is a real run of two or three ranks. The sweep takes those that race 20 times: a cause that is lost in one
of many runs is lost. Faults of a single rank in a step are in `test_faults.py`.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_automodel.distributed import meeting, process_group
from lightning_automodel.failure import supervisor
from lightning_automodel.failure.supervisor import SIGTERM_STATUS, Supervisor
from tests.failure.faults import (
    Model,
    become_rank,
    data,
    exit_statuses,
    killed_at_the_end,
    make_trainer,
    outputs_in,
    started_ranks,
)
from tests.processes import forked

PATIENCE_S = 90.0
TIMES_IN_A_SWEEP = 20


def _trainer(world_size: int, timeout_s: float = 5.0, *arguments: Any, **settings: Any) -> pl.Trainer:
    return make_trainer(
        world_size, timeout_s, *arguments, **{"max_steps": 4, "limit_val_batches": 1, **settings}
    )


def _fails_in(hook: str, fail: Callable[[Model], None]) -> Model:
    """A model on which ``fail`` is called first in ``hook``."""
    original = getattr(Model, hook)

    def broken(self: Model, *args: Any, **kwargs: Any) -> Any:
        fail(self)
        return original(self, *args, **kwargs)

    return type("BrokenModel", (Model,), {hook: broken})()


def _send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


# --- What a rank does -------------------------------------------------------------------------------------------------


def host_dies_in_its_last_hook(rank: int, world_size: int) -> None:
    def die(model: Model) -> None:
        if rank == 0:
            time.sleep(1)
            _send(signal.SIGKILL)

    _trainer(world_size).fit(_fails_in("on_fit_end", die), data())


def sigterm_in_the_last_hook(rank: int, world_size: int) -> None:
    def stop(model: Model) -> None:
        if rank == 1:
            time.sleep(0.5)  # rank 0 waits for it by then, and learns late that it has come
            _send(signal.SIGTERM)
        else:
            meeting.pause_s = lambda *_: 1.0  # type: ignore[assignment]

    model = _fails_in("on_fit_end", stop)
    trainer = _trainer(2)
    trainer.fit(model, data())
    trainer.validate(model, data())
    print("validated")


def sigterm_in_a_world_of_one(rank: int, world_size: int) -> None:
    _trainer(world_size).fit(_fails_in("training_step", lambda model: _send(signal.SIGTERM)), data())


def gathers_on_one_rank_alone(rank: int, world_size: int) -> None:
    def log_norm(model: Model) -> None:
        if rank == 0 and model.trainer.global_step == 2:
            print("norm", model.head.weight.norm())

    _trainer(world_size, max_steps=6).fit(_fails_in("on_train_batch_end", log_norm), data())


def all_are_suspended(rank: int, world_size: int) -> None:
    """For longer than a rank may be silent once a collective has failed, and less than heartbeats may be missing."""
    folder = Path.cwd()

    def suspend(model: Model) -> None:
        if model.trainer.global_step == 2 and not (folder / f"suspended{rank}").exists():
            (folder / f"suspended{rank}").touch()
            if rank == 0:
                waker = "sleep 6; kill -CONT $0 $1"
                others = (folder / "pid1").read_text()
                subprocess.Popen(["sh", "-c", waker, str(os.getpid()), others], start_new_session=True)
            _send(signal.SIGSTOP)

    (folder / f"pid{rank}").write_text(str(os.getpid()))
    # The ranks stop one after the other: rank 1 hears nothing of rank 0 only while both sleep.
    _trainer(world_size, timeout_s=14.0, max_steps=6).fit(_fails_in("on_train_batch_start", suspend), data())
    print("went on")


def _reduce_another_size(rank: int) -> None:
    dist.all_reduce(torch.zeros(1 if rank == 1 else 1000))


def call_different_collectives(rank: int, world_size: int) -> None:
    fails = _fails_in("training_step", lambda model: _reduce_another_size(rank))
    _trainer(world_size, 30.0).fit(fails, data())


class RaisesToo(pl.Callback):
    """Keeps Lightning from tearing down after a failure."""

    def on_exception(self, *_: Any) -> None:
        raise OSError("cannot tell anybody")


def is_refused_after_a_failure_in_a_failure(rank: int, world_size: int) -> None:
    def fail(model: Model) -> None:
        raise ValueError("no labels here")

    with pytest.raises(OSError, match="cannot tell anybody"):
        _trainer(world_size, callbacks=[RaisesToo()]).fit(_fails_in("training_step", fail), data())
    with pytest.raises(
        RuntimeError, match=r"end all processes and start them again, with fit.*ckpt_path='last'"
    ):
        _trainer(world_size).fit(Model(), data())
    # Nobody has closed the watch of the first fit: its threads end by themselves, at once or a beat later.
    threads = [each for each in threading.enumerate() if each.name.startswith("lightning_automodel")]
    for thread in threads:
        thread.join(PATIENCE_S / 3)
    print("refused", [thread.name for thread in threads if thread.is_alive()])


def _save_on_exception(rank: int, world_size: int, data_parallel: str, saving: ModelCheckpoint) -> None:
    """Rank 1 fails after three steps, while the other one stands in a collective; the callback saves."""

    def fail(model: Model) -> None:
        if rank == 1 and model.trainer.global_step == 3:
            raise ValueError("no labels here")

    settings = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": 6}
    options = {"data_parallel": data_parallel}
    _trainer(world_size, 4 * PATIENCE_S, options=options, **settings).fit(
        _fails_in("training_step", fail), data()
    )


def saves_where_rank_1_fails(rank: int, world_size: int) -> None:
    saving = ModelCheckpoint(
        "saved", "failed", save_on_exception=True, save_last=True, every_n_train_steps=100
    )
    try:
        _save_on_exception(rank, world_size, "ddp", saving)
    finally:
        if rank == 0:
            files = sorted(Path("saved").glob("*.ckpt"))
            print("saved", [(each.stem, torch.load(each)["global_step"]) for each in files])


def cannot_save_shards_where_rank_1_fails(rank: int, world_size: int) -> None:
    """The link to the last checkpoint stays at the one that exists."""
    saving = ModelCheckpoint(
        "saved", "{step}", save_on_exception=True, save_last="link", every_n_train_steps=2
    )
    try:
        _save_on_exception(rank, world_size, "fsdp2", saving)
    finally:
        if rank == 0:
            print("last", Path("saved/last.ckpt").resolve(strict=True).name)


# --- What races -------------------------------------------------------------------------------------------------------


def _fit_and_fail(fault: Callable[[int], None], heartbeat_timeout_s: float = 20.0) -> None:
    """Meet the fault in the fourth of six steps."""

    def fail(model: Model) -> None:
        if model.trainer.global_step == 3:
            fault(model.global_rank)

    _trainer(3, 30.0, heartbeat_timeout_s, max_steps=6, limit_val_batches=0).fit(
        _fails_in("training_step", fail), data()
    )
    print("ended well")


def _raise(rank: int) -> None:
    raise ValueError(f"no labels on rank {rank}")


def two_raise(rank: int, world_size: int) -> None:
    _fit_and_fail(lambda rank: _raise(rank) if rank else None)


def _keep_the_lock(seconds: float, fault: Callable[[int], None]) -> Callable[[int], None]:
    """Rank 1 sends no heartbeats, and rank 2 meets the fault meanwhile."""

    def fail(rank: int) -> None:
        if rank == 1:
            ctypes.PyDLL(None).sleep(int(seconds))
        if rank == 2:
            time.sleep(1)
            fault(rank)

    return fail


def one_is_killed_while_another_keeps_the_lock(rank: int, world_size: int) -> None:
    _fit_and_fail(_keep_the_lock(6, lambda rank: _send(signal.SIGKILL)))


def keeps_the_lock_for_long(rank: int, world_size: int) -> None:
    """For longer than its heartbeats may be missing."""
    _fit_and_fail(_keep_the_lock(5, lambda rank: None), heartbeat_timeout_s=2.0)


def stops_and_goes_on(rank: int, world_size: int) -> None:
    """For less than its heartbeats may be missing."""

    def stop(rank: int) -> None:
        if rank == 1:
            subprocess.Popen(
                ["sh", "-c", "sleep 1; kill -CONT $0", str(os.getpid())], start_new_session=True
            )
            _send(signal.SIGSTOP)

    _fit_and_fail(stop, heartbeat_timeout_s=3.0)


def one_is_interrupted(rank: int, world_size: int) -> None:
    _fit_and_fail(lambda rank: _send(signal.SIGINT) if rank == 1 else None)


def raises_while_groups_are_made(rank: int, world_size: int) -> None:
    """All have joined, and nothing else is watched yet."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no device")

    if rank == 1:
        dist.init_process_group = fail
    _fit_and_fail(lambda rank: None)


def dies_before_its_first_heartbeat(rank: int, world_size: int) -> None:
    """Before it is asked to: once all have joined."""
    if rank == 1:
        Supervisor.start_watch = lambda *_, **__: _send(signal.SIGKILL)  # type: ignore[method-assign]
    _fit_and_fail(lambda rank: None, heartbeat_timeout_s=3.0)


# --- What comes of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the ranks do; their exit statuses, None for one that is stopped; and what each must say.

    That is a regular expression, in which ``HOST`` is the host. What waits long, or is beside a row of its kind
    that does not, runs in the sweep alone.
    """

    act: Callable[[int, int], None]
    statuses: tuple[int | None, ...]
    says: tuple[str, ...]
    in_sweep: bool = False


FAILED = "RankFailedError: rank {0} on HOST failed in training_step: ValueError: no labels on rank {0}"
NO_LABELS = "ValueError: no labels on rank {}"
ENDED_WELL = ("ended well",) * 3
STORE_IS_GONE = "rank 0 on {} missed heartbeats, last seen in "
GATHERS = (
    " in log_norm, which gathers head.weight for norm: make all ranks call it, outside of"
    " `if trainer.is_global_zero`"
)
RACES = [
    Row(two_raise, (1, 1, 1), (FAILED.format("[12]"), NO_LABELS.format(1), NO_LABELS.format(2))),
    Row(
        one_is_killed_while_another_keeps_the_lock,
        (1, 1, -signal.SIGKILL),
        ("rank 2 on HOST was last seen in training_step: its process has ended without a word", "", ""),
    ),
    Row(keeps_the_lock_for_long, (0, 0, 0), ENDED_WELL),
    Row(stops_and_goes_on, (0, 0, 0), ENDED_WELL),
    Row(one_is_interrupted, (1, 1, 1), ("",) * 3),  # the user's wish, which needs no explanation
    Row(
        raises_while_groups_are_made,
        (1, 1, 1),
        (
            "rank 1 on HOST failed in set-up: ValueError: no",
            "ValueError: no",
            "rank 1 on HOST failed in set-up",
        ),
    ),
]
ROWS = [
    Row(
        dies_before_its_first_heartbeat,
        (1, -signal.SIGKILL, 1),
        ("rank 1 on an unknown host missed heartbeats", "", "rank 1 on an unknown host missed heartbeats"),
        in_sweep=True,
    ),
    Row(host_dies_in_its_last_hook, (-signal.SIGKILL, 1), ("", STORE_IS_GONE.format("HOST"))),
    Row(
        sigterm_in_the_last_hook,
        (SIGTERM_STATUS,) * 2,
        ("Rank 1 received SIGTERM: all ranks stop at the end of this run.",) * 2,
    ),
    Row(sigterm_in_a_world_of_one, (SIGTERM_STATUS,), ("",)),
    Row(gathers_on_one_rank_alone, (1, 1), (GATHERS,) * 2),
    Row(all_are_suspended, (0, 0), ("went on",) * 2, in_sweep=True),
    Row(
        call_different_collectives,
        (1, -signal.SIGABRT),
        ("rank 1 on HOST was last seen in ", " in _reduce_another_size\n"),
    ),
    Row(is_refused_after_a_failure_in_a_failure, (0, 0), (r"refused \[\]",) * 2),
    Row(
        saves_where_rank_1_fails,
        (1, 1),
        (r"saved \[\('failed', 3\), \('last', 3\)\]", "ValueError: no labels here"),
    ),
    Row(
        cannot_save_shards_where_rank_1_fails,
        (1, 1),
        (
            r"rank 1 on HOST failed in training_step[\s\S]*last step=2.ckpt",
            "all ranks save shards together, which they cannot after a failure",
        ),
    ),
]


def _be_rank(row: Row, rank: int, port: int, folder: Path) -> None:
    become_rank(rank, len(row.statuses), port, folder)
    row.act(rank, len(row.statuses))


def _run(row: Row, folder: Path) -> tuple[tuple[int | None, ...], list[str]]:
    """Exit status, None for a rank that is stopped, and output of each rank."""
    ranks = started_ranks(_be_rank, row, folder, len(row.statuses))
    with killed_at_the_end(ranks):
        ending = [rank for rank, status in zip(ranks, row.statuses, strict=True) if status is not None]
        exit_statuses(ending, PATIENCE_S)
        statuses = tuple(rank.exitcode for rank in ranks)
    return statuses, outputs_in(folder, len(ranks))


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[Row, int], Future]]:
    """Of each selected row, four at a time: they mostly wait."""
    items = [
        item for item in request.session.items if item.name.startswith("test_every_rank_says_the_cause")
    ]
    selected = [(item.callspec.params["row"], item.callspec.params["attempt"]) for item in items]
    with ThreadPoolExecutor(max_workers=4) as executor:
        yield {each: executor.submit(_run, each[0], tmp_path_factory.mktemp("run")) for each in selected}


def _parameters() -> Iterator[Any]:
    """Each row once, some in the sweep alone; and what races many times there."""
    for row in [*RACES, *ROWS]:
        for attempt in range(TIMES_IN_A_SWEEP if row in RACES else 1):
            in_sweep = attempt > 0 or row.in_sweep
            name = f"{row.act.__name__}-{attempt}"
            yield pytest.param(row, attempt, id=name, marks=[pytest.mark.sweep] * in_sweep)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("row", "attempt"), _parameters())
def test_every_rank_says_the_cause(row: Row, attempt: int, outcomes: dict[tuple[Row, int], Future]) -> None:
    """Whoever raised its own exception, the others that of one who did; nobody hangs, or goes on to another run."""
    statuses, outputs = outcomes[row, attempt].result()
    assert statuses == row.statuses, "\n".join(outputs)
    for says, output in zip(row.says, outputs, strict=True):
        assert re.search(says.replace("HOST", re.escape(socket.gethostname())), output), output
        assert "\nvalidated" not in output


def _cannot_leave(rank: int, port: int, folder: Path) -> None:
    become_rank(rank, 2, port, folder)
    guard = Supervisor(lambda: None, lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "LONGEST_LEAVING_S", 0.1)
        patch.setattr(process_group, "group_size", lambda: 2)
        patch.setattr(process_group, "_leave", lambda *_: time.sleep(PATIENCE_S))
        try:
            raise ValueError("no labels here")
        except ValueError:
            guard.has_failed = True
            guard.close()


def test_last_resort_tells_the_cause(tmp_path: Path) -> None:
    """Where groups cannot be destroyed, the process ends all the same, and not without a word."""
    process = forked().Process(target=_cannot_leave, args=(1, 0, tmp_path))
    process.start()
    with killed_at_the_end([process]):
        process.join(PATIENCE_S)
    assert process.exitcode == 1
    printed = (tmp_path / "rank1.log").read_text()
    assert (
        " stops: ValueError: no labels here; destroying its process groups took over 0.1 s. It was at:"
        in printed
    )
    assert " in _cannot_leave\n" in printed


def test_sigterm_is_ignored_on_the_way_out() -> None:
    """A launcher sends it to the ranks that are left; a process that lives on ends by it."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    guard = Supervisor(lambda: None, lambda: None)
    try:
        guard._patch_sigterm()
        guard.has_failed = True
        _send(signal.SIGTERM)
        assert received == []
        guard.close()
        _send(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
