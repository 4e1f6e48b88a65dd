"""Every start method: it trains exactly, its results are in the launching process, and Ctrl-C ends all of it.

Faults are named, every wait ends, and no rank is left behind, whichever process ends first.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import lightning.pytorch as pl
import nbclient
import nbformat
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, destroy_global_state
from lightning_automodel.launch.forks import ForkLauncher, load_trained_weights
from tests.launch.launched import (
    PATIENCE_S,
    Runs,
    Terminal,
    assert_exact,
    assert_gone,
    fail,
    is_running,
    program,
    ranks,
    reference,
    run,
    start_selected,
    train,
    train_and_fail,
    tune,
    wait_until,
)
from tests.processes import ROOT
from tests.trainer.exactness import micro_batches, relative_error
from tests.trainer.runs import CASE, SILENT, TOLERANCE, LabelledModule, sampled

# What happens to rank 1 of a script; the status of rank 0; what is printed.
SCRIPT_FAILS = {
    "SIGKILL": (1, "its process was ended by signal 9 (Killed)"),
    "exception": (1, "failed in training_step: ValueError: no labels here"),
    "leave": (1, "its process ended with exit status 0"),
    "broken": (1, "before all ranks had joined, its process ended with exit status 1"),
}


# What happens to rank 1 of forked ranks; the status of the launching process; what its error says.
# The rank that has failed ends first, or the one that knows of it.
FORK_FAILS = {
    "exception": (1, "ProcessRaisedException: ", "ValueError: no labels here"),
    "finish": (1, "ProcessRaisedException: ", r"sys\.exit\(0\) has ended the run|SystemExit: exit status 0"),
    "exit": (1, "", r"process 1 terminated with exit code 3|SystemExit: exit status 3"),
    "leave": (1, "ProcessRaisedException: ", "RankFailedError: rank 1 on .* last seen in "),
    "SIGKILL": (1, "ProcessExitedException: ", "process 1 terminated with signal SIGKILL"),
    "SIGTERM": (128 + signal.SIGTERM, "SIGTERMException: ", ""),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Every selected program, three at a time, as what they start imports for long: its status, or what it said."""

    def train_both(folder: Path, method: str) -> int | None:
        # Testing starts ranks just as training does.
        return run(train, folder, engines=["fsdp2", "ddp"], tests=True, start_method=method)

    def fail_in_script(folder: Path, fault: str) -> int | None:
        # Each rank imports everything anew, which takes longer on a busy machine than forked ranks ever
        # wait.
        return run(train_and_fail, folder, is_script=True, fault=fault, timeout=PATIENCE_S / 60)

    def fail_in_fork(folder: Path, fault: str) -> int | None:
        return run(fail, folder, start_method="fork", fault=fault)

    what = {
        "forked": fail_in_fork,
        "ended_by": end_launching_process,
        "fault": fail_in_script,
        "interrupted": _interrupt,
        "method": train_both,
    }
    yield from start_selected(request, tmp_path_factory, what)


@pytest.mark.parametrize("method", ["fork"])
def test_results_of_workers(runs: Runs, method: str) -> None:
    """Weights, metrics and checkpoint paths are in the launching process; test takes the trained weights."""
    status, folder = runs["method", method].result()
    assert status == 0, (folder / "log").read_text()
    sharded = results_in(folder, "fsdp2")
    results_in(folder, "ddp")
    _, test_loss = reference()
    assert all(relative_error(loss, test_loss) < TOLERANCE for loss in sharded["tested"])
    assert sharded["metrics"] == ["test_loss"]


def results_in(folder: Path, engine: str = "fsdp2") -> dict[str, Any]:
    """What the launching process has: the weights of one process, and the metrics of both ranks."""
    found = torch.load(folder / "found.pt")[engine]
    assert_exact(found["weights"])
    assert found["micro_batches"] == 2 * CASE.num_batches
    assert found["best_model_path"].startswith(str(folder / engine / "best"))
    assert found["loss"] > 0
    return found


@pytest.mark.parametrize("fault", sampled(SCRIPT_FAILS, ["SIGKILL"]))
def test_script_fails(runs: Runs, fault: str) -> None:
    """The launching rank, which has trained exactly before, leaves with the cause, also where the other never came."""
    status, folder = runs["fault", fault].result()
    output = (folder / "log").read_text()
    expected, message = SCRIPT_FAILS[fault]
    assert status == expected, output
    assert message in output
    if fault != "broken":
        results_in(folder)
        assert_gone(folder)


@pytest.mark.parametrize("interrupted", ["fork", pytest.param("popen", marks=pytest.mark.sweep)])
def test_ctrl_c(runs: Runs, interrupted: str) -> None:
    """One rank waits in a collective, one sleeps: both leave at once, without a traceback, as under Lightning."""
    (status, output, seconds), _ = runs["interrupted", interrupted].result()
    assert status == 1, output
    assert "Detected KeyboardInterrupt" in output
    assert "Traceback" not in output
    # At the start of a line: torch's own log may quote what a store of a process that has left raised.
    assert not re.search(r"^\w*Error", output, re.MULTILINE)
    # Some three seconds on an idle machine; any of the limits for a rank that does not answer would be
    # longer.
    assert seconds < 60


def _interrupt(folder: Path, method: str) -> tuple[int | None, str, float]:
    """Press Ctrl-C once both ranks train: the program's status, what it printed, and how long it took to leave."""
    terminal = Terminal()
    options = {"fault": "slow", "start_method": method, "timeout": PATIENCE_S / 60}
    with program(fail, folder, terminal.name, is_script=method == "popen", **options) as launching:
        wait_until(lambda: len(list(folder.glob("rank*.on"))) == 2 or not launching.is_alive())
        assert launching.is_alive(), terminal.close()
        pressed_at = time.monotonic()
        terminal.press_ctrl_c()
        launching.join(PATIENCE_S)
        seconds = time.monotonic() - pressed_at
        wait_until(lambda: not any(is_running(pid) for pid in ranks(folder)))
        return launching.exitcode, terminal.close(), seconds


@pytest.mark.parametrize("forked", sampled(FORK_FAILS, ["exception"]))
def test_rank_fails(runs: Runs, forked: str) -> None:
    """All leave, and the launching process raises what names the rank and tells why."""
    status, folder = runs["forked", forked].result()
    expected, beginning, cause = FORK_FAILS[forked]
    error = (folder / "error").read_text()
    assert status == expected, (folder / "log").read_text()
    assert error.startswith(beginning)
    assert re.search(cause, error)
    # OnExceptionCheckpoint is called in the launching process too, and hides no error there.
    if forked == "exception":
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


# --- Choosing a launcher, without any process -------------------------------------------------------------------------


def make_trainer(start_method: Any, devices: int = 2) -> pl.Trainer:
    return pl.Trainer(
        strategy=AutomodelStrategy(start_method=start_method), accelerator="cpu", devices=devices, **SILENT
    )


def test_launchers_in_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only forked ranks know what the cells defined; no script could run again, but one device needs no other rank."""
    launcher = make_trainer("fork").strategy.launcher
    assert isinstance(launcher, ForkLauncher)
    assert launcher.is_interactive_compatible
    assert not make_trainer("popen").strategy.launcher.is_interactive_compatible
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(Exception, match=r"AutomodelStrategy\(start_method='fork'\)"):
        make_trainer("popen")
    make_trainer("popen", devices=1)


def test_refused_start_methods() -> None:
    """With the valid ones."""
    with pytest.raises(ValueError, match=r"start_method must be one of 'popen', 'fork', got 'thread'\."):
        AutomodelStrategy(start_method="thread")
    for method in ("spawn", "forkserver"):
        with pytest.raises(
            ValueError, match=rf"'{method}' .* pass 'popen' in a script, .* 'fork' in a notebook"
        ):
            AutomodelStrategy(start_method=method)


def test_no_effect_where_processes_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else has started them."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.warns(
        UserWarning, match="start_method='fork' has no effect: LightningEnvironment says that"
    ):
        make_trainer("fork")


def test_after_a_run_on_one_device() -> None:
    """Forked ranks would be in the group that this process is in since then: it must leave it first."""
    alone = {"accelerator": "cpu", "devices": 1, "max_steps": 1, **SILENT}
    pl.Trainer(strategy=AutomodelStrategy(), **alone).fit(
        LabelledModule(), DataLoader(micro_batches(CASE)[0], batch_size=None)
    )
    with pytest.raises(
        RuntimeError, match=r"is in a process group.* call lightning_automodel\.destroy_global_state"
    ):
        make_trainer("fork").fit(LabelledModule(), [])
    destroy_global_state()


def test_second_fit_is_refused() -> None:
    """Optimizer states and loops were in processes that have ended."""
    trainer = make_trainer("fork")
    trainer.strategy.launcher._has_fitted = True
    with pytest.raises(NotImplementedError, match=r"make a new Trainer and call fit\(ckpt_path=\.\.\.\)"):
        trainer.fit(pl.LightningModule(), [])


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
    module.layer = nn.Linear(2, 3)  # as an embedding that `setup` has enlarged
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        load_trained_weights(module, WEIGHTS, PATH)


# --- The example notebook and more cells, executed by a Jupyter kernel, whose children the ranks are ------------------

CELLS = {
    "exact": """
        import os
        from pathlib import Path
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        from tests.launch.launched import Launched, assert_exact, make_trainer, reference

        class Here(Launched):
            "A class that only this kernel knows."

        module = Here(Path.cwd())
        trainer = make_trainer(Path.cwd() / "saved", start_method="fork")
        trainer.fit(module)
        assert_exact(module.model.state_dict())
        (tested,) = trainer.test(module, verbose=False)
        print(abs(tested["test_loss"] / reference()[1] - 1) < 1e-12)
    """,
    "alone": """
        options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
        L.Trainer(strategy="automodel", devices=1, enable_progress_bar=False, **options).fit(
            Writer(), DataLoader(LINES, batch_size=3, collate_fn=collate)
        )
        print("LOCAL_RANK" in os.environ)
    """,
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each added cell printed, and the example's last cell, called "example"."""
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    example = len(notebook.cells) - 1
    notebook.cells += [nbformat.v4.new_code_cell(dedent(source)) for source in CELLS.values()]
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(folder))
        for name in ("OMP_NUM_THREADS", "LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "NODE_RANK"):
            patch.delenv(name, raising=False)
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=250, kernel_name="python3", resources=resources).execute()
    texts = (
        "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells[example:]
    )
    return dict(zip(("example", *CELLS), texts, strict=True))


@pytest.mark.sweep  # a kernel that starts, and ranks in four cells, take half a minute
def test_notebook(printed: dict[str, str]) -> None:
    """The example trains, the kernel holds a trained module, and one device leaves no variables behind."""
    assert re.search(r"^loss [01]\.\d+: Beautiful is better", printed["example"])
    assert printed["exact"].endswith("True\n")
    assert printed["alone"].endswith("False\n")
