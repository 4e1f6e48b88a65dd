"""The example notebook and more cells, executed by a Jupyter kernel, whose children the ranks are."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
CELLS = {
    "refused": """
        from lightning.pytorch.utilities.exceptions import MisconfigurationException
        try:
            L.Trainer(strategy="automodel", accelerator="cpu", devices=2)
        except MisconfigurationException as error:
            print(error)
    """,
    "exact": """
        import os
        from pathlib import Path
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        from tests.launch.launched import Launched, make_trainer
        from tests.trainer.exactness import relative_error
        from tests.launch.launched import reference

        class Here(Launched):
            "A class that only this kernel knows."

        module = Here(Path.cwd())
        weights, test_loss = reference()
        trainer = make_trainer(Path.cwd() / "saved", start_method="fork")
        trainer.fit(module)
        found = module.model.state_dict()
        print(max(relative_error(found[name], weight) for name, weight in weights.items()) < 1e-12)
        print(relative_error(trainer.test(module, verbose=False)[0]["test_loss"], test_loss) < 1e-12)
    """,
    "raised": """
        from torch.multiprocessing import ProcessRaisedException
        try:
            make_trainer(Path.cwd() / "failed", start_method="fork").fit(Here(Path.cwd(), "exception"))
        except ProcessRaisedException as error:
            print(error)
    """,
    "alone": """
        options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
        L.Trainer(strategy="automodel", devices=1, enable_progress_bar=False, **options).fit(
            Writer(), DataLoader(LINES, batch_size=3, collate_fn=collate)
        )
        print("LOCAL_RANK" in os.environ)
    """,
}


# A kernel that starts, and ranks in four cells, take half a minute; `fork` itself stands in
# test_launchers.py.
pytestmark = pytest.mark.sweep


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


def test_example(printed: dict[str, str]) -> None:
    """The kernel holds the trained module."""
    loss, _, text = printed["example"].partition(":")
    assert float(loss.removeprefix("loss ")) < 2.0
    assert text.startswith(" Beautiful is better")


def test_script_start_method_is_refused(printed: dict[str, str]) -> None:
    """With the option that works here, rather than Lightning's name of another strategy."""
    assert "Trainer(strategy=AutomodelStrategy(start_method='fork'), ...)" in printed["refused"]
    assert "ddp_notebook" not in printed["refused"]


def test_trained_weights_are_exact(printed: dict[str, str]) -> None:
    """Those of a single process, in the kernel's own module; and `test` uses them."""
    assert printed["exact"].split()[-2:] == ["True", "True"]


def test_failure_is_raised_in_the_kernel(printed: dict[str, str]) -> None:
    """It names the rank and the cause."""
    assert "rank 1 on " in printed["raised"]
    assert "ValueError: no labels here" in printed["raised"]


def test_one_device_needs_no_process(printed: dict[str, str]) -> None:
    """The default start method then works in a notebook, and leaves nothing that makes a later Trainer wait."""
    assert printed["alone"].strip().endswith("False")
