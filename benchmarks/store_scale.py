"""What the board asks of the store with 64 to 1,024 ranks, and whom they name when one of them fails.

Ranks are threads of this process with the real `Watchdog` and `Board`, a connection to the store each; the store is a
process of its own, so that its processor time can be read (on Linux). The main thread of a rank is played.

    python benchmarks/store_scale.py                                  # prints a table of sizes 64, 128, 256, 512, 1024
    python benchmarks/store_scale.py --faults 50 --sizes 256          # random faults: is the right rank named?

"A rank, killed" is what a killed rank costs each rank beside its heartbeats, until all know of it; "all, killed" adds
20 heartbeats of all ranks. "Keys" and "store s", the store's processor time, are those of the whole incident.

It ends with status 1 if a number is worse than what docs/how_it_works.md says.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lightning_automodel.distributed import board as board_module
from lightning_automodel.distributed.failures import MISSED_HEARTBEATS, STUCK, RankFailure
from lightning_automodel.failure import watchdog as watchdog_module
from lightning_automodel.failure.watchdog import RUN, Watchdog

SIZES = (64, 128, 256, 512, 1024)
TIMEOUT = timedelta(minutes=10)
CLOSED = "[gloo] Connection closed by peer"
PATIENCE_S = 240.0
BEAT_OPERATIONS, INCIDENT_BEATS = 2, 20
MOST_A_BEAT, MOST_A_SECOND, MOST_A_RANK, MOST_GROWTH, MOST_STORE_S = 3.0, 4000.0, 5.0, 2.2, 5.0


class World:
    """A store, and all ranks of one size."""

    def __init__(self, size: int, slower: float) -> None:
        self.counted: Counter[str] = Counter()
        pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self._server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
        self._server.start()
        self.port = pipe.recv()
        self.ranks = [Rank(rank, size, self) for rank in range(size)]
        self.interval_s = self.ranks[0].board.interval_s
        for each in self.ranks:
            each.board.interval_s *= slower
            each.board.start()
        for each in self.ranks:
            each.board.is_open.wait(PATIENCE_S)

    def store_s(self) -> float:
        """Processor time of the store's process so far; NaN where it cannot be read."""
        try:
            with open(f"/proc/{self._server.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return float("nan")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def beats(self) -> int:
        """Heartbeats of all ranks so far."""
        return sum(each.board.beats for each in self.ranks)

    def close(self) -> None:
        """End all threads and the store."""
        for each in self.ranks:
            each.die()
        for each in self.ranks:
            each.board.has_ended.wait(PATIENCE_S)
        self._server.kill()
        self._server.join()


def serve(pipe: Connection) -> None:
    """Host a store until this process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


class Rank:
    """One rank: its watchdog, without the thread that would end this process, and what its main thread does."""

    def __init__(self, rank: int, size: int, world: World) -> None:
        self.rank, self.named, self._world, self._is_dead = rank, None, world, False
        store = dist.TCPStore("127.0.0.1", world.port, is_master=False, wait_for_workers=False)
        group = _Group(store)
        played = SimpleNamespace(
            get_rank=lambda: rank,
            get_world_size=lambda: size,
            group=SimpleNamespace(WORLD=group),
            FileStore=dist.FileStore,
        )
        real = board_module.dist
        board_module.dist = watchdog_module.dist = played  # type: ignore[assignment]
        try:
            self.watchdog = Watchdog(TIMEOUT, lambda: "training_step", raises_on_sigterm=False)
        finally:
            board_module.dist = watchdog_module.dist = real  # type: ignore[assignment]
        self.board = self.watchdog.board
        self.board._connect = lambda: self._counting(dist.PrefixStore("world", store))  # type: ignore[method-assign]
        self.watchdog.training_step = 3
        self.stands_at(True, "train.py:39 in training_step")

    def stands_at(self, waits: bool, line: str) -> None:
        """Where the main thread is."""
        self.watchdog.raised_at = waits, line

    def die(self) -> None:
        """SIGKILL: its thread does nothing more."""
        self._is_dead = True

    def fail(self, exception: BaseException) -> threading.Thread:
        """The main thread raises, and learns why."""

        def explain() -> None:
            self.watchdog.explain(exception, "training_step")
            self.board.is_decided.wait(PATIENCE_S)

        thread = threading.Thread(target=explain, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """The main thread has come to the end of its run."""
        threading.Thread(target=self.watchdog.wait_for_all, daemon=True).start()

    def _counting(self, store: dist.Store) -> Any:
        return _Counting(store, self._world.counted, lambda: self._is_dead)


class _Group:
    """What the board asks of a process group."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def get_group_store(self) -> dist.Store:
        return self._store


class _Counting:
    """Passes calls on to a store, and counts them and the keys that they touch."""

    def __init__(self, store: dist.Store, counted: Counter[str], is_dead: Callable[[], bool]) -> None:
        self._store, self._counted, self._is_dead = store, counted, is_dead

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            if self._is_dead():
                raise SystemExit
            self._counted["operations"] += 1
            self._counted["keys"] += len(args[0]) if isinstance(args[0], list) else 1
            return method(*args)

        return call


# --- Faults -----------------------------------------------------------------------------------------------------------


def inflict(world: World, fault: str, victim: int, failing: Sequence[int]) -> tuple[int | None, str]:
    """Let it happen, and collectives of the ``failing`` ranks fail; returns the rank to be named, and its error."""
    rank, error = world.ranks[victim], RuntimeError(CLOSED)
    named: tuple[int | None, str] = (victim, MISSED_HEARTBEATS)
    if fault == "killed":
        rank.die()
    elif fault == "a node is killed":
        for each in range(victim, min(victim + 8, len(world.ranks))):
            world.ranks[each].die()
    elif fault == "raised":
        rank.fail(ValueError("no labels here"))
        named = victim, "ValueError"
    elif fault == "stuck":
        rank.stands_at(False, "train.py:12 in read")
        named = victim, STUCK
    elif fault == "left behind":
        rank.end()
        for each in world.ranks:
            each.watchdog.training_step += each is not rank
        named = victim, "RuntimeError"
    else:
        rank.stands_at(True, "train.py:51 in backward")
        named = None, "RuntimeError"
    for each in failing:
        world.ranks[each].fail(error)
    return named


FAULTS = ("killed", "a node is killed", "raised", "stuck", "left behind", "waiting at another line")


def learned(world: World) -> list[RankFailure]:
    """What each living rank reports, once all know."""
    living = [each for each in world.ranks if not each._is_dead]
    deadline = time.monotonic() + PATIENCE_S
    for each in living:
        each.board.is_decided.wait(max(0.0, deadline - time.monotonic()))
    verdicts = [each.board.verdicts[RUN] for each in living]
    assert all(verdicts), f"{verdicts.count(None)} ranks know nothing after {PATIENCE_S:g} s"
    return verdicts  # type: ignore[return-value]


def random_faults(size: int, number: int, seed: int, slower: float) -> int:
    """Inflict faults, each on a new world; returns in how many the right rank was named on all ranks."""
    draw, right = random.Random(seed), 0
    for index in range(number):
        fault, victim = FAULTS[index % len(FAULTS)], draw.randrange(size)
        dead = range(victim, victim + 8) if fault == "a node is killed" else [victim]
        others = [rank for rank in range(size) if rank not in dead]
        world = World(size, slower)
        rank, error = inflict(world, fault, victim, draw.sample(others, draw.choice([1, 3, len(others)])))
        found = set(learned(world))
        world.close()
        is_right = len(found) == 1 and all(each.error == error and rank in (None, each.rank) for each in found)
        if rank is None:
            is_right = is_right and f"rank {victim}: training_step, at train.py:51 in backward" in str(*found)
        right += is_right
        print(f"{index + 1}: {fault}, rank {victim}: {'right' if is_right else found}", flush=True)
    return right


# --- Sizes ------------------------------------------------------------------------------------------------------------


def measure(size: int, steady_s: float, slower: float) -> dict[str, float]:
    """Operations of steady work, and of a killed rank until all know of it: those beside heartbeats, and all keys."""
    world = World(size, slower)
    time.sleep(slower * world.interval_s)
    before, beats = Counter(world.counted), world.beats()
    time.sleep(slower * steady_s)
    steady, beats = world.counted["operations"] - before["operations"], world.beats() - beats
    row = {"a beat": steady / beats, "a second": steady / beats * size / world.interval_s}
    before, beats = Counter(world.counted), world.beats()
    began_s, store_s = time.monotonic(), world.store_s()
    inflict(world, "killed", size // 2, [rank for rank in range(size) if rank != size // 2])
    verdicts = learned(world)
    assert {each.rank for each in verdicts} == {size // 2}, set(verdicts)
    beside = world.counted["operations"] - before["operations"] - BEAT_OPERATIONS * (world.beats() - beats)
    row |= {"beside": beside / size, "operations": beside + INCIDENT_BEATS * BEAT_OPERATIONS * size}
    row |= {"keys": world.counted["keys"] - before["keys"]}
    row |= {"seconds": time.monotonic() - began_s, "store s": world.store_s() - store_s}
    world.close()
    return row


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--steady-s", type=float, default=5.0)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--slower", type=float, default=1.0, help="stretch heartbeats, for a machine that is busy")
    args = parser.parse_args()
    if args.faults:
        right = random_faults(args.sizes[0], args.faults, args.seed, args.slower)
        print(f"{args.sizes[0]} ranks: the right one named in {right} of {args.faults} faults")
        sys.exit(right != args.faults)
    print("| ranks | operations: a beat | a second | a rank, killed | all, killed | growth | keys | s | store s |")
    print(f"|{' --- |' * 9}")
    last, is_good = None, True
    for size in args.sizes:
        row = measure(size, args.steady_s, args.slower)
        growth = row["operations"] / last[1] if last is not None and last[0] * 2 == size else float("nan")
        last = size, row["operations"]
        numbers = [f"{row['a beat']:.2f}", f"{row['a second']:.0f}", f"{row['beside']:.1f}", f"{row['operations']:.0f}"]
        numbers += [f"{growth:.2f}", f"{row['keys']:.0f}", f"{row['seconds']:.1f}", f"{row['store s']:.2f}"]
        print(f"| {' | '.join([str(size), *numbers])} |", flush=True)
        is_good &= row["a beat"] <= MOST_A_BEAT and row["a second"] <= MOST_A_SECOND
        is_good &= row["beside"] <= MOST_A_RANK and not growth > MOST_GROWTH and not row["store s"] > MOST_STORE_S
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
