"""Ranks that are children of the launching process: results come back, faults are named, nobody is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.launched import (
    ACCUMULATE,
    FAILING_RANK,
    fail,
    program,
    run,
    train,
    train_alone_before,
    tune,
    wait_until,
)
from tests.trainer.exactness import TinyDecoder, full_weights, micro_batches, relative_error
from tests.trainer.plain import train_model_plainly
from tests.trainer.runs import CASE, TOLERANCE, mean_loss

BY_DEFAULT = [("fork", "fsdp2"), ("fork", "ddp"), ("forkserver", "fsdp2")]
# What is spawned imports everything anew; that it can be sent there, a fork server shows as well.
IN_THE_SWEEP = [("forkserver", "ddp"), ("spawn", "fsdp2"), ("spawn", "ddp")]
# What happens to rank 1; the status of the launching process; what its error says.
FAULTS = {
    "exception": (1, "RankFailedError: rank 1 on ", " failed in training_step: ValueError: no labels here"),
    "exit": (1, "RankFailedError: rank 1 on ", " failed in training_step: SystemExit: exit status 3"),
    "leave": (1, "RankFailedError: rank 1 on ", "its process ended with exit status 0"),
    "SIGKILL": (1, "RankFailedError: rank 1 on ", "its process was ended by SIGKILL"),
    "SIGTERM": (128 + signal.SIGTERM, "SIGTERMException: ", ""),
}
FAILED = [*(("fork", fault) for fault in FAULTS), ("forkserver", "exception")]


def reference() -> tuple[dict[str, torch.Tensor], float]:
    """Weights of one process that trains on whole windows, and its summed loss on the same data afterwards."""
    model = TinyDecoder(CASE.seed).double()
    train_model_plainly(model, ACCUMULATE)
    with torch.no_grad():
        loss = sum(mean_loss(model, batch, "sum").item() for rank in micro_batches(CASE) for batch in rank)
    return full_weights(model), loss


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Future]]:
    """Every selected run, two at a time: its status, and its folder."""

    def start(function, **options) -> tuple[int | None, Path]:
        folder = tmp_path_factory.mktemp("program")
        return run(function, folder, **options), folder

    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    parameters = [item.callspec.params for item in items]
    engines: dict[str, list[str]] = {}
    for wanted in parameters:
        if "engine" in wanted:
            engines.setdefault(wanted["method"], []).append(wanted["engine"])
    failed = {(wanted["method"], wanted["fault"]) for wanted in parameters if "fault" in wanted}
    with ThreadPoolExecutor(max_workers=2) as executor:
        # Testing starts ranks just as training does.
        started = {
            method: executor.submit(start, train, engines=chosen, tests=method == "fork", start_method=method)
            for method, chosen in engines.items()
        } | {
            (method, fault): executor.submit(start, fail, start_method=method, fault=fault)
            for method, fault in FAILED
            if (method, fault) in failed
        }
        yield started


@pytest.mark.parametrize(
    ("method", "engine"), [*BY_DEFAULT, *(pytest.param(*case, marks=pytest.mark.sweep) for case in IN_THE_SWEEP)]
)
def test_results_come_back(runs: dict[Any, Future], method: str, engine: str) -> None:
    """Weights, metrics, reports and checkpoint paths are in the launching process; test takes the trained weights."""
    status, folder = runs[method].result()
    assert status == 0, (folder / "log").read_text()
    found = torch.load(folder / "found.pt")[engine]
    weights, test_loss = reference()
    assert found["weights"].keys() == weights.keys()
    assert max(relative_error(found["weights"][name], weight) for name, weight in weights.items()) < TOLERANCE
    assert all(relative_error(loss, test_loss) < TOLERANCE for loss in found.get("tested", []))
    assert found.get("metrics") == (["test_loss"] if method == "fork" else None)
    assert found["micro_batches"] == 2 * CASE.num_batches
    assert found["best_model_path"].startswith(str(folder / engine / "best"))
    assert found["num_label_tokens"] == 23
    assert found["mesh"]["data_parallel"] == 2
    assert found["loss"] > 0


def test_after_a_run_on_one_device(tmp_path: Path) -> None:
    """Forked ranks are not in the group that the launching process is in since then."""
    assert run(train_alone_before, tmp_path) == 0, (tmp_path / "log").read_text()
    found, (weights, _) = torch.load(tmp_path / "found.pt"), reference()
    assert max(relative_error(found["weights"][name], weight) for name, weight in weights.items()) < TOLERANCE
    assert found["world_size"] == 1


@pytest.mark.parametrize(("method", "fault"), FAILED)
def test_rank_fails(runs: dict[Any, Future], method: str, fault: str) -> None:
    """All leave, and the launching process raises what names the rank and tells why."""
    status, folder = runs[method, fault].result()
    expected, beginning, ending = FAULTS[fault]
    error = (folder / "error").read_text()
    assert status == expected, (folder / "log").read_text()
    assert error.startswith(beginning)
    assert ending in error.splitlines()[0]
    if fault == "exception":
        assert f"rank {FAILING_RANK} left with:\nTraceback" in error
    assert_gone(folder)


@pytest.mark.parametrize(
    ("method", "name"), [("fork", "SIGTERM"), ("fork", "SIGINT"), ("fork", "SIGKILL"), ("forkserver", "SIGKILL")]
)
def test_launching_process_is_ended(tmp_path: Path, method: str, name: str) -> None:
    """It is no rank, but no rank outlives it; SIGTERM stops them all after the same step."""
    with program(fail, tmp_path, start_method=method) as launching:
        wait_until(lambda: all((tmp_path / f"rank{rank}.on").exists() for rank in range(2)))
        os.kill(launching.pid, signal.Signals[name])
        launching.join(60)
        assert not launching.is_alive()
        wait_until(lambda: not any(is_running(pid) for pid in ranks(tmp_path)))
    log = (tmp_path / "log").read_text()
    if name == "SIGTERM":
        assert launching.exitcode == 128 + signal.SIGTERM, log
        assert "received SIGTERM: all ranks stop after this step." in log
    else:
        # To a forked rank, torch has Linux send SIGINT as soon as its parent is gone; the other may hear of it first.
        told = ("This rank leaves, since the launcher, which started the ranks, ", "KeyboardInterrupt")
        assert any(text in log for text in told[: 2 if (method, name) == ("fork", "SIGKILL") else 1])
        assert launching.exitcode == (1 if name == "SIGINT" else -signal.SIGKILL)


def test_second_sigterm(tmp_path: Path) -> None:
    """After the first, the ranks wait for one that takes no further step."""
    with program(fail, tmp_path, start_method="fork", fault="hang") as launching:
        wait_until((tmp_path / "hanging").exists)
        os.kill(launching.pid, signal.SIGTERM)
        launching.join(2)
        assert launching.is_alive()
        os.kill(launching.pid, signal.SIGTERM)
        launching.join(60)
        assert launching.exitcode == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    assert_gone(tmp_path)


def test_tuner_is_refused(tmp_path: Path) -> None:
    """What it finds would be lost, and `lr_find` return None."""
    assert run(tune, tmp_path) == 0
    assert "The Tuner found its value in processes of start_method='fork'" in (tmp_path / "error").read_text()


def ranks(folder: Path) -> list[int]:
    """Process ids of the ranks."""
    return [int(path.read_text()) for path in folder.glob("rank*.pid")]


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(folder: Path) -> None:
    """No rank is left."""
    assert len(ranks(folder)) == 2
    assert not any(is_running(pid) for pid in ranks(folder))
