"""All ranks stop after the same step: the agreement alone, on a store in this process."""

from __future__ import annotations

import json
import random
import threading

import pytest
import torch.distributed as dist

from lightning_automodel.distributed.board import NONE
from lightning_automodel.failure.coordinated_stop import REQUEUE, STEPS, STOP, StopAgreement

WAIT_S = 10.0


def make(world_size: int) -> tuple[dist.Store, list[StopAgreement]]:
    """The agreements of all ranks, and a store with the keys that they read."""
    store = dist.HashStore()
    promises = list[str]()
    store.set(STOP, NONE.decode())
    store.set(STEPS, NONE.decode())

    def arrive(store: dist.Store, step: str) -> None:
        promises.append(step)
        if len(promises) == world_size:
            store.set(STEPS, json.dumps(promises))

    return store, [StopAgreement(rank, arrive) for rank in range(world_size)]


def exchange(agreements: list[StopAgreement], store: dist.Store) -> None:
    for agreement in agreements:
        agreement.exchange(store, store.get(STOP), store.get(STEPS))


def test_nobody_asks() -> None:
    """Steps go on, and no promise is made that would let one wait."""
    store, agreements = make(2)
    for step in range(1, 4):
        assert not any(agreement.begin_step(step, WAIT_S) for agreement in agreements)
        exchange(agreements, store)
    assert store.get(STOP) == NONE


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
    assert set(last_steps.values()) == {1 + max(map(int, json.loads(store.get(STEPS))))}
    assert {agreement.asked_by for agreement in agreements} == {asking}
    assert {agreement.requeues for agreement in agreements} == {not agreements[asking].is_asked_here}


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


def test_rank_that_is_done_holds_nobody_up() -> None:
    """The others decide without it, on a step that they have not passed."""
    store, (done, asking) = make(2)
    done.begin_step(9, WAIT_S)
    asking.begin_step(3, WAIT_S)
    done.leave(store)
    asking.ask()
    for _ in range(3):
        exchange([asking], store)
    assert asking.begin_step(4, WAIT_S)


def test_ranks_that_leave_without_a_request_decide_nothing() -> None:
    """So that those which still read the key find none."""
    store, agreements = make(2)
    for agreement in agreements:
        agreement.leave(store)
    exchange(agreements, store)
    assert store.get(STOP) == NONE
    assert {agreement.last_step for agreement in agreements} == {None}
