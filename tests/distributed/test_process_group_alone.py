"""Who a process is by its environment and arguments, and a world of one, which needs neither of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_mock import MockerFixture

from lightning_automodel.distributed import join, process_group
from lightning_automodel.distributed.failures import RankFailedError
from lightning_automodel.distributed.process_group import (
    DistInfo,
    destroy_global_state,
    get_local_world_size_preinit,
    get_rank_safe,
    get_world_size_safe,
    initialize_distributed,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.copy():
        if name.startswith(("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


def _set(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


PLACE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
FIRST_OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", **PLACE}


@pytest.mark.parametrize(
    ("environment", "arguments", "parts"),
    [
        ({}, {"init_method": "env://"}, ["RANK is None and WORLD_SIZE is None"]),
        ({}, {"init_method": "tcp://10.0.0.1", "rank": 0, "world_size": 2}, ["has 10.0.0.1 and no port"]),
        ({}, {"init_method": "tcp://10.0.0.1:1?rank=0&world_size=2"}, ["pass rank= and world_size="]),
        (
            {},
            {"timeout_minutes": timedelta(0)},
            ["timeout must be a positive and finite timedelta or number of minutes"],
        ),
        ({"RANK": "1"}, {}, ["RANK is 1 and WORLD_SIZE is None", "torchrun"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            {},
            ["MASTER_ADDR and MASTER_PORT", "has no address and no port"],
        ),
        (FIRST_OF_TWO | {"RANK": "2"}, {}, ["Rank 2 does not exist in a world of 2", "0 to WORLD_SIZE - 1"]),
        (FIRST_OF_TWO | {"RANK": "one"}, {}, ["RANK is 'one'", "whole number"]),
        (FIRST_OF_TWO | {"RANK": "-1"}, {}, ["RANK is '-1'", "0 or more"]),
        (FIRST_OF_TWO | {"MASTER_PORT": "70000"}, {}, ["has 10.0.0.1 and 70000", "65535"]),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], arguments: dict[str, Any], parts: list[str]
) -> None:
    """In the environment, or in the arguments."""
    _set(monkeypatch, **environment)
    with pytest.raises(ValueError, match=r".") as caught:
        initialize_distributed("gloo", **arguments)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert not dist.is_initialized()


def test_the_environment_tells_what_the_arguments_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK="1", WORLD_SIZE="4", **PLACE)
    assert join.locate() == join.Rendezvous(1, 4, "env://", ("10.0.0.1", 29500))
    assert join.locate(rank=2).rank == 2
    assert join.locate().place == "10.0.0.1:29500"
    assert join.locate("tcp://[::1]:7").address == ("::1", 7)


def test_rank_0_hosts_the_store_unless_the_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, WORLD_SIZE="2", **PLACE)
    hosts = [join.locate(rank=rank).hosts_store for rank in (0, 1)]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert (hosts, join.locate(rank=0).hosts_store) == ([True, False], False)


@pytest.mark.parametrize(
    ("backend", "kind", "count", "local_rank", "expected"),
    [
        ("gloo", "cuda", 8, 3, "cpu"),
        ("cpu:gloo", "cuda", 8, 3, "cpu"),
        ("nccl", "cuda", 8, 3, "cuda:3"),
        ("nccl", "cuda", 1, 3, "cuda:0"),
        ("cpu:gloo,cuda:nccl", "cuda", 8, 1, "cuda:1"),
        ("xccl", "xpu", 2, 1, "xpu:1"),
        ("ucc", "cuda", 2, 1, "cuda:1"),
        ("ucc", None, 0, 1, "cpu"),
    ],
)
def test_the_device_follows_from_backend_and_local_rank(
    mocker: MockerFixture, backend: str, kind: str | None, count: int, local_rank: int, expected: str
) -> None:
    mocker.patch.object(torch.accelerator, "current_accelerator", return_value=kind and torch.device(kind))
    mocker.patch.object(torch.accelerator, "device_count", return_value=count)
    assert process_group.choose_device(backend, local_rank) == torch.device(expected)


def test_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [process_group.get_local_rank_preinit()]
    for name, value in (("SLURM_LOCALID", "2"), ("LOCAL_RANK", "5")):
        monkeypatch.setenv(name, value)
        found.append(process_group.get_local_rank_preinit())
    assert found == [0, 2, 5]


UNEVEN_STEP = {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (3, 8, 4)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "3"}, (5, 6, 3)),
        ({"SLURM_PROCID": "9", "SLURM_NTASKS": "11", **UNEVEN_STEP, "SLURM_NODEID": "1"}, (9, 11, 4)),
        ({"SLURM_PROCID": "9", "SLURM_NTASKS": "11", **UNEVEN_STEP, "SLURM_NODEID": "2"}, (9, 11, 3)),
        ({"SLURM_NTASKS": "6"}, (0, 1, 1)),  # an interactive shell within an allocation
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1)),
        ({"RANK": "1", "SLURM_PROCID": "0", "WORLD_SIZE": "2", "SLURM_NTASKS": "1"}, (1, 2, 1)),
    ],
)
def test_launchers_variables_before_joining(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int, int]
) -> None:
    """Rank, world size and ranks of the machine; the group's own numbers once there is one."""
    _set(monkeypatch, **environment)
    asked = (get_rank_safe(), get_world_size_safe(), get_local_world_size_preinit())
    assert asked == expected
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert (get_rank_safe(), get_world_size_safe()) == (0, 1)
    dist.destroy_process_group()


# --- Who reaches the store --------------------------------------------------------------------------------------------


def test_address_of_rank_0_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: a store would try it for its whole timeout."""
    monkeypatch.setattr(join, "RESOLVING_S", 0.1)
    with pytest.raises(RankFailedError, match=r"\(gaierror: .* at no-such-host\.invalid:29500"):
        initialize_distributed(
            "gloo", 0.5, init_method="tcp://no-such-host.invalid:29500", rank=0, world_size=2
        )


# --- A world of one ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1", **PLACE}],
    ids=["none", "bare", "torchrun"],
)
def test_a_world_of_one_needs_nothing(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    _set(monkeypatch, **environment)
    assert initialize_distributed("gloo", 0.5) == DistInfo("gloo", 0, 1, torch.device("cpu"), True)
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert (ones.tolist(), dist.get_backend()) == ([1.0, 1.0], "gloo")
    destroy_global_state()
    destroy_global_state()
    assert not dist.is_initialized()


@pytest.fixture
def callers_group() -> Iterator[None]:
    """A group of one rank that this package has not made, and keeps."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_an_existing_group_is_used_and_kept(callers_group: None, caplog: pytest.LogCaptureFixture) -> None:
    assert initialize_distributed("gloo") == DistInfo("gloo", 0, 1, torch.device("cpu"), True)
    assert caplog.records == []
    destroy_global_state()


def test_another_backend_than_the_existing_groups_is_told(
    callers_group: None, mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    mocker.patch.object(dist, "is_backend_available", return_value=True)
    assert initialize_distributed("cpu:fake").backend == "gloo"
    assert "exists already, with backend gloo: cpu:fake has no effect" in caplog.text


def test_a_group_that_the_caller_replaced_is_kept() -> None:
    initialize_distributed("gloo")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    destroy_global_state()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_groups_that_cannot_be_destroyed_are_told(
    mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaving never hides the exception that it follows from."""
    initialize_distributed("gloo")
    destroy = dist.destroy_process_group
    mocker.patch.object(dist, "destroy_process_group", side_effect=RuntimeError("out of order"))
    destroy_global_state()
    assert "out of order" in caplog.text
    destroy()


def _handler(signum: int, frame: Any) -> None: ...


@pytest.mark.parametrize("handler", [_handler, signal.SIG_DFL])
@pytest.mark.parametrize("fails", [False, True])
def test_sigint_is_ignored_meanwhile_and_its_handler_put_back(
    handler: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a hook fails."""
    seen: list[Any] = []

    def forget() -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        if fails:
            raise KeyError("hook")

    before = signal.signal(signal.SIGINT, handler)
    try:
        initialize_distributed("gloo")
        monkeypatch.setattr(process_group, "forget_world", forget)
        with pytest.raises(KeyError, match="hook") if fails else contextlib.nullcontext():
            destroy_global_state()
        assert (seen[0], signal.getsignal(signal.SIGINT)) == (signal.SIG_IGN, handler)
    finally:
        signal.signal(signal.SIGINT, before)
    if fails:
        dist.destroy_process_group()


def test_destroying_off_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    initialize_distributed("gloo")
    errors: list[Any] = []
    hook = threading.excepthook
    threading.excepthook = errors.append
    thread = threading.Thread(target=destroy_global_state)
    thread.start()
    thread.join()
    threading.excepthook = hook
    assert (errors, dist.is_initialized(), signal.getsignal(signal.SIGINT)) == ([], False, before)


def _destroy_in_child() -> None:
    destroy_global_state()
    os._exit(0 if dist.is_initialized() else 1)


def test_a_forked_child_leaves_its_parents_group_alone() -> None:
    initialize_distributed("gloo")
    child = multiprocessing.get_context("fork").Process(target=_destroy_in_child)
    child.start()
    child.join(30)
    assert (child.exitcode, dist.is_initialized()) == (0, True)
    destroy_global_state()
