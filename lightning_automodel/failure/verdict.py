"""Why collectives failed, or do not end: functions of what one rank has read of all records."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.failures import Device, RankFailure, Record, Sighting

SILENT_S = 3.0
# A rank is silent after so many of the longest gaps between heartbeats that any rank has shown.
SILENT_GAPS = 3
BUSY_BEATS = 3
MOST_NAMED = 8


def decide(
    seen: Mapping[int, Sighting], own: RankFailure, reading_s: float, now: float, longest_s: float
) -> RankFailure | None:
    """Find the rank that is at fault.

    In this order: ranks that are silent; a rank that ended its run before the others; a rank that is not
    blocked in a collective, nor waits for its device; else the ranks wait for each other, and the failure is
    ``own``, with a note of where they are.

    ``seen`` is what the reader has seen of every rank, itself included, in the ``reading_s`` seconds since
    its collective failed, and ``own`` what it would report of itself. For ``longest_s`` seconds, the verdict
    is None as long as it cannot be told; afterwards, it follows from what is known.
    """
    running = {rank: sighting for rank, sighting in seen.items() if not sighting.known.has_ended}
    others = {rank: sighting for rank, sighting in running.items() if rank != own.rank}
    is_late = reading_s > longest_s
    silent_s = SILENT_S
    if not is_late:
        # On a machine that is busy, the living are silent for long too.
        silent_s = max(SILENT_S, SILENT_GAPS * max(sighting.gap_s for sighting in seen.values()))
    silent = [rank for rank, sighting in others.items() if sighting.is_silent(now, silent_s)]
    if not is_late and any(rank not in silent and not sighting.beats for rank, sighting in others.items()):
        return None
    if silent:
        return _name_silent(sorted(silent, key=lambda rank: seen[rank].changed_at), seen, own.rank, now)
    records = known_records(seen)
    failure = left_behind(records)
    if failure is not None:
        return failure
    # A host that reads from its device may stand anywhere, and waits nevertheless if the device does.
    busy = [
        rank for rank, sighting in others.items() if sighting.busy and not awaited_by_device(rank, records)
    ]
    stuck = [rank for rank in busy if seen[rank].busy >= BUSY_BEATS]
    if stuck:
        cause = own.message.partition("\n")[0]
        return _name_stuck(stuck[0], records, f"rank {own.rank} waited for it in {own.where}: {cause}")
    if busy and not is_late:
        return None
    listed = list_positions(
        {rank: f"{record.where}, at {record.position}" for rank, record in records.items()}
    )
    note = f"All ranks are alive and wait for each other. When this was raised on rank {own.rank}:\n{listed}"
    return replace(own, message=f"{own.message}\n{note}")


def _name_silent(
    silent: Sequence[int], seen: Mapping[int, Sighting], reader: int, now: float
) -> RankFailure:
    """The failure of the ``silent`` ranks, that of the first one."""
    first = seen[silent[0]]
    more = ""
    if len(silent) > 1:
        more = f", nor of rank {failures.list_ranks(silent[1:])},"
    return failures.missed_heartbeats(silent[0], first.known, reader, now - first.changed_at, more)


def _name_stuck(rank: int, records: Mapping[int, Record], why: str) -> RankFailure:
    record = records[rank]
    return RankFailure(rank, record.host, record.where, failures.STUCK, f"it is at {record.position}; {why}")


def known_records(seen: Mapping[int, Sighting]) -> dict[int, Record]:
    """The newest record of each rank, as far as it is known."""
    return {rank: sighting.known for rank, sighting in seen.items()}


def left_behind(records: Mapping[int, Record]) -> RankFailure | None:
    """The failure of a rank that ended its run before a training step that others take."""
    running = {rank: record.step for rank, record in records.items() if not record.has_ended}
    ended = {rank: record.step for rank, record in records.items() if record.has_ended}
    if not running or not ended:
        return None
    rank = min(ended, key=ended.__getitem__)
    other = max(running, key=running.__getitem__)
    if running[other] <= ended[rank]:
        return None
    message = (
        f"it ended its run after training step {ended[rank]}, but rank {other} is in step {running[other]}:"
        " give all ranks equally many batches, and set trainer.should_stop on all of them or on none"
    )
    return RankFailure(rank, records[rank].host, "fit", "RuntimeError", message)


def awaited_by_device(rank: int, records: Mapping[int, Record]) -> list[int]:
    """The ranks for which the device of ``rank`` waits: they have queued fewer collectives in a common group."""
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
        return _name_stuck(
            culprit, records, _what_it_does(records[culprit], {r: records[r] for r in waiting})
        )
    positions = Counter(record.position for record in standing.values())
    if waiting or (len(standing) == len(records) and len(positions) > 1):
        culprit = min(standing, key=lambda r: (positions[records[r].position], _num_queued(records[r]), r))
        listed = _list_devices(standing)
        why = f"all devices have waited for each other for {_least_s(standing):.0f} s:\n{listed}"
        return _name_stuck(culprit, records, why)
    return None


def devices_standstill(records: Mapping[int, Record], limit_s: float) -> str | None:
    """Where all ranks are, if all devices have been busy for ``limit_s`` seconds without progress."""
    if any(record.device_stood_s < limit_s for record in records.values()):
        return None
    return _list_devices(records)


def _what_it_does(record: Record, waiting: Mapping[int, Record]) -> str:
    """Of a rank that is awaited, and of those whose devices wait for it."""
    first = next(iter(waiting.values()))
    step = ""
    if first.device_step:
        step = f" in step {first.device_step}"
    own = {Device.IDLE: "has nothing to do", Device.FAILED: "has failed"}.get(
        Device(record.device), "goes on"
    )
    return (
        f"its device {own}, while that of rank {failures.list_ranks([*waiting])} has waited{step} for"
        f" {_least_s(waiting):.0f} s"
    )


def _list_devices(records: Mapping[int, Record]) -> str:
    return list_positions(
        {
            rank: f"{record.where}, at {record.position}, {_num_queued(record)} collectives queued, its device in"
            f" step {record.device_step}"
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
    if len(set(positions.values())) == 1:
        return None
    return list_positions(positions)


def list_positions(positions: Mapping[int, str]) -> str:
    """The ranks at each of several positions, a line each, and what to do about it."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, position in sorted(positions.items()):
        ranks[position].append(rank)
    lines = [
        f"  rank {failures.list_ranks(those)}: {position}\n"
        for position, those in list(ranks.items())[:MOST_NAMED]
    ]
    return (
        f"{''.join(lines)}One of these lines probably communicates, and the other ranks do not come to it."
        f" {failures.RUN_ON_ALL_RANKS}"
    )
