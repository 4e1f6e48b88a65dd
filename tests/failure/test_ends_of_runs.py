"""Faults where no step shows them: at the end of a run, between two runs, and on the way out of a failed one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.distributed import meeting, process_group
from lightning_automodel.failure import supervisor
from lightning_automodel.failure.supervisor import LONGEST_LEAVING_S, SIGTERM_STATUS, Supervisor
from tests.failure.faults import Model, Ragged, become_rank, exit_statuses, killed_at_the_end, started_ranks
from tests.processes import forked
from tests.trainer.runs import SILENT

PATIENCE_S = 90.0


def _trainer(
    world_size: int, timeout_s: float = 5.0, data_parallel: str = "fsdp2", **kwargs: Any
) -> pl.Trainer:
    strategy = AutomodelStrategy(data_parallel=data_parallel, timeout=timeout_s / 60)
    options = {"max_steps": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0, **SILENT, **kwargs}
    return pl.Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **options)


def _data() -> DataLoader:
    return DataLoader(Ragged(lambda: None), 2)


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


def host_stops_between_two_runs(rank: int, world_size: int) -> None:
    model = Model()
    trainer = _trainer(world_size)
    trainer.fit(model, _data())
    if rank == 0:
        _send(signal.SIGSTOP)
    time.sleep(1)
    trainer.validate(model, _data())


def host_dies_in_its_last_hook(rank: int, world_size: int) -> None:
    def die(model: Model) -> None:
        if rank == 0:
            time.sleep(1)
            _send(signal.SIGKILL)

    _trainer(world_size).fit(_fails_in("on_fit_end", die), _data())


def sigterm_in_the_last_hook(rank: int, world_size: int) -> None:
    def stop(model: Model) -> None:
        if rank == 1:
            time.sleep(0.5)  # rank 0 waits for it by then, and learns late that it has come
            _send(signal.SIGTERM)
        else:
            meeting.pause_s = lambda *_: 1.0  # type: ignore[assignment]

    model = _fails_in("on_fit_end", stop)
    trainer = _trainer(2)
    trainer.fit(model, _data())
    trainer.validate(model, _data())
    print("validated")


def sigterm_in_a_world_of_one(rank: int, world_size: int) -> None:
    _trainer(world_size).fit(_fails_in("training_step", lambda model: _send(signal.SIGTERM)), _data())


def stops_on_one_rank_alone(rank: int, world_size: int) -> None:
    def stop(model: Model) -> None:
        model.trainer.should_stop = model.trainer.should_stop or (
            rank == 1 and model.trainer.global_step == 2
        )

    _trainer(world_size, timeout_s=2 * PATIENCE_S, max_steps=6).fit(
        _fails_in("on_train_batch_end", stop), _data()
    )


def gathers_on_one_rank_alone(rank: int, world_size: int) -> None:
    def log_norm(model: Model) -> None:
        if rank == 0 and model.trainer.global_step == 2:
            print("norm", model.head.weight.norm())

    _trainer(world_size, max_steps=6).fit(_fails_in("on_train_batch_end", log_norm), _data())


def sleeps_after_its_last_step(rank: int, world_size: int) -> None:
    _trainer(world_size).fit(
        _fails_in("on_train_end", lambda model: time.sleep(PATIENCE_S) if rank == 1 else None), _data()
    )


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
    _trainer(world_size, timeout_s=14.0, max_steps=6).fit(
        _fails_in("on_train_batch_start", suspend), _data()
    )
    print("went on")


def _wait_for_first() -> None:
    dist.recv(torch.zeros(1), 0)


def _wait_for_second() -> None:
    dist.recv(torch.zeros(1), 1)


def time_out_together(rank: int, world_size: int) -> None:
    """Each rank is asked where it is when it has left its collective already."""
    _trainer(world_size).fit(
        _fails_in("training_step", lambda model: _wait_for_first() if rank == 1 else _wait_for_second()),
        _data(),
    )


def _reduce_another_size(rank: int) -> None:
    dist.all_reduce(torch.zeros(1 if rank == 1 else 1000))


def call_different_collectives(rank: int, world_size: int) -> None:
    _trainer(world_size).fit(_fails_in("training_step", lambda model: _reduce_another_size(rank)), _data())


class RaisesToo(pl.Callback):
    """Keeps Lightning from tearing down after a failure."""

    def on_exception(self, *_: Any) -> None:
        raise OSError("cannot tell anybody")


def is_refused_after_a_failure_in_a_failure(rank: int, world_size: int) -> None:
    def fail(model: Model) -> None:
        raise ValueError("no labels here")

    with pytest.raises(OSError, match="cannot tell anybody"):
        _trainer(world_size, callbacks=[RaisesToo()]).fit(_fails_in("training_step", fail), _data())
    with pytest.raises(
        RuntimeError, match=r"end all processes and start them again, with fit.*ckpt_path='last'"
    ):
        _trainer(world_size).fit(Model(), _data())
    names = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_automodel")
    ]
    print("refused", names)


def _save_on_exception(rank: int, world_size: int, data_parallel: str) -> None:
    """Rank 1 fails while the other one stands in a collective; the callback saves two checkpoints."""

    def fail(model: Model) -> None:
        if rank == 1 and model.trainer.global_step == 2:
            raise ValueError("no labels here")

    saving = ModelCheckpoint(
        "saved", "failed", save_on_exception=True, save_last=True, every_n_train_steps=100
    )
    options = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": 6}
    try:
        _trainer(world_size, 4 * PATIENCE_S, data_parallel, **options).fit(
            _fails_in("training_step", fail), _data()
        )
    finally:
        if rank == 0:
            print(
                "saved",
                sorted(
                    (each.stem, torch.load(each)["global_step"]) for each in Path("saved").glob("*.ckpt")
                ),
            )


def saves_where_rank_1_fails(rank: int, world_size: int) -> None:
    _save_on_exception(rank, world_size, "ddp")


def cannot_save_shards_where_rank_1_fails(rank: int, world_size: int) -> None:
    _save_on_exception(rank, world_size, "fsdp2")


# --- What comes of it -------------------------------------------------------------------------------------------------

STORE_IS_GONE = "rank 0 on {host} missed heartbeats, last seen in "
LATE = "Rank 1 received SIGTERM: all ranks stop at the end of this run."
DIVERGED = (
    "rank 1 on {host} failed in fit: RuntimeError: it ended its run after training step 2, but rank 0 is in"
    " step 3"
)
GATHERS = (
    " in log_norm, which gathers head.weight for norm: make all ranks call it, outside of"
    " `if trainer.is_global_zero`"
)
EXPECTED: dict[Callable[[int, int], None], tuple[list[int | None], list[str]]] = {
    host_stops_between_two_runs: ([None, 1], ["", STORE_IS_GONE.format(host="an unknown host")]),
    host_dies_in_its_last_hook: ([-9, 1], ["", STORE_IS_GONE]),
    sigterm_in_the_last_hook: ([SIGTERM_STATUS] * 2, [LATE] * 2),
    sigterm_in_a_world_of_one: ([SIGTERM_STATUS], [""]),
    stops_on_one_rank_alone: ([1, 1], [DIVERGED] * 2),
    gathers_on_one_rank_alone: ([1, 1], [GATHERS] * 2),
    sleeps_after_its_last_step: (
        [1, 1],
        ["rank 1 on {host} is missing, last seen in on_train_end: rank 0"] * 2,
    ),
    all_are_suspended: ([0, 0], ["went on"] * 2),
    time_out_together: ([1, 1], [" in _wait_for_first, for ", " in _wait_for_second, for "]),
    call_different_collectives: (
        [1, -signal.SIGABRT],
        ["rank 1 on {host} was last seen in ", " in _reduce_another_size\n"],
    ),
    is_refused_after_a_failure_in_a_failure: ([0, 0], ["refused []"] * 2),
    saves_where_rank_1_fails: ([1, 1], ["saved [('failed', 2), ('last', 2)]", "ValueError: no labels here"]),
    cannot_save_shards_where_rank_1_fails: (
        [1, 1],
        [
            "rank 1 on {host} failed in training_step",
            "all ranks save shards together, which they cannot after a failure",
        ],
    ),
}


WAITS_LONG = (
    host_stops_between_two_runs,
    sleeps_after_its_last_step,
    all_are_suspended,
    time_out_together,
)


def _be_rank(scenario: Callable[[int, int], None], rank: int, port: int, folder: Path) -> None:
    world_size = len(EXPECTED[scenario][0])
    become_rank(rank, world_size, port, folder)
    scenario(rank, world_size)


def _run(scenario: Callable[[int, int], None], folder: Path) -> tuple[list[int | None], list[str]]:
    """Exit status, None for a rank that is stopped, and output of each rank."""
    expected = EXPECTED[scenario][0]
    ranks = started_ranks(_be_rank, scenario, folder, len(expected))
    with killed_at_the_end(ranks):
        ending = [rank for rank, status in zip(ranks, expected, strict=True) if status is not None]
        exit_statuses(ending, PATIENCE_S)
        statuses = [rank.exitcode for rank in ranks]
    outputs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(len(ranks))]
    return statuses, outputs


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Any, Future]]:
    """Of each selected scenario, four at a time: they mostly wait."""
    items = [item for item in request.session.items if item.name.startswith("test_all_ranks_end_alike")]
    selected = [item.callspec.params["scenario"] for item in items]
    with ThreadPoolExecutor(max_workers=4) as executor:
        yield {
            scenario: executor.submit(_run, scenario, tmp_path_factory.mktemp("run"))
            for scenario in EXPECTED
            if scenario in selected
        }


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, id=each.__name__, marks=[pytest.mark.sweep] if each in WAITS_LONG else [])
        for each in EXPECTED
    ],
)
def test_all_ranks_end_alike(scenario: Callable[[int, int], None], outcomes: dict[Any, Future]) -> None:
    """Long before the timeout of `stops_on_one_rank_alone`, and nobody goes on to the next run."""
    statuses, messages = EXPECTED[scenario]
    found, outputs = outcomes[scenario].result()
    assert found == statuses, "\n".join(outputs)
    for message, output in zip(messages, outputs, strict=True):
        assert message.format(host=socket.gethostname()) in output
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
            guard._failed_at = time.monotonic()
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


def test_sigterm_is_ignored_on_the_way_out_but_not_for_ever() -> None:
    """A launcher sends it to the ranks that are left; a process that lives on must still end by it."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    guard = Supervisor(lambda: None, lambda: None)
    try:
        guard._patch_sigterm()
        guard._failed_at = time.monotonic()
        _send(signal.SIGTERM)
        assert received == []
        guard._failed_at -= LONGEST_LEAVING_S
        _send(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
