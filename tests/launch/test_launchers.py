"""`python script.py`: its ranks train exactly; one that ends badly then is named, and nobody is left behind.

Each case imports everything anew in two processes, so a default run takes two; `test_faults.py` and
`unit/test_children.py` meet the other ends in ranks that start sooner.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.processes import run_anew
from tests.trainer.exactness import Outcome, TinyDecoder, weight_error
from tests.trainer.plain import plain_weights
from tests.trainer.runs import CASE, TOLERANCE

SCRIPT = """
import os, signal, sys
if sys.argv[1] == "import" and os.environ.get("LOCAL_RANK") == "1":
    raise ImportError("no such module")
import lightning.pytorch as pl
import torch
from lightning_automodel import AutomodelStrategy
from tests.trainer.exactness import full_weights
from tests.trainer.runs import SILENT, LabelledModule, loader

class Loads(LabelledModule):
    def train_dataloader(self):
        return loader()

class Broken(Loads):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1 and sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 3 and self.global_rank == 1 and sys.argv[1] == "leave":
            os._exit(0)
        if batch_idx == 3 and self.global_rank == 1 and sys.argv[1] == "raise":
            raise ValueError("no labels here")
        return super().training_step(batch, batch_idx)

def train(module):
    options = {"init_method": sys.argv[2]} if len(sys.argv) > 2 else {}
    trainer = pl.Trainer(
        strategy=AutomodelStrategy(timeout=1, **options), accelerator="cpu", devices=2, max_epochs=1,
        accumulate_grad_batches=3, use_distributed_sampler=False, **SILENT,
    )
    trainer.fit(module)
    return full_weights(module.model)

if __name__ == "__main__":
    torch.set_num_threads(1)
    weights = train(Loads())
    torch.save(weights, f"{os.environ.get('LOCAL_RANK', 0)}.pt")
    train(Broken())
"""
CASES = {
    "kill": (1, "its process was ended by SIGKILL"),
    "import": (-signal.SIGTERM, "rank 1 ended with exit status 1 before it had joined the others."),
}
IN_THE_SWEEP = {
    "raise": (1, "failed in training_step: ValueError: no labels here"),
    "leave": (1, "its process ended with exit status 0"),
}


def _run(folder: Path, what: str, *arguments: str) -> tuple[int, str, Path]:
    """Exit status, output, and the folder with what each rank had trained before."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return *run_anew([sys.executable, str(script), what, *arguments], folder, timeout_s=120), folder


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Every selected case, two at a time."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = [item.callspec.params["what"] for item in items]
    with ThreadPoolExecutor(max_workers=2) as executor:
        yield {what: executor.submit(_run, tmp_path_factory.mktemp("script"), what) for what in selected}


@pytest.mark.parametrize("what", [*CASES, *(pytest.param(what, marks=pytest.mark.sweep) for what in IN_THE_SWEEP)])
def test_script_with_two_ranks(runs: dict[str, Future], what: str) -> None:
    """The launching rank leaves with the cause, also where the other never came."""
    status, message = (CASES | IN_THE_SWEEP)[what]
    found, output, folder = runs[what].result()
    assert found == status, output
    assert message in output
    assert len(list(folder.glob("*.pt"))) == (0 if what == "import" else 2)
    assert_exact(folder)


def assert_exact(folder: Path) -> None:
    """What ranks have written there are the weights of one process."""
    expected = plain_weights(TinyDecoder(CASE.seed).double(), 3, CASE)
    for path in folder.glob("*.pt"):
        assert weight_error(Outcome(torch.load(path, weights_only=True), None), Outcome(expected, None)) <= TOLERANCE


@pytest.mark.sweep  # that ranks meet at a file is shown faster by test_process_group
def test_ranks_meet_at_a_file(tmp_path: Path) -> None:
    """`init_method` reaches the process group."""
    status, output, _ = _run(tmp_path, "nothing", f"file://{tmp_path / 'meeting'}")
    assert status == 0, output
    assert len(list(tmp_path.glob("*.pt"))) == 2
    assert_exact(tmp_path)
    assert (tmp_path / "meeting").exists()
