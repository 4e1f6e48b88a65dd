"""All ranks stop after the same step: the agreement alone, on a store in this process."""

from __future__ import annotations

import json
import random
import threading

import pytest
import torch.distributed as dist

from lightning_automodel.distributed.meeting import NONE, outcome_of
from lightning_automodel.failure.coordinated_stop import REQUEUE, STEPS, STOP, StopAgreement

WAIT_S = 10.0


def make(world_size: int) -> tuple[dist.Store, list[StopAgreement]]:
    """The agreements of all ranks, and a store with the keys that they read."""
    store = dist.HashStore()
    store.set(STOP, NONE)
    store.set(STEPS, NONE)
    return store, [StopAgreement(rank, range(world_size)) for rank in range(world_size)]


def exchange(agreements: list[StopAgreement], store: dist.Store) -> None:
    for agreement in agreements:
        agreement.exchange(store, store.get(STOP), store.get(STEPS))


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(4, 20))]
)
def test_last_step_is_the_same_and_nobody_has_passed_it(seed: int) -> None:
    """However far apart the ranks are when they hear of the request, with steps going on meanwhile."""
    draw = random.Random(seed)
    world_size = draw.randint(2, 5)
    store, agreements = make(world_size)
    for agreement in agreements:
        for step in range(1, draw.randint(1, 8)):
            assert not agreement.begin_step(step, WAIT_S)
    asking = draw.randrange(world_size)
    agreements[asking].ask(draw.choice(["", REQUEUE]))
    last_steps: dict[int, int] = {}

    def take_steps(rank: int, agreement: StopAgreement) -> None:
        while not agreement.begin_step(agreement.step + 1, WAIT_S):
            pass
        last_steps[rank] = agreement.step

    threads = [threading.Thread(target=take_steps, args=entry) for entry in enumerate(agreements)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        exchange(draw.sample(agreements, world_size), store)
    assert len(last_steps) == world_size
    promised = outcome_of(store.get(STEPS))
    assert promised is not None
    assert set(last_steps.values()) == {1 + max(promised)}
    assert {agreement.asked_by for agreement in agreements} == {asking}
    assert {agreement.requeues for agreement in agreements} == {not agreements[asking].is_asked_here}


@pytest.mark.parametrize("reasons", [(REQUEUE, ""), ("", REQUEUE)])
def test_requeue_beside_sigterm(reasons: tuple[str, str]) -> None:
    """SIGTERM right before or after SLURM's signal does not cancel the requeue."""
    store, (agreement, _) = make(2)
    for reason in reasons:
        agreement.ask(reason)
    assert agreement.is_asked_here
    exchange([agreement], store)
    assert json.loads(store.get(STOP)) == [0, REQUEUE]


def test_waiting_step_goes_on_when_released() -> None:
    """As there is no decision to wait for once a rank has failed."""
    store, (agreement, _) = make(2)
    agreement.begin_step(1, WAIT_S)
    agreement.ask()
    exchange([agreement, agreement], store)
    exchange([agreement], store)
    released = threading.Timer(0.05, agreement.release)
    released.start()
    assert not agreement.begin_step(2, WAIT_S)
    released.join()
    assert agreement.last_step is None
