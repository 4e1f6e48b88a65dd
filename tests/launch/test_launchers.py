"""Every start method: it trains exactly, its results are in the launching process, and Ctrl-C ends all of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_automodel import AutomodelStrategy
from lightning_automodel.launch.launchers import WorkerLauncher
from tests.launch.launched import (
    PATIENCE_S,
    Terminal,
    assert_gone,
    fail,
    is_running,
    program,
    ranks,
    reference,
    run,
    script,
    train,
    train_alone_before,
    train_and_fail,
    wait_until,
)
from tests.processes import fresh_environment, run_anew
from tests.trainer.exactness import relative_error
from tests.trainer.runs import CASE, SILENT, TOLERANCE

TRAINED = [("fork", "fsdp2"), ("fork", "ddp"), ("forkserver", "fsdp2")]
# What is spawned imports everything anew; that it can be sent there, a fork server shows as well.
TRAINED_IN_THE_SWEEP = [("forkserver", "ddp"), ("spawn", "fsdp2"), ("spawn", "ddp")]
# What happens to rank 1 of a script; the status of rank 0; what is printed.
SCRIPT_FAILS = {
    "SIGKILL": (1, "its process was ended by SIGKILL"),
    "exception": (1, "failed in training_step: ValueError: no labels here"),
    "leave": (1, "its process ended with exit status 0"),
    "broken": (-signal.SIGTERM, "rank 1 ended with exit status 1 before this rank had joined the others."),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Every selected start method, two at a time: its status, and its folder."""

    def start(method: str, engines: list[str]) -> tuple[int | None, Path]:
        folder = tmp_path_factory.mktemp("program")
        # Testing starts ranks just as training does.
        return run(train, folder, engines=engines, tests=method == "fork", start_method=method), folder

    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    engines: dict[str, list[str]] = {}
    for wanted in (item.callspec.params for item in items if "engine" in item.callspec.params):
        engines.setdefault(wanted["method"], []).append(wanted["engine"])
    with ThreadPoolExecutor(max_workers=2) as executor:
        yield {method: executor.submit(start, method, chosen) for method, chosen in engines.items()}


@pytest.mark.parametrize(
    ("method", "engine"), [*TRAINED, *(pytest.param(*case, marks=pytest.mark.sweep) for case in TRAINED_IN_THE_SWEEP)]
)
def test_results_of_workers(runs: dict[str, Future], method: str, engine: str) -> None:
    """Weights, metrics, reports and checkpoint paths are in the launching process; test takes the trained weights."""
    status, folder = runs[method].result()
    assert status == 0, (folder / "log").read_text()
    found = assert_exact(folder, engine)
    _, test_loss = reference()
    assert all(relative_error(loss, test_loss) < TOLERANCE for loss in found.get("tested", []))
    assert found.get("metrics") == (["test_loss"] if method == "fork" else None)


def assert_exact(folder: Path, engine: str = "fsdp2") -> dict[str, Any]:
    """What the launching process has are the weights of one process, and the reports of both ranks."""
    found, (weights, _) = torch.load(folder / "found.pt")[engine], reference()
    assert found["weights"].keys() == weights.keys()
    assert max(relative_error(found["weights"][name], weight) for name, weight in weights.items()) < TOLERANCE
    assert found["micro_batches"] == 2 * CASE.num_batches
    assert found["best_model_path"].startswith(str(folder / engine / "best"))
    assert found["num_label_tokens"] == 23
    assert found["mesh"]["data_parallel"] == 2
    assert found["loss"] > 0
    return found


def test_after_a_run_on_one_device(tmp_path: Path) -> None:
    """Forked ranks are not in the group that the launching process is in since then."""
    assert run(train_alone_before, tmp_path) == 0, (tmp_path / "log").read_text()
    found, (weights, _) = torch.load(tmp_path / "found.pt"), reference()
    assert max(relative_error(found["weights"][name], weight) for name, weight in weights.items()) < TOLERANCE
    assert found["world_size"] == 1


@pytest.mark.parametrize(
    "fault", [name if name == "SIGKILL" else pytest.param(name, marks=pytest.mark.sweep) for name in SCRIPT_FAILS]
)
def test_script_fails(tmp_path: Path, fault: str) -> None:
    """The launching rank, which has trained exactly before, leaves with the cause, also where the other never came."""
    command = script(tmp_path, train_and_fail, fault=fault)
    status, output = run_anew([*command, fault], tmp_path, timeout_s=PATIENCE_S)
    expected, message = SCRIPT_FAILS[fault]
    assert status == expected, output
    assert message in output
    if fault != "broken":
        assert_exact(tmp_path)
        assert_gone(tmp_path)


@pytest.mark.parametrize("method", ["popen", "fork", pytest.param("forkserver", marks=pytest.mark.sweep)])
def test_ctrl_c(tmp_path: Path, method: str) -> None:
    """One rank waits in a collective, one sleeps: both leave at once, without a traceback, as under Lightning."""
    terminal = Terminal()
    options = {"fault": "slow", "start_method": method}
    if method == "popen":
        process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *script(tmp_path, fail, **options)],
            env=fresh_environment(),
            cwd=tmp_path,
            **dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave),
        )
        status = _press_ctrl_c(tmp_path, terminal, process.poll, process.wait)
    else:
        with program(fail, tmp_path, terminal.name, **options) as launching:
            _press_ctrl_c(tmp_path, terminal, lambda: launching.exitcode, launching.join)
            status = launching.exitcode
    output = terminal.close()
    assert status == 1, output
    assert "Detected KeyboardInterrupt" in output
    assert "Traceback" not in output
    assert "Error" not in output


def _press_ctrl_c(folder: Path, terminal: Terminal, poll: Any, wait: Any) -> Any:
    wait_until(lambda: len(list(folder.glob("rank*.on"))) == 2 or poll() is not None)
    assert poll() is None, terminal.close()
    pressed_at = time.monotonic()
    terminal.press_ctrl_c()
    status = wait(PATIENCE_S)
    # Some three seconds on an idle machine; any of the limits for a rank that does not answer would be longer.
    assert time.monotonic() - pressed_at < 60
    wait_until(lambda: not any(is_running(pid) for pid in ranks(folder)))
    return status


@pytest.mark.sweep  # that ranks meet at a file is shown faster by test_process_group
def test_ranks_meet_at_a_file(tmp_path: Path) -> None:
    """`init_method` reaches the process group."""
    meeting = tmp_path / "meeting"
    command = script(tmp_path, train, engines=["fsdp2"], tests=False, init_method=f"file://{meeting}")
    status, output = run_anew(command, tmp_path, timeout_s=PATIENCE_S)
    assert status == 0, output
    assert_exact(tmp_path)
    assert meeting.exists()


# --- Choosing a launcher, without any process -------------------------------------------------------------------------


def make_trainer(start_method: Any, devices: int = 2) -> pl.Trainer:
    """A Trainer of ranks that are not started."""
    return pl.Trainer(
        strategy=AutomodelStrategy(start_method=start_method), accelerator="cpu", devices=devices, **SILENT
    )


def test_launchers_in_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only forked ranks know what the cells defined; no script could run again, but one device needs no other rank."""
    launchers = {name: make_trainer(name).strategy.launcher for name in ("fork", "forkserver", "spawn")}
    assert all(isinstance(launcher, WorkerLauncher) for launcher in launchers.values())
    assert {name for name, launcher in launchers.items() if launcher.is_interactive_compatible} == {"fork"}
    assert not make_trainer("popen").strategy.launcher.is_interactive_compatible
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(Exception, match=r"AutomodelStrategy\(start_method='fork'\)"):
        make_trainer("popen")
    make_trainer("popen", devices=1)


def test_unknown_start_method() -> None:
    """With the valid ones."""
    with pytest.raises(ValueError, match=r"start_method must be one of 'popen', .*'spawn'.*, got 'thread'\."):
        AutomodelStrategy(start_method="thread")


def test_no_effect_where_processes_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else has started them."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.warns(UserWarning, match="start_method='spawn' has no effect: LightningEnvironment says that"):
        make_trainer("spawn")


def test_second_fit_is_refused() -> None:
    """Optimizer states and loops were in processes that have ended."""
    trainer = make_trainer("fork")
    trainer.strategy.launcher._already_fit = True
    with pytest.raises(NotImplementedError, match=r"make a new Trainer and pass fit\(ckpt_path=\.\.\.\)"):
        trainer.fit(pl.LightningModule(), [])
