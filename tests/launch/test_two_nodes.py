"""Two nodes with two ranks each, joined by a network of their own and started by torchrun.

What happens where one of them fails is asked in `failure/test_nodes.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doc_blocks import blocks
from tests.launch.two_nodes import connect_two_nodes
from tests.processes import ROOT


@pytest.mark.sweep  # six processes import everything anew
def test_the_page_on_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script trains on two nodes, and on a second start goes on from the checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(next(block.text for block in blocks(ROOT / "docs" / "several_nodes.md", "python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEVICES", "2")
    monkeypatch.setenv("NUM_NODES", "2")
    with connect_two_nodes() as two_nodes:
        for _ in range(2):
            results = two_nodes.torchrun(script, timeout_s=240)
            assert [result.status for result in results] == [0, 0], results
            assert "2 replicas of 2 ranks each" in results[0].output
            assert (tmp_path / "shared" / "last.ckpt").exists()
