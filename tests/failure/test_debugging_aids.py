"""What docs/debugging.md shows of the hang in examples/hang.py is what torch and this package really print."""

import os
import re
import runpy
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace

from lightning_automodel import initialize_distributed
from lightning_automodel.distributed.collectives import named_barrier
from tests.distributed.launched import Launched, place
from tests.failure.faults import become_rank, exit_statuses, killed_at_the_end, outputs_in, started_ranks
from tests.processes import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "hang.py"
MISTAKE = 1 + next(i for i, line in enumerate(SCRIPT.read_text().splitlines()) if "self.all_gather(" in line)
WORLD_SIZE = 2
PATIENCE_S = 60.0


def _run_script(arguments: list[str], rank: int, port: int, folder: Path) -> None:
    """Of a process group of its own, so that what it starts can be ended with it."""
    os.setsid()
    become_rank(rank, WORLD_SIZE, port, folder)
    dist.set_debug_level_from_env()  # read when torch was imported, before this process was forked
    sys.argv = [str(SCRIPT), "--output-dir", str(folder), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _run_script_in_detail(arguments: list[str], rank: int, port: int, folder: Path) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    _run_script(arguments, rank, port, folder)


def _outputs(folder: Path, run: Callable[..., None], *arguments: str) -> list[str]:
    """What each rank prints until it has left with status 1."""
    ranks = started_ranks(run, list(arguments), folder, WORLD_SIZE)
    with killed_at_the_end(ranks):
        statuses = exit_statuses(ranks, PATIENCE_S)
    outputs = outputs_in(folder, WORLD_SIZE)
    assert statuses == (1,) * WORLD_SIZE, outputs
    return outputs


@pytest.mark.sweep  # waits for a time limit; the suite has others that do
def test_the_timeout_ends_it_and_the_flight_recorder_shows_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank tells where the other was."""
    outputs = _outputs(tmp_path, _run_script, "--timeout", "5", "--flight-recorder")
    hooks = ["training_step", "backward"]
    first = next(rank for rank in range(WORLD_SIZE) if "RankFailedError" not in outputs[rank])
    other = 1 - first
    assert all("All ranks are alive. They were at:\n" in output for output in outputs)
    assert all(f"\n  rank {other} waits in {hooks[other]}, step " in output for output in outputs)
    assert re.search(
        rf"RankFailedError: rank {first} on \S+ waited in vain in {hooks[first]}:", outputs[other]
    )
    assert "No rank has got on for 2.5 s:\n" in outputs[0]
    assert re.search(
        rf"  rank 0 waits in training_step, step \d+, at {SCRIPT}:{MISTAKE} in training_step, for",
        outputs[0],
    )
    assert any("Timed out" in output for output in outputs)
    assert f'hang.py", line {MISTAKE}, in training_step' in outputs[0]
    assert "in reduce_scatter_single" in outputs[1]
    assert not any("Detected mismatch" in output for output in outputs)
    fr_trace.main(["--prefix", "rank_", str(tmp_path / "flight_recorder")])
    printed = caplog.text
    assert "collective: gloo:all_gather" in printed
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in printed
    assert "'all_gather' does not match found collective type: 'all_reduce'" in printed
    assert f"training_step at {SCRIPT}:{MISTAKE}" in printed


def test_detail_names_both_collectives_and_does_not_wait(tmp_path: Path) -> None:
    outputs = _outputs(tmp_path, _run_script_in_detail, "--timeout", "30")
    for rank, collective in enumerate(["ALLGATHER", "_REDUCE_SCATTER_BASE"]):
        running = f"Rank {rank} is running collective: "
        fingerprint = rf"{running}CollectiveFingerPrint\(SequenceNumber=\d+, OpType={collective},"
        assert re.search("Detected mismatch between collectives on ranks. " + fingerprint, outputs[rank])
        assert "Timed out" not in outputs[rank]
    assert f'hang.py", line {MISTAKE}, in training_step' in outputs[0]


def _sum_after_a_barrier() -> float:
    dist.set_debug_level_from_env()
    initialize_distributed("gloo", 1)
    named_barrier("pre_setup", timedelta(minutes=1))
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_detail_finds_no_difference_after_a_barrier_of_three() -> None:
    """Where a monitored barrier on the default group would count as more operations on rank 0."""
    port = free_port()
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    ranks = [Launched(_sum_after_a_barrier, **place(port, rank, 3), **detail) for rank in range(3)]
    outcomes = [rank.outcome() for rank in ranks]
    assert [outcome.value for outcome in outcomes] == [3.0] * 3, outcomes


def test_the_document_names_the_line_of_the_mistake() -> None:
    document = (ROOT / "docs" / "debugging.md").read_text()
    assert set(re.findall(r'hang\.py(?:", line |:)(\d+)', document)) == {str(MISTAKE)}
    assert f"Line {MISTAKE} stands below" in document
