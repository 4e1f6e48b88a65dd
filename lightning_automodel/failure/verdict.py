"""Why collectives failed, or do not end: functions of what one rank has read of all records."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.failures import Device, RankFailure, Record, Sighting

SILENT_S = 3.0
SILENT_GAPS = 3  # a rank is silent after so many of the longest gaps between heartbeats that any rank has shown
BUSY_BEATS = 3
MOST_NAMED = 8


def decide(
    seen: Mapping[int, Sighting], own: RankFailure, reading_s: float, now: float, longest_s: float
) -> RankFailure | None:
    """Find the rank that is at fault.

    In this order: ranks that are silent; a rank that ended its run before the others; a rank that does
    something else than to wait, in a collective or for its device; else the ranks wait for each other, and
    the failure is ``own``, with a note of where they are.

    ``seen`` is what the reader has seen of every rank, itself included, since its collective failed,
    ``reading_s`` seconds before ``now``; ``own`` is what it would report of itself. After ``longest_s``
    seconds it is decided by what is known, before that the verdict is None as long as it cannot be told.
    """
    running = {rank: each for rank, each in seen.items() if not each.known.has_ended}
    others = {rank: each for rank, each in running.items() if rank != own.rank}
    is_late = reading_s > longest_s
    # On a machine that is busy, the living are silent for long too.
    silent_s = max(SILENT_S, 0.0 if is_late else SILENT_GAPS * max(each.gap_s for each in seen.values()))
    silent = [rank for rank, each in others.items() if each.is_silent(now, silent_s)]
    if not is_late and any(rank not in silent and not each.beats for rank, each in others.items()):
        return None
    if silent := sorted(silent, key=lambda rank: seen[rank].changed_at):
        first = seen[silent[0]]
        more = f", nor of rank {failures.list_ranks(silent[1:])}," if silent[1:] else ""
        return failures.missed_heartbeats(silent[0], first.known, own.rank, now - first.changed_at, more)
    records = {rank: each.known for rank, each in seen.items()}
    if failure := left_behind(records):
        return failure
    # A host that reads from its device stands anywhere, and waits nevertheless if the device does.
    busy = [rank for rank, each in others.items() if each.busy and not awaited_by_device(rank, records)]
    if stuck := [rank for rank in busy if seen[rank].busy >= BUSY_BEATS]:
        record = seen[stuck[0]].known
        cause = own.message.partition("\n")[0]
        message = f"it is at {record.position}; rank {own.rank} waited for it in {own.where}: {cause}"
        return RankFailure(stuck[0], record.host, record.where, failures.STUCK, message)
    if busy and not is_late:
        return None
    listed = list_positions({rank: f"{each.known.where}, at {each.known.position}" for rank, each in seen.items()})
    note = f"All ranks are alive and wait for each other. When this was raised on rank {own.rank}:\n{listed}"
    return replace(own, message=f"{own.message}\n{note}")


def known_records(seen: Mapping[int, Sighting]) -> dict[int, Record]:
    """The newest record of each rank, as far as it is known."""
    return {rank: sighting.known for rank, sighting in seen.items()}


def left_behind(records: Mapping[int, Record]) -> RankFailure | None:
    """The failure of a rank that ended its run before a training step that others take."""
    running = {rank: record.step for rank, record in records.items() if not record.has_ended}
    ended = {rank: record.step for rank, record in records.items() if record.has_ended}
    if not running or not ended:
        return None
    rank, other = min(ended, key=ended.__getitem__), max(running, key=running.__getitem__)
    if running[other] <= ended[rank]:
        return None
    message = (
        f"it ended its run after training step {ended[rank]}, but rank {other} is in step {running[other]}: give all"
        " ranks equally many batches, and set trainer.should_stop on all of them or on none"
    )
    return RankFailure(rank, records[rank].host, "fit", "RuntimeError", message)


def awaited_by_device(rank: int, records: Mapping[int, Record]) -> list[int]:
    """For whom the device of ``rank`` waits: ranks that have queued fewer collectives in a group of both."""
    own = records[rank]
    if own.device != Device.BUSY:
        return []
    return [
        other
        for other, record in records.items()
        if any(record.queued.get(group, number) < number for group, number in own.queued.items())
    ]


def stuck_device(records: Mapping[int, Record], limit_s: float) -> RankFailure | None:
    """The failure of a rank for which devices of others have waited for ``limit_s`` seconds.

    It has queued fewer collectives than they have. If its own device stands as long, they wait for each
    other, and it is the rank whose host is elsewhere than most, or has queued the fewest. If all have queued
    as many, and are at the same lines, they may compute for long, and the answer is None.
    """
    standing = {rank: record for rank, record in records.items() if record.device_stood_s >= limit_s}
    waiting = {rank: awaited for rank in standing if (awaited := awaited_by_device(rank, records))}
    awaited_ranks = {other for awaited in waiting.values() for other in awaited}
    if at_work := awaited_ranks - standing.keys():
        culprit = min(at_work, key=lambda rank: (_num_queued(records[rank]), rank))
        return _found_stuck(culprit, records, _what_it_does(records[culprit], {r: records[r] for r in waiting}))
    positions = Counter(record.position for record in standing.values())
    if waiting or (len(standing) == len(records) and len(positions) > 1):
        culprit = min(standing, key=lambda r: (positions[records[r].position], _num_queued(records[r]), r))
        found = f"all devices have waited for each other for {_least_s(standing):.0f} s:\n{_list_devices(standing)}"
        return _found_stuck(culprit, records, found)
    return None


def devices_standstill(records: Mapping[int, Record], limit_s: float) -> str | None:
    """Where all ranks are, if all devices have been busy for ``limit_s`` seconds without progress."""
    stand = all(record.device_stood_s >= limit_s for record in records.values())
    return _list_devices(records) if stand else None


def _found_stuck(rank: int, records: Mapping[int, Record], found: str) -> RankFailure:
    record = records[rank]
    message = f"it is at {record.position}; {found}"
    return RankFailure(rank, record.host, record.where, failures.STUCK, message)


def _what_it_does(record: Record, waiting: Mapping[int, Record]) -> str:
    """Of a rank that is awaited, and of those whose devices wait for it."""
    first = next(iter(waiting.values()))
    step = f" in step {first.device_step}" if first.device_step else ""
    own = {Device.IDLE: "has nothing to do", Device.FAILED: "has failed"}.get(Device(record.device), "goes on")
    return (
        f"its device {own}, while that of rank {failures.list_ranks([*waiting])} has waited{step} for"
        f" {_least_s(waiting):.0f} s"
    )


def _list_devices(records: Mapping[int, Record]) -> str:
    return list_positions(
        {
            rank: f"{record.where}, at {record.position}, {_num_queued(record)} collectives queued, its device in step"
            f" {record.device_step}"
            for rank, record in records.items()
        }
    )


def _least_s(records: Mapping[int, Record]) -> float:
    return min(record.device_stood_s for record in records.values())


def _num_queued(record: Record) -> int:
    return sum(record.queued.values())


def standstill(records: Mapping[int, Record], limit_s: float) -> str | None:
    """The positions of all ranks, if all have waited for ``limit_s`` seconds, and not in the same place."""
    if not all(record.waits and record.stood_s >= limit_s for record in records.values()):
        return None
    positions = {rank: f"{record.where}, at {record.position}" for rank, record in records.items()}
    return list_positions(positions) if len(set(positions.values())) > 1 else None


def list_positions(positions: Mapping[int, str]) -> str:
    """The ranks at each of several positions, a line each, and what to do about it."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, position in sorted(positions.items()):
        ranks[position].append(rank)
    lines = [
        f"  rank {failures.list_ranks(those)}: {position}\n" for position, those in list(ranks.items())[:MOST_NAMED]
    ]
    return (
        f"{''.join(lines)}One of these lines probably communicates, and the other ranks do not come to it."
        f" {failures.RUN_ON_ALL_RANKS}"
    )
