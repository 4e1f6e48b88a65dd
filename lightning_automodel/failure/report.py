"""Where all ranks are, and who has fallen silent: functions of what a rank has read of all records.

Only silence is judged. Everything else is one table of all ranks, those that do not wait for others first.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_automodel.distributed import failures
from lightning_automodel.distributed.failures import PROCESS_ENDED, WAITED, RankFailure, Record

MOST_LINES = 8


def explain(before: Mapping[int, Record], after: Mapping[int, Record], own: RankFailure) -> RankFailure:
    """Why a collective has failed on the rank of ``own``, which is what it would report of itself.

    ``before`` and ``after`` are the records of all ranks, with several heartbeats between them. A rank is named
    if its process is gone, or else if it is silent and its process is not seen to live. Otherwise the failure is
    ``own``, with the table.
    """
    silent = [rank for rank, record in after.items() if record == before[rank] and not record.has_ended]
    named = [failures.silence(rank, after[rank], own.rank) for rank in silent]
    lost = [failure for failure in named if failure is not None]
    if not lost:
        text = f"{own.message}\nAll ranks are alive. They were at:\n{table(after, silent)}"
        return RankFailure(own.rank, own.host, own.where, WAITED, text)
    return min(lost, key=lambda failure: failure.error != PROCESS_ENDED)


def table(records: Mapping[int, Record], without_python: Sequence[int] = ()) -> str:
    """A line for each place at which ranks are, those that do not wait for others first, and what to do about it.

    ``without_python`` are ranks that send no heartbeats, but whose processes are alive.
    """
    ranks: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, record in sorted(records.items()):
        order = 1
        what = "goes on in"
        if record.has_ended:
            order = 0
            what = "has ended its training or run, and waits for the others in"
        elif rank in without_python:
            order = 0
            what = "is alive, but a call keeps Python's lock, in"
        elif record.waits:
            order = 2
            what = "waits in"
        ranks[order, f"{what} {record.where}, step {record.step}, at {record.position}"].append(rank)
    lines = []
    for (_, place), those in sorted(ranks.items())[:MOST_LINES]:
        stood_s = min(records[rank].stood_s for rank in those)
        lines.append(f"  rank {failures.list_first(those)} {place}, for {stood_s:.0f} s\n")
    return (
        f"{''.join(lines)}One of these lines probably communicates, and the other ranks do not come to it."
        f" {failures.RUN_ON_ALL_RANKS}"
    )
