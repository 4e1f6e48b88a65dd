"""Two nodes with two ranks each, joined by a network of their own and started by torchrun, once for all tests."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.doc_blocks import blocks
from tests.failure.faults import Model, Ragged
from tests.launch.two_nodes import ADDRESSES, NodeResult, TwoNodes, connect_two_nodes
from tests.launch.two_nodes_script import FAILING_RANK
from tests.processes import ROOT

SCRIPT = Path(__file__).with_name("two_nodes_script.py")
# Ranks x micro-batches x rows.
STEPS = 4
ROWS_A_WINDOW = 4 * 2 * 2


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    with connect_two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def run(two_nodes: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[NodeResult], Path]:
    """How both launchers ended, and the folder that the ranks wrote to."""
    folder = tmp_path_factory.mktemp("two_nodes")
    return two_nodes.torchrun(SCRIPT, str(folder)), folder


def reference() -> tuple[int, float]:
    """Label tokens and token-mean loss of the last window, in one process on whole windows."""
    torch.manual_seed(0)
    model = Model()
    data = Ragged(lambda: None)
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        rows = [data[index] for index in range(step * ROWS_A_WINDOW, (step + 1) * ROWS_A_WINDOW)]
        labels = torch.stack([row["labels"] for row in rows])
        loss = cross_entropy(
            model(torch.stack([row["input_ids"] for row in rows])).flatten(0, 1), labels.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return int((labels != -100).sum()), loss.item()


@pytest.mark.sweep  # six processes import everything anew
def test_training(run: tuple[list[NodeResult], Path]) -> None:
    """One replica on each node; the report of the last step is that of one process; data prepared once a node."""
    results, folder = run
    assert (folder / "result").exists(), results
    replicas, shards, tokens, micro_batches, loss = (folder / "result").read_text().split()
    expected_tokens, expected_loss = reference()
    assert (replicas, shards, tokens, micro_batches) == ("2", "2", str(expected_tokens), "8")
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert sorted(path.name for path in folder.glob("prepared_by_*")) == ["prepared_by_0", "prepared_by_2"]


@pytest.mark.sweep  # six processes import everything anew
def test_failure_crosses_the_network(run: tuple[list[NodeResult], Path]) -> None:
    """The last rank of the second node fails; all others say which rank, in which hook, and why.

    Gloo keeps a rank in a collective until the process of its peer has ended, which here waits for another one. On a
    busy machine that takes so long that a rank is ended before it has raised, but not without a word.
    """
    results, folder = run
    assert all(result.status != 0 for result in results), results
    assert (folder / f"error_of_{FAILING_RANK}").read_text() == "ValueError: no labels here"
    cause = rf"rank {FAILING_RANK} on \S+ failed in on_train_batch_start: ValueError: no labels here"
    for result, others in zip(results, (2, 1), strict=True):
        assert len(re.findall(f" stops: {cause}", result.output)) == others, result.output
    for rank in range(FAILING_RANK):
        raised = folder / f"error_of_{rank}"
        if raised.exists():
            assert re.fullmatch(f"RankFailedError: {cause}", raised.read_text())


@pytest.mark.sweep  # six processes import everything anew
def test_work_is_done_once_on_each_node_or_once(run: tuple[list[NodeResult], Path]) -> None:
    """Exactly twice with scope="node", by the local rank 0 of each node, and once with scope="global"."""
    results, folder = run
    assert sorted(path.name for path in folder.glob("node_done_by_*")) == [
        "node_done_by_0",
        "node_done_by_2",
    ], results
    assert sorted(path.name for path in folder.glob("global_done_by_*")) == ["global_done_by_0"]
    assert len(list(folder.glob("*_seen_by_*"))) == 2 * 4


@pytest.mark.sweep  # six processes import everything anew
def test_failure_of_a_first_rank_reaches_the_other_node(run: tuple[list[NodeResult], Path]) -> None:
    """The first rank of the first node fails in its block; all others say which rank, where and why."""
    _, folder = run
    errors = [folder.joinpath(f"block_error_of_{rank}").read_text() for rank in range(4)]
    assert errors[0] == "OSError: no space on node 0"
    for error in errors[1:]:
        assert error.startswith("RankFailedError: rank 0 on ")
        assert error.endswith("failed in FirstRankPerNode(scope='node'): OSError: no space on node 0")
    assert not folder.joinpath("ran_on_1").exists()


def test_nodes_have_networks_of_their_own(two_nodes: TwoNodes) -> None:
    """Each reaches the other, and neither has this machine's network."""
    for namespace, device in zip(two_nodes.namespaces, two_nodes.devices, strict=True):
        shown = subprocess.run(
            ["ip", "-netns", namespace, "-brief", "link"], capture_output=True, text=True, check=True
        )
        assert sorted(line.split()[0].split("@")[0] for line in shown.stdout.splitlines()) == sorted(
            [device, "lo"]
        )
    routes = subprocess.run(
        ["ip", "-netns", two_nodes.namespaces[1], "route", "get", ADDRESSES[0]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"dev {two_nodes.devices[1]}" in routes.stdout


def test_nothing_is_left_of_them() -> None:
    with connect_two_nodes() as nodes:
        assert all(namespace in list_namespaces() for namespace in nodes.namespaces)
    assert not any(namespace in list_namespaces() for namespace in nodes.namespaces)


def list_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.sweep  # six processes import everything anew
def test_the_page_on_several_nodes(
    two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script trains on two nodes, and on a second start goes on from the checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(next(block.text for block in blocks(ROOT / "docs" / "several_nodes.md", "python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEVICES", "2")
    monkeypatch.setenv("NUM_NODES", "2")
    for _ in range(2):
        results = two_nodes.torchrun(script, timeout_s=240)
        assert [result.status for result in results] == [0, 0], results
        assert "2 replicas of 2 ranks each" in results[0].output
        assert (tmp_path / "shared" / "last.ckpt").exists()
