"""Collectives that behave as NCCL's: they are queued, nothing is raised, and the watchdog ends the process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel import AutomodelStrategy
from tests import devices
from tests.failure.faults import become_rank, exit_statuses, killed_at_the_end, started_ranks
from tests.rank_pool import RankPool
from tests.second_device import nccl_like
from tests.trainer.exactness import full_weights
from tests.trainer.runs import LabelledModule, loader, make_trainer

TIMEOUT_S = 1.5
NAMES = [
    "collectives_are_queued",
    "reads_must_wait",
    "groups_connect_on_the_host",
    "mismatches_hang_until_the_abort",
    "shutdown_waits_for_the_others",
]


@pytest.fixture(scope="module")
def nccl_pool2(extension: None) -> Iterator[RankPool]:
    """Two ranks on the second device, with such collectives."""
    pool = RankPool(2, "nccl")
    yield pool
    pool.stop()


def _call(name: str) -> None:
    from tests.second_device import nccl_behaviour  # registers the device, in a rank's process alone

    torch.accelerator.set_device_index(dist.get_rank())
    getattr(nccl_behaviour, name)()


@pytest.mark.sweep  # of the device itself; the faults of tests/failure hang on it by default
@pytest.mark.parametrize("name", NAMES)
def test_behaviour(nccl_pool2: RankPool, name: str) -> None:
    """Queued work, blocked reads, order of streams, connecting, abort and shutdown."""
    nccl_pool2.run(_call, name, timeout_s=30)


def _trained(**options: Any) -> dict[str, torch.Tensor]:
    """Full weights after a fit with accumulation, clipping and validation."""
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        limit_val_batches=2,
    )
    module = LabelledModule()
    trainer.fit(module, loader(), loader())
    return full_weights(module)


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}], ids=["fsdp2", "ddp"])
def test_fits_are_those_of_the_plain_device(
    pool2: RankPool, nccl_pool2: RankPool, options: dict[str, Any]
) -> None:
    """To the bit."""
    expected, found = (pool.run(_trained, **options)[0] for pool in (pool2, nccl_pool2))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- What ends the process, or stays in it ----------------------------------------------------------------------------


def _join(rank: int, binds: bool = False) -> torch.device:
    from tests.second_device import device

    own = torch.device(device.TYPE, rank)
    torch.accelerator.set_device_index(rank)
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, timeout=timedelta(seconds=60)
    )
    dist.init_process_group(
        f"{device.TYPE}:{device.BACKEND}",
        store=store,
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=own if binds else None,
    )
    return own


def peer_dies(rank: int) -> None:
    """The host runs ahead of the collective that does not come, and stays where it reads."""
    own = _join(rank)
    tensor = torch.ones(4, device=own)
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 8.0
    if rank == 1:
        Path("happened").touch()
        os._exit(3)
    while not Path("happened").exists():
        time.sleep(0.01)
    dist.all_reduce(tensor)
    print("queued")
    for _ in range(3):
        tensor = tensor + 1
    print("ran ahead")
    tensor.sum().item()
    print("not reached")


def a_bound_device_connects_at_once(rank: int) -> None:
    """It waits for the others longer than the timeout; groups of meshes are split from it then."""
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
    start = time.monotonic()
    own = _join(rank, binds=True)
    assert rank == 1 or time.monotonic() - start > TIMEOUT_S
    print("connected")
    mesh = torch.distributed.init_device_mesh(own.type, (1, 2), mesh_dim_names=("replicate", "shard"))
    tensor = torch.ones(4, device=own)
    for group in (mesh["shard"].get_group(), mesh["replicate"].get_group(), dist.new_group([1])):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(tensor, group=group)
    assert dist.new_group(backend="gloo") is not None
    print(f"sum {tensor.sum().item():g}")
    dist.destroy_process_group()


def _be(scenario: str, rank: int, port: int, folder: Path) -> None:
    become_rank(rank, 2, port, folder)
    os.environ[devices.VARIABLE] = "nccl"
    os.environ[nccl_like.RUN_AHEAD] = str(folder / "happened")
    globals()[scenario](rank)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("scenario", "statuses", "printed"),
    [
        ("peer_dies", (-signal.SIGABRT, 3), ["queued", "ran ahead", "OpType=ALLREDUCE, Timeout(ms)=1500"]),
        ("a_bound_device_connects_at_once", (0, 0), ["connected", "sum 8"]),
    ],
)
def test_in_processes_of_their_own(
    extension: None, tmp_path: Path, scenario: str, statuses: tuple[int, ...], printed: list[str]
) -> None:
    """What two ranks print, and how they end."""
    processes = started_ranks(_be, scenario, tmp_path, 2)
    with killed_at_the_end(processes):
        found = exit_statuses(processes, 40)
    text = (tmp_path / "rank0.log").read_text()
    assert found == statuses, text
    places = [text.find(each) for each in printed]
    assert -1 not in places, text
    assert places == sorted(places), text
    assert "not reached" not in text
