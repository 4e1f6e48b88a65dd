"""Ends of workers and of the launching process: faults are named, every wait ends, and nobody is left behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_automodel.launch.forks import load_trained_weights
from tests.launch.launched import (
    Runs,
    assert_gone,
    fail,
    is_running,
    program,
    ranks,
    run,
    start_selected,
    tune,
    wait_until,
)

# What happens to rank 1; the status of the launching process; what its error says.
# The rank that has failed ends first, or the one that knows of it.
FAULTS = {
    "exception": (1, "ProcessRaisedException: ", "ValueError: no labels here"),
    "finish": (1, "ProcessRaisedException: ", r"sys\.exit\(0\) has ended the run|SystemExit: exit status 0"),
    "exit": (1, "", r"process 1 terminated with exit code 3|SystemExit: exit status 3"),
    "leave": (1, "ProcessRaisedException: ", "RankFailedError: rank 1 on .* last seen in "),
    "SIGKILL": (1, "ProcessExitedException: ", "process 1 terminated with signal SIGKILL"),
    "SIGTERM": (128 + signal.SIGTERM, "SIGTERMException: ", ""),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Status of each selected program, three at a time."""

    def fail_in_fork(folder: Path, fault: str) -> int | None:
        return run(fail, folder, start_method="fork", fault=fault)

    what = {"fault": fail_in_fork, "ended_by": end_launching_process}
    yield from start_selected(request, tmp_path_factory, what)


@pytest.mark.parametrize(
    "fault",
    [name if name == "exception" else pytest.param(name, marks=pytest.mark.sweep) for name in FAULTS],
)
def test_rank_fails(runs: Runs, fault: str) -> None:
    """All leave, and the launching process raises what names the rank and tells why."""
    status, folder = runs["fault", fault].result()
    expected, beginning, cause = FAULTS[fault]
    error = (folder / "error").read_text()
    assert status == expected, (folder / "log").read_text()
    assert error.startswith(beginning)
    assert re.search(cause, error)
    # OnExceptionCheckpoint is called in the launching process too, and hides no error there.
    if fault == "exception":
        assert "this process is no rank, since it has launched them" in (folder / "log").read_text()
    assert_gone(folder)


def end_launching_process(folder: Path, name: str) -> int | None:
    """Send it a signal while both ranks train; returns its status."""
    with program(fail, folder, start_method="fork") as launching:
        wait_until(lambda: all((folder / f"rank{rank}.on").exists() for rank in range(2)))
        os.kill(launching.pid, signal.Signals[name])
        launching.join(60)
        wait_until(lambda: not any(is_running(pid) for pid in ranks(folder)))
        return launching.exitcode


@pytest.mark.parametrize("ended_by", ["SIGTERM", "SIGKILL"])
def test_launching_process_is_ended(runs: Runs, ended_by: str) -> None:
    """It is no rank, but no rank outlives it; SIGTERM stops them all after the same step."""
    status, folder = runs["ended_by", ended_by].result()
    log = (folder / "log").read_text()
    if ended_by == "SIGTERM":
        assert status == 128 + signal.SIGTERM, log
        assert "received SIGTERM: all ranks stop after this step." in log
    else:
        # To a rank, torch has Linux send SIGINT as soon as its parent is gone; the other may hear of it
        # first.
        assert any(text in log for text in ("KeyboardInterrupt", "was interrupted in"))
        assert status == -signal.SIGKILL


def test_tuner_is_refused(tmp_path: Path) -> None:
    """What it finds would be lost, and `lr_find` return None."""
    assert run(tune, tmp_path) == 0
    assert "use the callback LearningRateFinder" in (tmp_path / "error").read_text()


# --- Where trained weights go in the launching process, without any ---------------------------------------------------


class Late(pl.LightningModule):
    """Makes its layer in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(2, 2)


class LateOnMesh(Late):
    def configure_model(self) -> None:
        raise ValueError("needs the ranks")


WEIGHTS = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.full((2,), 3.0)}
PATH = Path("somewhere/results.pt")


def test_weights_of_configure_model() -> None:
    """The layers are made where they are needed to hold the weights."""
    module = Late()
    load_trained_weights(module, WEIGHTS, PATH)
    for name, tensor in module.state_dict().items():
        assert tensor.equal(WEIGHTS[name])


def test_weights_without_a_place() -> None:
    """An error that names their file: the module would seem trained."""
    expected = rf"(?s)LateOnMesh is trained, but the module in this process cannot hold the trained .*{PATH}"
    with pytest.raises(RuntimeError, match=expected) as raised:
        load_trained_weights(LateOnMesh(), WEIGHTS, PATH)
    assert raised.value.__cause__ is not None
    with torch.device("meta"):
        module = Late()
        module.configure_model()
    with pytest.raises(RuntimeError, match="some of its tensors are on the meta device"):
        load_trained_weights(module, WEIGHTS, PATH)


def test_weights_of_another_shape() -> None:
    """Such as those of an embedding that `setup` has enlarged."""
    module = Late()
    module.layer = nn.Linear(2, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        load_trained_weights(module, WEIGHTS, PATH)
