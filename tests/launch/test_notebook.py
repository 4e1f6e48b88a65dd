"""The example notebook and more cells, executed by a Jupyter kernel, whose children the ranks are."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
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


def test_cells(printed: dict[str, str]) -> None:
    """The example trains, the kernel holds a trained module, and one device leaves no variables behind.

    What is refused, and how a failure is told: `test_launchers.py`.
    """
    assert re.search(r"^loss [01]\.\d+: Beautiful is better", printed["example"])
    assert printed["exact"].endswith("True\n")
    assert printed["alone"].endswith("False\n")
