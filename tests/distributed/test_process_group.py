"""Joining and leaving in real processes: who comes, who does not, what everybody is told, and what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_automodel.distributed import join
from lightning_automodel.distributed.process_group import (
    DistInfo,
    destroy_global_state,
    initialize_distributed,
    join_process_group,
)
from tests.distributed.launched import PATIENCE_S, Launched, place
from tests.processes import forked, free_port
from tests.rank_process import LOOPBACK, LOOPBACK_INTERFACE

TIMEOUT = timedelta(seconds=PATIENCE_S)
BRIEF = timedelta(seconds=8)
NOT_THERE = "stopped, dead, cut off, or not arrived yet"


@contextlib.contextmanager
def _listener() -> Iterator[int]:
    """A program that accepts connections and says nothing; its port."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        yield listener.getsockname()[1]


def _host_store() -> dist.TCPStore:
    """A store that lives in the pytest process, as the one of a launcher does."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=TIMEOUT,
    )


# --- What the processes do --------------------------------------------------------------------------------------------


def _join_and_sum(
    arguments: dict[str, Any], delay_s: float = 0.0, backend: str = "gloo", timeout: timedelta = TIMEOUT
) -> tuple[DistInfo, float]:
    """Join after a while, add up the ranks and leave."""
    time.sleep(delay_s)
    info = initialize_distributed(backend, timeout, **arguments)
    total = torch.tensor(float(info.rank))
    dist.all_reduce(total)
    destroy_global_state()
    assert not dist.is_initialized()
    return info, total.item()


def _wait_briefly(arguments: dict[str, Any], all_started: Barrier) -> tuple[DistInfo, float]:
    """Join with the others of the case, whose start may take long on a loaded machine."""
    all_started.wait(PATIENCE_S)
    return _join_and_sum(arguments, timeout=BRIEF)


def _wait_briefly_as_lightning_does(rank: int, world_size: int) -> None:
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(world_size)
    join_process_group(environment, "gloo", BRIEF, None, lambda: None, lambda *_: None)


# --- Everybody comes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    ["environment", "file", *(pytest.param(way, marks=pytest.mark.sweep) for way in ("tcp", "launcher"))],
)
def test_all_come(way: str, tmp_path: Path) -> None:
    """By each way to meet, though one rank is late."""
    store = _host_store()
    ports = {"environment": free_port(), "launcher": store.port}
    methods = {"tcp": f"tcp://{LOOPBACK}:{free_port()}", "file": f"file://{tmp_path}/meet"}
    ranks = []
    for rank in range(3):
        arguments = {"rank": rank, "world_size": 3, "init_method": methods[way]} if way in methods else {}
        environment = {} if way in methods else place(ports[way], rank, 3)
        if way == "launcher":
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        ranks.append(Launched(_join_and_sum, arguments, 0.2 * (rank == 1), **environment))
    outcomes = [rank.outcome() for rank in ranks]
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    cpu = torch.device("cpu")
    assert [o.value for o in outcomes] == [
        (DistInfo("gloo", rank, 3, cpu, rank == 0), 3.0) for rank in range(3)
    ]


# --- Again and again --------------------------------------------------------------------------------------------------


def _fail_then_join() -> tuple[str, float]:
    """Rank 0 comes alone first; then both come."""
    error = ""
    if os.environ["RANK"] == "0":
        try:
            initialize_distributed("gloo", timedelta(seconds=0.3))
        except RuntimeError as exception:
            error = str(exception)
    return error, _join_and_sum({}, 0.8 * int(os.environ["RANK"]))[1]


def test_a_store_serves_another_try_after_a_failed_one() -> None:
    store = _host_store()
    ranks = [
        Launched(_fail_then_join, **place(store.port, rank, 2), TORCHELASTIC_USE_AGENT_STORE="True")
        for rank in (0, 1)
    ]
    outcomes = [rank.outcome() for rank in ranks]
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert "for ranks 1:" in outcomes[0].value[0]
    assert [outcome.value[1] for outcome in outcomes] == [1.0, 1.0]


# --- Leaving ----------------------------------------------------------------------------------------------------------


def _read_late() -> str:
    """Rank 0 leaves at once, rank 1 reads from the store that lives in rank 0 some time later."""
    info = initialize_distributed("gloo", TIMEOUT)
    value = ""
    if not info.is_main:
        time.sleep(1.0)
        store = dist.distributed_c10d._get_default_store()
        store.set("last", "words")
        value = store.get("last").decode()
    destroy_global_state()
    return value


def test_the_store_stays_until_the_last_rank_has_left() -> None:
    port = free_port()
    ranks = [Launched(_read_late, **place(port, rank, 2)) for rank in (0, 1)]
    assert [(outcome.error, outcome.value) for outcome in (rank.outcome() for rank in ranks)] == [
        ("", ""),
        ("", "words"),
    ]


def _leave_alone() -> float:
    info = initialize_distributed("gloo", TIMEOUT)
    if not info.is_main:
        os.kill(os.getpid(), signal.SIGKILL)
    started_at = time.monotonic()
    join.meeting.LINGER_S = 1.0
    destroy_global_state()
    return time.monotonic() - started_at


def test_a_dead_rank_is_not_waited_for_beyond_the_bound() -> None:
    port = free_port()
    launched = [Launched(_leave_alone, **place(port, rank, 2)) for rank in (0, 1)]
    outcome = launched[0].outcome()
    launched[1].process.join()
    assert outcome.error == ""
    assert outcome.value < 10.0


def _join_without_leaving(how: str, environment: dict[str, str]) -> None:
    os.environ.update(environment, GLOO_SOCKET_IFNAME=LOOPBACK_INTERFACE)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    initialize_distributed("gloo", TIMEOUT)
    if how == "raise":
        raise KeyError(how)
    if how == "exit":
        sys.exit(3)


@pytest.mark.parametrize(("how", "exit_code"), [("return", 0), ("raise", 1), ("exit", 3)])
def test_a_multiprocessing_child_leaves_when_it_ends(how: str, exit_code: int) -> None:
    """There, functions registered with atexit are not called."""
    store = _host_store()
    children = []
    for rank in (0, 1):
        environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", **place(store.port, rank, 2)}
        children.append(forked().Process(target=_join_without_leaving, args=(how, environment)))
        children[rank].start()
    for child in children:
        child.join(PATIENCE_S)
    assert [child.exitcode for child in children] == [exit_code, exit_code]
    assert store.check([f"lightning_automodel/joining/0/known/the group/{rank}" for rank in (0, 1)])


# --- Somebody does not ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Processes that fail to meet, and what the message of each must say."""

    launched: list[Launched]
    parts: list[str]


@pytest.fixture(scope="module")
def joins_in_vain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Any, Path]]:
    """A process that joins where another program listens, which waits beside those of `failures`."""
    folder = tmp_path_factory.mktemp("no_store")
    with _listener() as port:
        process = forked().Process(target=_join_into_a_log, args=(folder / "log", place(port, 1, 2)))
        process.start()
        yield port, process, folder


def _briefly(port: int, ranks: tuple[int, ...], world_size: int, **environment: str) -> list[Launched]:
    all_started = forked().Barrier(len(ranks))
    return [
        Launched(_wait_briefly, {}, all_started, **place(port, rank, world_size), **environment)
        for rank in ranks
    ]


@pytest.fixture(scope="module", autouse=True)
def failures(joins_in_vain: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """All at the same time, and beside the tests above: these processes mostly wait."""
    agent = _host_store()
    ports = {name: free_port() for name in CASES}
    at = {name: f"{LOOPBACK}:{port}" for name, port in ports.items()}
    file = f"file://{tmp_path_factory.mktemp('meet')}/file"
    waited = f"within {BRIEF.total_seconds():g} s"
    twins = [Launched(_join_and_sum, {}, **place(ports["twins"], rank, 3)) for rank in (0, 1, 1)]
    sizes = [Launched(_join_and_sum, {}, **place(ports["sizes"], rank, 3 + rank)) for rank in (0, 1)]
    backends = [
        Launched(_join_and_sum, {}, 0.0, name, **place(ports["backends"], rank, 3))
        for rank, name in enumerate(["gloo", "cpu:gloo"])
    ]
    both_started = forked().Barrier(2)
    by_file = [
        Launched(_wait_briefly, {"init_method": file, "rank": rank, "world_size": 3}, both_started)
        for rank in (1, 2)
    ]
    by_agent = _briefly(agent.port, (0, 2), 3, TORCHELASTIC_USE_AGENT_STORE="True")
    meeting_place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(ports["lightning"])}
    by_lightning = [Launched(_wait_briefly_as_lightning_does, 0, 2, **meeting_place)]
    by_environment = _briefly(ports["environment"], (0, 2), 4)

    def missing(launched: list[Launched], ranks: str, place: str) -> Case:
        return Case(launched, [f"for ranks {ranks}:", NOT_THERE, f"join at {place}", waited])

    with _listener() as busy:
        yield {
            "environment": missing(by_environment, "1, 3", at["environment"]),
            "file": missing(by_file, "0", file),
            "launcher": missing(by_agent, "1", f"{LOOPBACK}:{agent.port}"),
            "no host": Case(
                _briefly(ports["no host"], (1,), 2),
                ["rank 0 on an unknown host", "ConnectionRefusedError", at["no host"], waited],
            ),
            "lightning": missing(by_lightning, "1", at["lightning"]),
            "port in use": Case(
                _briefly(busy, (0,), 2),
                ["rank 0 on ", "holds the store", f"port: {busy}", "EADDRINUSE", f"{LOOPBACK}:{busy}"],
            ),
            "twins": Case(
                twins,
                [
                    "rank 1 on ",
                    "two processes joined as this rank",
                    f"{socket.gethostname()} pid ",
                    "RANK of its own",
                ],
            ),
            "sizes": Case(
                sizes, ["rank ", "world size 3", "world size 4", "give every rank the same WORLD_SIZE"]
            ),
            "backends": Case(backends, ["backend gloo", "backend cpu:gloo", "give every rank the same"]),
        }


CASES = [
    *("environment", "file", "launcher", "no host", "lightning"),
    *("port in use", "twins", "sizes", "backends"),
]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_that_is_there_is_told_the_culprit(failures: dict[str, Case], case: str) -> None:
    """Not much later than the timeout."""
    outcomes = [launched.outcome() for launched in failures[case].launched]
    parts = failures[case].parts
    assert max(outcome.seconds for outcome in outcomes) < 20.0
    for outcome in outcomes:
        assert [part for part in parts if part not in outcome.error] == [], outcome.error
        assert "Traceback" not in outcome.error
        assert outcome.error.count("\n") == 0
    assert len({outcome.error for outcome in outcomes}) == 1


def test_what_listens_is_no_store(joins_in_vain: tuple[int, Any, Path]) -> None:
    """It accepts connections, as the system does for a stopped host. A call never returns: the process ends."""
    port, process, folder = joins_in_vain
    process.join(PATIENCE_S)
    printed = (folder / "log").read_text()
    assert process.exitcode == 1, printed
    assert " stops: rank 0 on an unknown host missed heartbeats" in printed
    assert (
        "which holds the store of the process group, has not answered for 10 s; all ranks must join at"
        in printed
    )
    assert f"{LOOPBACK}:{port} within 5 s" in printed


def _join_into_a_log(log: Path, environment: dict[str, str]) -> None:
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    os.environ.update(environment, GLOO_SOCKET_IFNAME=LOOPBACK_INTERFACE)
    _join_and_sum({}, timeout=timedelta(seconds=5))
