"""What docs/debugging.md shows of the hang in examples/hang.py is what torch and this package really print."""

import contextlib
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace

from lightning_automodel import initialize_distributed
from lightning_automodel.distributed.collectives import named_barrier
from tests.processes import forked, free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "hang.py"
MISTAKE = 1 + next(i for i, line in enumerate(SCRIPT.read_text().splitlines()) if "self.all_gather(" in line)
WORLD_SIZE = 2
PATIENCE_S = 60.0


def _in_child(log: Path, function: Callable[..., None], *args: Any) -> None:
    """Call `function` in a process group of its own, so that what it starts can be ended with it."""
    os.setsid()
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, closefd=False) for descriptor in (1, 2))
    function(*args)


def _run_script(arguments: list[str], environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    dist.set_debug_level_from_env()  # read when torch was imported, before this process was forked
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@contextlib.contextmanager
def _started(log: Path, function: Callable[..., None], *args: Any) -> Iterator[BaseProcess]:
    context = forked()
    process = context.Process(target=_in_child, args=(log, function, *args))
    process.start()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


@contextlib.contextmanager
def _ranks(folder: Path, *arguments: str, **variables: str) -> Iterator[list[BaseProcess]]:
    """Run the script on all ranks; `folder/rank<rank>.log` holds what each prints."""
    port = free_port()
    everywhere = {
        "NODE_RANK": "0",
        "WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                _started(
                    folder / f"rank{rank}.log",
                    _run_script,
                    ["--output-dir", str(folder), *arguments],
                    everywhere | {"LOCAL_RANK": str(rank), "RANK": str(rank)} | variables,
                )
            )
            for rank in range(WORLD_SIZE)
        ]


def _outputs(folder: Path, *arguments: str, **variables: str) -> list[str]:
    """What each rank prints until it has left with status 1."""
    with _ranks(folder, *arguments, **variables) as processes:
        deadline = time.monotonic() + PATIENCE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        statuses = [process.exitcode for process in processes]
    outputs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(WORLD_SIZE)]
    assert statuses == [1] * WORLD_SIZE, outputs
    return outputs


@pytest.mark.sweep  # waits for a time limit; the suite has others that do
def test_the_timeout_ends_it_and_the_flight_recorder_shows_what_differs(tmp_path: Path) -> None:
    """Each rank tells where the other was."""
    outputs = _outputs(tmp_path, "--timeout", "5", "--flight-recorder")
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
    log = tmp_path / "log"
    with _started(log, fr_trace.main, ["--prefix", "rank_", str(tmp_path / "flight_recorder")]) as process:
        process.join(PATIENCE_S)
    printed = log.read_text()
    assert "collective: gloo:all_gather" in printed
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in printed
    assert "'all_gather' does not match found collective type: 'all_reduce'" in printed
    assert f"training_step at {SCRIPT}:{MISTAKE}" in printed


def test_detail_names_both_collectives_and_does_not_wait(tmp_path: Path) -> None:
    outputs = _outputs(tmp_path, "--timeout", "30", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    for rank, collective in enumerate(["ALLGATHER", "_REDUCE_SCATTER_BASE"]):
        running = f"Rank {rank} is running collective: "
        fingerprint = rf"{running}CollectiveFingerPrint\(SequenceNumber=\d+, OpType={collective},"
        assert re.search("Detected mismatch between collectives on ranks. " + fingerprint, outputs[rank])
        assert "Timed out" not in outputs[rank]
    assert f'hang.py", line {MISTAKE}, in training_step' in outputs[0]


def _sum_after_a_barrier(rank: int, world_size: int, port: int) -> None:
    os.environ.update(TORCH_DISTRIBUTED_DEBUG="DETAIL", GLOO_SOCKET_IFNAME="lo")
    dist.set_debug_level_from_env()
    place = f"tcp://127.0.0.1:{port}"
    initialize_distributed("gloo", 1, init_method=place, rank=rank, world_size=world_size)
    named_barrier("pre_setup", timedelta(minutes=1))
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", total.item())


def test_detail_finds_no_difference_after_a_barrier_of_three(tmp_path: Path) -> None:
    """Where a monitored barrier on the default group would count as more operations on rank 0."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        logs = [tmp_path / f"rank{rank}.log" for rank in range(3)]
        processes = [
            stack.enter_context(_started(log, _sum_after_a_barrier, rank, len(logs), port))
            for rank, log in enumerate(logs)
        ]
        for process in processes:
            process.join(PATIENCE_S)
    outputs = [log.read_text() for log in logs]
    assert all("sum 3.0" in output for output in outputs), outputs


@pytest.mark.sweep  # likewise
def test_the_debug_server_shows_where_every_rank_stands(tmp_path: Path) -> None:
    pytest.importorskip("tabulate", reason="torch's debug server needs tabulate")
    deadline = time.monotonic() + PATIENCE_S
    stacks: list[str] = []
    with _ranks(tmp_path, "--timeout", "120", "--debug-server", "0"):
        while not (len(stacks) == 1 + WORLD_SIZE and "in reduce_scatter_single" in stacks[2]):
            assert time.monotonic() < deadline, (tmp_path / "rank0.log").read_text()
            time.sleep(0.1)
            newest = sorted((tmp_path / "stacks").glob("stacks_*.txt"))[-1:]
            stacks = re.split("=== Rank", newest[0].read_text()) if newest else []
    assert f'hang.py", line {MISTAKE} in training_step' in stacks[1]
    assert "hang.py" in stacks[2]
    assert "in training_step" not in stacks[2]


def test_the_document_names_the_line_of_the_mistake() -> None:
    document = (ROOT / "docs" / "debugging.md").read_text()
    assert set(re.findall(r'hang\.py(?:", line |:)(\d+)', document)) == {str(MISTAKE)}
    assert f"Line {MISTAKE} stands below" in document
