"""What the board asks of the store with 64 to 1,024 ranks, and whom they name when one of them fails.

Every rank has the real `Watchdog` and `Board`. One thread lets them send their heartbeats in turn, in random
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
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed.failures import MISSED_HEARTBEATS, STUCK, RankFailure
from lightning_automodel.failure import watchdog as watchdog_module
from lightning_automodel.failure.watchdog import RUN, Watchdog

SIZES = (64, 128, 256, 512, 1024)
TIMEOUT = timedelta(minutes=10)
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
        self.interval_s = self.ranks[0].board.interval_s
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

    def verdicts(self) -> set[RankFailure]:
        """What the living ranks know, once all do."""
        for _ in range(MOST_BEATS):
            self.beat()
            verdicts = [rank.board.verdicts[RUN] for rank in self.living()]
            if all(verdicts):
                return set(verdicts)  # type: ignore[arg-type]
        raise TimeoutError(f"{verdicts.count(None)} ranks know nothing after {MOST_BEATS} heartbeats")


def serve(pipe: Connection) -> None:
    """Host a store until this process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


class Rank:
    """One rank: its watchdog without its threads, and what its main thread does."""

    def __init__(self, rank: int, size: int, world: World) -> None:
        self.rank = rank
        self.is_dead = False
        played = SimpleNamespace(
            get_rank=lambda: rank, get_world_size=lambda: size, group=SimpleNamespace(WORLD=_Group())
        )
        real = watchdog_module.dist, watchdog_module.connect_again
        # Type: ignore[assignment]
        watchdog_module.dist = played
        watchdog_module.connect_again = lambda *_: None
        try:
            self.watchdog = Watchdog(TIMEOUT, lambda: "training_step", raises_on_sigterm=False)
        finally:
            watchdog_module.dist, watchdog_module.connect_again = real
        self.board = self.watchdog.board
        self._store = _Counting(world.store, world.counted)
        self.board.clock = lambda: world.now  # type: ignore[assignment]
        self.watchdog.begin_step(3, is_training=True)
        self.stand_at(True, "train.py:39 in training_step")

    def beat(self) -> None:
        """Send a heartbeat, unless killed."""
        if not self.is_dead:
            self.board.beat(self._store)  # type: ignore[arg-type]

    def stand_at(self, waits: bool, line: str) -> None:
        """Let the main thread be there."""
        self.watchdog.stand_at((waits, line))

    def fail(self, exception: Exception) -> None:
        """The main thread raises: in a collective a `RuntimeError`, else it posts what it has raised."""
        own = RankFailure.from_exception(exception, self.rank, "training_step")
        if isinstance(exception, RuntimeError):
            self.watchdog._own = own
            self.beat()
        else:
            self.board.post(self._store, RUN, own)  # type: ignore[arg-type]

    def end(self) -> None:
        """The main thread has come to the end of its run."""
        self.watchdog._has_ended = True


class _Group:
    """A process group, to count the runs of."""


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


def inflict(world: World, fault: str, victim: int, failing: Sequence[int]) -> tuple[int | None, str]:
    """Let it happen, and collectives of the ``failing`` ranks fail; returns the rank to be named, and its error."""
    rank = world.ranks[victim]
    named: tuple[int | None, str] = (victim, MISSED_HEARTBEATS)
    if fault in ("killed", "a node is killed"):
        for each in world.ranks[victim : victim + (1 if fault == "killed" else 8)]:
            each.is_dead = True
    elif fault == "raised":
        rank.fail(ValueError("no labels here"))
        named = victim, "ValueError"
    elif fault == "stuck":
        rank.stand_at(False, "train.py:12 in read")
        named = victim, STUCK
    elif fault == "left behind":
        rank.end()
        for other in world.ranks:
            if other is not rank:
                other.watchdog.begin_step(4, is_training=True)
        named = victim, "RuntimeError"
    else:
        rank.stand_at(True, "train.py:51 in backward")
        named = None, "RuntimeError"
    for other in failing:
        world.ranks[other].fail(RuntimeError("[gloo] Connection closed by peer"))
    return named


def random_faults(size: int, number: int, server: Server, draw: random.Random) -> int:
    """Inflict faults, each on a new world; returns in how many the right rank was named on all ranks."""
    right = 0
    for index in range(number):
        fault = FAULTS[index % len(FAULTS)]
        victim = draw.randrange(size)
        dead = range(victim, victim + 8) if fault == "a node is killed" else [victim]
        others = [rank for rank in range(size) if rank not in dead]
        world = World(size, server.new_store(), draw)
        rank, error = inflict(world, fault, victim, draw.sample(others, draw.choice([1, 3, len(others)])))
        found = world.verdicts()
        is_right = len(found) == 1 and all(
            each.error == error and rank in (None, each.rank) for each in found
        )
        if rank is None:
            is_right = is_right and f"rank {victim}: training_step, at train.py:51 in backward" in str(
                *found
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
    beats = sum(rank.board.beats for rank in world.ranks)
    began_s = world.now
    store_s = server.seconds()
    inflict(world, "killed", size // 2, [rank for rank in range(size) if rank != size // 2])
    found = world.verdicts()
    assert {each.rank for each in found} == {size // 2}, found
    counted = world.counted - before
    beats = sum(rank.board.beats for rank in world.ranks) - beats
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
