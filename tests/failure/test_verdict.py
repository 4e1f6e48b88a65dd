"""Whom the verdict names: a table of boards, without any process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_automodel.distributed.failures import (
    MISSED_BEATS,
    MISSED_HEARTBEATS,
    STUCK,
    Device,
    RankFailure,
    Record,
    Sighting,
)
from lightning_automodel.failure.verdict import (
    BUSY_BEATS,
    SILENT_S,
    decide,
    devices_standstill,
    left_behind,
    list_positions,
    standstill,
    stuck_device,
)

OWN = RankFailure(0, "host0", "backward", "RuntimeError", "[gloo] Connection closed by peer")
NOW = 100.0
LONGEST_S = 12.0


def record(rank: int = 0, **changes: Any) -> Record:
    """Of a rank that waits in a collective."""
    first = Record(
        7, f"host{rank}", "training_step", step=3, position="train.py:39 in training_step", waits=True
    )
    return replace(first, **changes)


def alive(rank: int, **changes: Any) -> Sighting:
    """A rank that has sent two heartbeats since the reader began, the newest just now."""
    seen = record(rank, **changes)
    busy = 0 if seen.waits or seen.has_failed or seen.has_ended else BUSY_BEATS
    return Sighting(seen, NOW, missed=0, beats=2, busy=busy, gap_s=0.25)


def silent(rank: int, seconds: float = 4.0, missed: int = 16, **changes: Any) -> Sighting:
    return Sighting(record(rank, **changes), NOW - seconds, missed=missed)


def working(rank: int, busy: int = BUSY_BEATS, **changes: Any) -> Sighting:
    """A rank in no collective."""
    return replace(
        alive(rank, waits=False, position="train.py:12 in read", where="on_fit_end", **changes), busy=busy
    )


def reader(**changes: Any) -> Sighting:
    return alive(0, where="backward", has_failed=True, **changes)


WORLD = "0 of rank 0"
OTHER = "2 of rank 1"


def reads(rank: int, queued: int, seconds: float = 61.0, **changes: Any) -> Record:
    """A rank whose host reads from its device, which is busy; the host has run ahead by a step."""
    place = {"where": "on_train_batch_end", "position": f"train.py:{50 + rank} in log", "waits": False}
    changes = {"queued": {WORLD: queued}, **place, **changes}
    return record(rank, device=Device.BUSY, device_stood_s=seconds, device_step=2, **changes)


def idle(rank: int, queued: int, **changes: Any) -> Record:
    """A rank whose host does something of its own, and whose device has nothing to do."""
    place = {"position": f"train.py:{10 + rank} in read", "waits": False}
    return record(rank, device=Device.IDLE, queued={WORLD: queued}, **place, **changes)


def at(rank: int, queued: int, position: str = "train.py:50") -> Record:
    """As ``reads``, at this line."""
    return replace(reads(rank, queued), position=position)


def sighted(seen: Record) -> Sighting:
    return Sighting(seen, NOW, missed=0, beats=9, busy=BUSY_BEATS, gap_s=0.25)


CASES: dict[str, tuple[list[Sighting], int | None, str]] = {
    "killed": ([reader(), silent(1), alive(2)], 1, MISSED_HEARTBEATS),
    "a whole node killed": ([reader(), alive(1), silent(2), silent(3)], 2, MISSED_HEARTBEATS),
    "never came": ([reader(), Sighting(None, NOW - 4, missed=16), alive(2)], 1, MISSED_HEARTBEATS),
    "killed, and another one at work": ([reader(), working(1), silent(2)], 2, MISSED_HEARTBEATS),
    "killed after its end": ([reader(), silent(1, has_ended=True), silent(2)], 2, MISSED_HEARTBEATS),
    "not yet silent": ([reader(), silent(1, seconds=SILENT_S - 0.1), working(2)], None, ""),
    "the reader hardly got its turn": ([reader(), silent(1, missed=MISSED_BEATS - 1), alive(2)], None, ""),
    "a busy machine": ([reader(), silent(1), replace(alive(2), gap_s=2.0)], None, ""),
    "silent on a busy machine": (
        [reader(), silent(1, seconds=7), replace(alive(2), gap_s=2.0)],
        1,
        MISSED_HEARTBEATS,
    ),
    "the longest silent": ([reader(), silent(1), silent(2, seconds=9)], 2, MISSED_HEARTBEATS),
    "not heard of since": ([reader(), replace(alive(1), beats=0), working(2)], None, ""),
    "stuck": ([reader(), working(1), alive(2)], 1, STUCK),
    "stuck, the first of two": ([reader(), alive(1), working(2), working(3)], 2, STUCK),
    "on its way between two collectives": ([reader(), working(1, busy=1), alive(2)], None, ""),
    "at work, and others on their way": ([reader(), working(1), working(2, busy=1)], 1, STUCK),
    "left behind": ([reader(step=5), alive(1, has_ended=True, step=4)], 1, "RuntimeError"),
    "ended in the same step": ([reader(), alive(1, has_ended=True), working(2)], 2, STUCK),
    "all wait": ([reader(), alive(1), alive(2, position="train.py:51 in backward")], 0, "RuntimeError"),
    "all have failed": ([reader(), alive(1, has_failed=True, waits=False)], 0, "RuntimeError"),
    "the reader alone": ([reader()], 0, "RuntimeError"),
    "in item(), for the reader": (
        [reader(queued={WORLD: 7}), sighted(reads(1, 8)), alive(2)],
        0,
        "RuntimeError",
    ),
    "in item(), for its own device": ([reader(queued={WORLD: 8}), sighted(reads(1, 8)), alive(2)], 1, STUCK),
    "in item(), and one stuck": (
        [reader(queued={WORLD: 8}), sighted(reads(1, 8)), sighted(idle(2, 7))],
        2,
        STUCK,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_is_named(case: str) -> None:
    seen, rank, error = CASES[case]
    found = decide(dict(enumerate(seen)), OWN, 4.0, NOW, LONGEST_S)
    assert (found and found.rank, found.error if found else "") == (rank, error)


@pytest.mark.parametrize("case", CASES)
def test_it_is_decided_in_the_end(case: str) -> None:
    """With what is known: nobody waits for ever, and what was certain before stays."""
    seen, rank, _ = CASES[case]
    late = decide(dict(enumerate(seen)), OWN, LONGEST_S + 1, NOW, LONGEST_S)
    assert late is not None
    assert rank is None or late.rank == rank


def test_words() -> None:
    """Each names the rank, its host, its hook, and the line of user code where there is one."""
    killed = decide({0: reader(), 1: silent(1), 2: silent(2)}, OWN, 4.0, NOW, LONGEST_S)
    assert str(killed) == (
        "rank 1 on host1 missed heartbeats, last seen in training_step: rank 0 has heard nothing of it, nor"
        " of rank 2, for 4.0 s: stopped, killed or cut off"
    )
    stuck = decide({0: reader(), 1: working(1)}, OWN, 4.0, NOW, LONGEST_S)
    assert str(stuck) == (
        "rank 1 on host1 is stuck in on_fit_end: it is at train.py:12 in read; rank 0 waited for it in"
        " backward: [gloo] Connection closed by peer"
    )
    both = decide({0: reader(), 1: alive(1, position="eval.py:3 in gather")}, OWN, 4.0, NOW, LONGEST_S)
    assert both is not None
    assert both.message.splitlines()[:4] == [
        "[gloo] Connection closed by peer",
        "All ranks are alive and wait for each other. When this was raised on rank 0:",
        "  rank 0: backward, at train.py:39 in training_step",
        "  rank 1: training_step, at eval.py:3 in gather",
    ]


@pytest.mark.parametrize(
    ("records", "rank"),
    [
        ([record(step=5), record(step=4, has_ended=True)], 1),
        ([record(step=5), record(step=5, has_ended=True)], None),
        ([record(step=4), record(step=5, has_ended=True)], None),
        ([record(step=5), record(step=4)], None),
        ([record(step=5, has_ended=True), record(step=4, has_ended=True)], None),
        ([record(step=5, has_ended=True), record(step=3, has_ended=True), record(step=4)], 1),
    ],
)
def test_left_behind(records: list[Record], rank: int | None) -> None:
    """A rank that ended before a step that another one has begun."""
    found = left_behind(dict(enumerate(records)))
    assert (found and found.rank) == rank


def test_standstill() -> None:
    """All must have waited for so long, and not in one place."""
    here = record(stood_s=61.0)
    there = record(stood_s=70.0, position="train.py:51 in backward")
    assert standstill({0: here, 1: here}, 60.0) is None
    assert standstill({0: here, 1: replace(there, stood_s=59.0)}, 60.0) is None
    assert standstill({0: here, 1: replace(there, waits=False)}, 60.0) is None
    told = standstill({0: here, 1: there}, 60.0)
    assert told is not None
    assert told.splitlines()[1] == "  rank 1: training_step, at train.py:51 in backward"


DEVICES: dict[str, tuple[list[Record], int | None]] = {
    "hangs in its own code": ([reads(0, 8), idle(1, 7), reads(2, 8)], 1),
    "has left out a collective": ([reads(0, 8), reads(1, 7), reads(2, 8)], 1),
    "one waits for one that waits": ([reads(0, 9), reads(1, 8), idle(2, 7)], 2),
    "has queued as many, but others, and is elsewhere": ([at(0, 8), at(1, 8, "train.py:9"), at(2, 8)], 1),
    "has gone farther than the others": ([at(0, 8), at(1, 9, "train.py:9"), at(2, 8)], 1),
    "has queued the fewest, at the same line": ([at(0, 8), at(1, 7), at(2, 8)], 1),
    "all compute, at the same line": ([at(0, 8), at(1, 8), at(2, 8)], None),
    "not all stand": ([at(0, 8), replace(at(1, 8, "train.py:9"), device_stood_s=50.0), at(2, 8)], None),
    "of two, the one whose device is idle": ([reads(0, 8), reads(1, 7), idle(2, 7)], 2),
    "not looked at, as its host goes on": (
        [
            reads(0, 8),
            idle(
                1,
                7,
            ),
            replace(idle(2, 7), device=Device.UNSEEN),
        ],
        1,
    ),
    "not yet for so long": ([reads(0, 8, seconds=59), idle(1, 7)], None),
    "a rank computes alone, and none waits for it": ([reads(0, 8), idle(1, 8), idle(2, 8)], None),
    "the others are ahead, but not waiting": ([reads(0, 7), idle(1, 8), idle(2, 8)], None),
    "groups of others are not compared": ([at(0, 8), replace(at(1, 8), queued={OTHER: 3})], None),
    "one group of two": ([reads(0, 8), replace(reads(1, 8), queued={WORLD: 8, OTHER: 4}), idle(2, 8)], None),
    "a subgroup waits": (
        [
            idle(0, 8),
            replace(reads(1, 8), queued={WORLD: 8, OTHER: 4}),
            replace(idle(2, 8), queued={WORLD: 8, OTHER: 3}),
        ],
        2,
    ),
    "without an accelerator": ([record(0), record(1)], None),
}


@pytest.mark.parametrize("case", DEVICES)
def test_whom_devices_wait_for(case: str) -> None:
    records, rank = DEVICES[case]
    found = stuck_device(dict(enumerate(records)), 60.0)
    assert (found and found.rank) == rank
    assert found is None or found.error == STUCK


def test_words_about_devices() -> None:
    """What the culprit is at, what its device does, and for how long the others have waited in which step."""
    hangs = stuck_device({0: reads(0, 8, 65.0), 1: idle(1, 7), 2: reads(2, 8)}, 60.0)
    assert str(hangs) == (
        "rank 1 on host1 is stuck in training_step: it is at train.py:11 in read; its device has nothing to"
        " do, while that of rank 0, 2 has waited in step 2 for 61 s"
    )
    skips = stuck_device({0: reads(0, 8), 1: reads(1, 7)}, 60.0)
    assert skips is not None
    assert str(skips).splitlines()[:3] == [
        "rank 1 on host1 is stuck in on_train_batch_end: it is at train.py:51 in log; all devices have"
        " waited for each other for 61 s:",
        "  rank 0: on_train_batch_end, at train.py:50 in log, 8 collectives queued, its device in step 2",
        "  rank 1: on_train_batch_end, at train.py:51 in log, 7 collectives queued, its device in step 2",
    ]
    assert devices_standstill({0: reads(0, 8), 1: reads(1, 8)}, 60.0) is not None
    assert devices_standstill({0: reads(0, 8), 1: idle(1, 8)}, 60.0) is None


def test_a_list_of_many_ranks_is_short() -> None:
    listed = list_positions({rank: "here" if rank % 2 else f"line {rank}" for rank in range(1024)})
    assert "  rank 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 and 496 more: here\n" in listed
    assert listed.count("\n") == 8
