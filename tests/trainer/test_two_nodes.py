"""Training on two nodes with two ranks each, joined by a network of their own and started by torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.trainer.faults import Model, Ragged
from tests.trainer.two_nodes_script import FAILING_RANK
from tests.two_nodes import NodeResult, connect_two_nodes

SCRIPT = Path(__file__).with_name("two_nodes_script.py")
STEPS, ROWS_A_WINDOW = 4, 4 * 2 * 2  # ranks x micro-batches x rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[NodeResult], Path]:
    """How both launchers ended, and the folder that the ranks wrote to."""
    folder = tmp_path_factory.mktemp("two_nodes")
    with connect_two_nodes() as nodes:
        return nodes.torchrun(SCRIPT, str(folder)), folder


def reference() -> tuple[int, float]:
    """Label tokens and token-mean loss of the last window, in one process on whole windows."""
    torch.manual_seed(0)
    model, data = Model(), Ragged(lambda: None)
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        rows = [data[index] for index in range(step * ROWS_A_WINDOW, (step + 1) * ROWS_A_WINDOW)]
        labels = torch.stack([row["labels"] for row in rows])
        loss = cross_entropy(model(torch.stack([row["input_ids"] for row in rows])).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return int((labels != -100).sum()), loss.item()


def test_training(run: tuple[list[NodeResult], Path]) -> None:
    """One replica on each node; the report of the last step is that of one process; data prepared once a node."""
    results, folder = run
    assert (folder / "result").exists(), results
    replicas, shards, tokens, micro_batches, loss = (folder / "result").read_text().split()
    expected_tokens, expected_loss = reference()
    assert (replicas, shards, tokens, micro_batches) == ("2", "2", str(expected_tokens), "8")
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert sorted(path.name for path in folder.glob("prepared_by_*")) == ["prepared_by_0", "prepared_by_2"]


def test_failure_crosses_the_network(run: tuple[list[NodeResult], Path]) -> None:
    """The last rank of the second node fails; all others say which rank, in which hook, and why."""
    results, folder = run
    assert all(result.status != 0 for result in results), results
    errors = {rank: (folder / f"error_of_{rank}").read_text() for rank in range(4)}
    assert errors.pop(FAILING_RANK) == "ValueError: no labels here"
    for error in errors.values():
        assert error.startswith(f"RankFailedError: rank {FAILING_RANK} on ")
        assert error.endswith("failed in on_train_batch_start: ValueError: no labels here")
