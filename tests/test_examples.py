"""The example of the README's picture: its figures come out, and it draws them."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.image
import pytest

from tests.processes import ROOT, run_anew

SCRIPT = ROOT / "examples" / "why_token_weighting.py"


# Two ranks that import everything anew, and a corpus, take half a minute.
@pytest.mark.sweep
def test_why_token_weighting(tmp_path: Path) -> None:
    """Only this strategy has the truth's gradients, in each step; Lightning's are off by more than a hundredth."""
    picture = tmp_path / "picture.png"
    status, printed = run_anew([sys.executable, str(SCRIPT), "--quick", "--output", str(picture)], tmp_path, 200)
    assert status == 0, printed
    table = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("|")]
    medians, largest = ({row[1]: float(row[column]) for row in table[2:]} for column in (2, 3))
    assert largest["AutomodelStrategy"] <= 1e-5
    assert medians["Lightning DDPStrategy"] > 0.01
    assert medians["Lightning ModelParallelStrategy"] > 0.01
    assert matplotlib.image.imread(picture)[..., :3].std() > 0.05  # 0 where it is blank
