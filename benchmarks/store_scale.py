"""What hearts ask of the store with 64 to 1,024 ranks, and whom they name when one of them fails.

Every rank has the real `Watch` and `Heart`. One thread lets them send their heartbeats in turn, in random
order, on a clock that is played, so that the counts do not depend on how busy the machine is. The store is a
real `TCPStore` in a process of its own, whose processor time is read (on Linux). What a rank's main thread
does is played too.

    python benchmarks/store_scale.py                                  # a table of sizes 64, 128, 256, 512, 1024
    python benchmarks/store_scale.py --faults 50 --sizes 256          # random faults: is the right rank named?

The columns: operations of a heartbeat of one rank, and of all ranks in a second; then a killed rank, until
all know of it: operations of each rank beside its heartbeats, all operations and how they grow, all keys,
played seconds, and seconds of the store. It ends with status 1 if a number is too large, or a wrong rank was
named.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed.failures import MISSED_HEARTBEATS, WAITED, RankFailure, Record
from lightning_automodel.distributed.heart import MISSED_BEATS
from lightning_automodel.distributed.meeting import records_of
from lightning_automodel.failure import report
from lightning_automodel.failure.watch import Watch

SIZES = (64, 128, 256, 512, 1024)
TIMEOUT = timedelta(minutes=10)
SILENCE = timedelta(seconds=30)
MOST_BEATS = 400
BEAT_OPERATIONS = 2
MOST_A_BEAT = 3.0
MOST_A_SECOND = 4000.0
MOST_A_RANK = 5.0
MOST_GROWTH = 2.2
MOST_STORE_S = 5.0


class Server:
    """A store in a process of its own."""

    def __init__(self) -> None:
        pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs,), daemon=True
        )
        self._process.start()
        self._store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False, wait_for_workers=False)
        self._number = 0

    def new_store(self) -> dist.Store:
        """The store, as if it were empty."""
        self._number += 1
        return dist.PrefixStore(str(self._number), self._store)

    def seconds(self) -> float:
        """Processor time of the process so far; NaN where it cannot be read."""
        try:
            with open(f"/proc/{self._process.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return float("nan")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class World:
    """All ranks of one size."""

    def __init__(self, size: int, store: dist.Store, draw: random.Random) -> None:
        self.counted: Counter[str] = Counter()
        self.now = 0.0
        self.store = store
        self._draw = draw
        self.ranks = [Rank(rank, size, self) for rank in range(size)]
        self.interval_s = self.ranks[0].watch.interval_s
        for _ in range(3):
            self.beat()

    def beat(self) -> None:
        """Let each living rank send a heartbeat, in any order."""
        for rank in self._draw.sample(self.ranks, len(self.ranks)):
            self.now += self.interval_s / len(self.ranks)
            rank.beat()

    def living(self) -> list[Rank]:
        """The ranks that were not killed."""
        return [rank for rank in self.ranks if not rank.is_dead]

    def learnt(self, failing: Sequence[int]) -> set[RankFailure]:
        """What the living ranks know, once all do. The first of those whose collective fails reads all records."""
        reader = self.ranks[failing[0]]
        before = records_of(reader.store, range(len(self.ranks)))  # type: ignore[arg-type]
        for beat in range(MOST_BEATS):
            self.beat()
            if beat == MISSED_BEATS and not reader.watch.failure:
                after = records_of(reader.store, range(len(self.ranks)))  # type: ignore[arg-type]
                own = RankFailure(reader.rank, "host", "training_step", "RuntimeError", "[gloo] Timed out")
                reader.watch.post(report.explain(before, after, own))
            found = [rank.watch.failure for rank in self.living()]
            if all(found):
                return set(found)  # type: ignore[arg-type]
        raise TimeoutError(f"{found.count(None)} ranks know nothing after {MOST_BEATS} heartbeats")


def serve(pipe: Connection) -> None:
    """Host a store until this process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


class Rank:
    """One rank: its watch without its threads, and what its main thread does."""

    def __init__(self, rank: int, size: int, world: World) -> None:
        self.rank = rank
        self.is_dead = False
        self.store = _Counting(world.store, world.counted)
        self.watch = Watch(rank, size, self.store, TIMEOUT, SILENCE, lambda: "training_step")  # type: ignore[arg-type]
        self.watch.clock = lambda: world.now
        # As if each were on another node: their process is this one.
        self.watch.record = Record(host="host", where="training_step")
        self.watch.describe = lambda: None  # type: ignore[method-assign]
        self.watch.begin_step(3)
        self.stand_at(True, "train.py:39 in training_step")

    def beat(self) -> None:
        """Send a heartbeat, unless killed, or it knows of a failure."""
        if not self.is_dead and self.watch.failure is None:
            self.watch.beat()

    def stand_at(self, waits: bool, line: str) -> None:
        """Let the main thread be there."""
        self.watch.record.waits = waits
        self.watch.record.position = line

    def end(self) -> None:
        """The main thread has come to the end of its run."""
        self.watch.record.has_ended = True


class _Counting:
    """Passes calls on to a store, and counts them and the keys that they touch."""

    def __init__(self, store: dist.Store, counted: Counter[str]) -> None:
        self._store = store
        self._counted = counted

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self._counted["operations"] += 1
            self._counted["keys"] += len(args[0]) if isinstance(args[0], list) else 1
            return method(*args)

        return call


# --- Faults -----------------------------------------------------------------------------------------------------------

FAULTS = ("killed", "a node is killed", "raised", "stuck", "left behind", "waiting at another line")


def inflict(world: World, fault: str, victim: int) -> tuple[range, str, str]:
    """Let it happen; returns the ranks of which one is to be named, the error, and what the message must have."""
    rank = world.ranks[victim]
    anybody = range(len(world.ranks))
    if fault in ("killed", "a node is killed"):
        dead = world.ranks[victim : victim + (1 if fault == "killed" else 8)]
        for each in dead:
            each.is_dead = True
        return range(victim, victim + len(dead)), MISSED_HEARTBEATS, "stopped, killed or cut off"
    if fault == "raised":
        rank.watch.post(RankFailure(victim, "host", "training_step", "ValueError", "no labels here"))
        return range(victim, victim + 1), "ValueError", "no labels here"
    if fault == "stuck":
        rank.stand_at(False, "train.py:12 in read")
        return anybody, WAITED, f"  rank {victim} goes on in training_step, step 3, at train.py:12 in read"
    if fault == "left behind":
        rank.end()
        for other in world.ranks:
            if other is not rank:
                other.watch.begin_step(4)
        return range(victim, victim + 1), "RuntimeError", "it ended its run after training step 3, but rank"
    rank.stand_at(True, "train.py:51 in backward")
    return anybody, WAITED, f"  rank {victim} waits in training_step, step 3, at train.py:51 in backward"


def random_faults(size: int, number: int, server: Server, draw: random.Random) -> int:
    """Inflict faults, each on a new world; returns in how many the right rank was named on all ranks."""
    right = 0
    for index in range(number):
        fault = FAULTS[index % len(FAULTS)]
        victim = draw.randrange(size)
        dead = range(victim, victim + 8) if fault == "a node is killed" else [victim]
        others = [rank for rank in range(size) if rank not in dead]
        world = World(size, server.new_store(), draw)
        named, error, said = inflict(world, fault, victim)
        found = world.learnt([draw.choice(others)])
        is_right = len(found) == 1 and all(
            each.error == error and each.rank in named and said in each.message for each in found
        )
        right += is_right
        print(f"{index + 1}: {fault}, rank {victim}: {'right' if is_right else found}", flush=True)
    return right


# --- Sizes ------------------------------------------------------------------------------------------------------------


def measure(size: int, server: Server, draw: random.Random) -> dict[str, float]:
    """What the store does in steady work, and for a killed rank until all know of it."""
    world = World(size, server.new_store(), draw)
    before = Counter(world.counted)
    for _ in range(4):
        world.beat()
    a_beat = (world.counted["operations"] - before["operations"]) / (4 * size)
    before = Counter(world.counted)
    beats = sum(rank.watch.record.beat for rank in world.ranks)
    began_s = world.now
    store_s = server.seconds()
    inflict(world, "killed", size // 2)
    found = world.learnt([0])
    assert {each.rank for each in found} == {size // 2}, found
    counted = world.counted - before
    beats = sum(rank.watch.record.beat for rank in world.ranks) - beats
    return {
        "a beat": a_beat,
        "a second": a_beat * size / world.interval_s,
        "a rank": (counted["operations"] - BEAT_OPERATIONS * beats) / size,
        "operations": counted["operations"],
        "keys": counted["keys"],
        "seconds": world.now - began_s,
        "store s": server.seconds() - store_s,
    }


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    server = Server()
    draw = random.Random(args.seed)
    if args.faults:
        right = random_faults(args.sizes[0], args.faults, server, draw)
        print(f"{args.sizes[0]} ranks: the right one named in {right} of {args.faults} faults")
        sys.exit(right != args.faults)
    print("| ranks | a beat | a second | killed: a rank | all | growth | keys | seconds | store s |")
    print(f"|{' --- |' * 9}")
    last = None
    is_good = True
    for size in args.sizes:
        row = measure(size, server, draw)
        growth = row["operations"] / last[1] if last is not None and last[0] * 2 == size else float("nan")
        last = size, row["operations"]
        numbers = [
            f"{row['a beat']:.2f}",
            f"{row['a second']:.0f}",
            f"{row['a rank']:.2f}",
            f"{row['operations']:.0f}",
        ]
        numbers += [f"{growth:.2f}", f"{row['keys']:.0f}", f"{row['seconds']:.1f}", f"{row['store s']:.2f}"]
        print(f"| {' | '.join([str(size), *numbers])} |", flush=True)
        is_good &= (
            row["a beat"] <= MOST_A_BEAT
            and row["a second"] <= MOST_A_SECOND
            and row["a rank"] <= MOST_A_RANK
        )
        is_good &= not growth > MOST_GROWTH and not row["store s"] > MOST_STORE_S
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
