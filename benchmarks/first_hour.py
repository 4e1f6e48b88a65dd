"""A cluster's first hour: on any number of ranks, each check with what must be seen; docs/first_hour.md.

torchrun starts one of these for each rank, on one node or on several. It starts each check in a process of its
own, so that a rank that is killed or hangs ends its check alone, and the next one follows. The first rank writes
`report.md` into the output folder, which all nodes should see, after each check.

    torchrun --standalone --nproc-per-node 8 benchmarks/first_hour.py --output first_hour
    torchrun --standalone --nproc-per-node 8 benchmarks/first_hour.py --output dry --device cpu    # without a GPU
"""

import argparse
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from first_hour_checks import MEBIBYTE, STEPS, Place, collective_timeout
from report import describe_environment, table

EXACT = 1e-12  # distance of float64 weights from one process, as a share of how far training has moved them
LEAVE_S = 60.0  # within which all ranks must have left after one was killed
LINKS = {
    "node": "within a node",
    "between": "between nodes, each rank with its like",
    "all": "over all ranks",
}
PAIRS = {
    "pairs_in_node": "first two ranks of a node",
    "pairs_of_nodes": "first ranks of two nodes",
}
GBITS_SHARE = 0.7  # of what --gbits says that a pair of nodes must reach
MEMORY_RATIO = 1.15  # of the plan


@dataclass(frozen=True)
class Ended:
    """How a rank's process of a check has ended, its JSON lines as one mapping, and other lines of it."""

    rank: int
    status: int
    started: float
    ended: float
    said: dict[str, Any]
    output: str


@dataclass(frozen=True)
class Row:
    """A line of the report. ``is_right`` is None where nothing is judged, as times of ranks that share few cores."""

    check: str
    expected: str
    seen: str
    is_right: bool | None

    def cells(self) -> list[str]:
        """For the table."""
        verdict = {True: "yes", False: "**no**", None: "not judged"}[self.is_right]
        return [self.check, self.expected, self.seen, verdict]


class Driver:
    """Runs checks on this rank, beside those of the other ranks: each check is a meeting of all of them in a store."""

    def __init__(self, place: Place, args: argparse.Namespace) -> None:
        self.place = place
        self.args = args
        self.is_judged = args.device == "cuda"  # by time and memory
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=place.rank == 0 and not is_hosted,
            timeout=timedelta(seconds=2 * args.timeout),
        )

    def run(self, check: str, num_ranks: int, **arguments: Any) -> list[Ended]:
        """Run ``check`` of `CHECKS` on the first ``num_ranks``, and tell how they ended. All drivers call it."""
        key = f"first_hour/{check}/{arguments.get('way', '')}"
        if self.place.rank == 0:
            self.store.set(f"{key}/port", str(_free_port()))
        port = self.store.get(f"{key}/port").decode()
        if self.place.rank < num_ranks:
            ended = self._run_own(check, num_ranks, port, arguments)
            self.store.set(f"{key}/{self.place.rank}", json.dumps(asdict(ended)))
        found = [Ended(**json.loads(self.store.get(f"{key}/{rank}"))) for rank in range(num_ranks)]
        return found

    def _run_own(self, check: str, num_ranks: int, port: str, arguments: dict[str, Any]) -> Ended:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        environment["LOCAL_WORLD_SIZE"] = str(min(num_ranks, self.place.local_world_size))
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        environment.pop("TORCHELASTIC_ERROR_FILE", None)
        described = {**vars(self.args), "output": str(self.args.output), **arguments}
        script = Path(__file__).with_name("first_hour_checks.py")
        command = [sys.executable, str(script), check, json.dumps(described)]
        log = self.args.output / f"{check}{arguments.get('way', '')}.rank{self.place.rank}.log"
        started = time.time()
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
            try:
                status = process.wait(self.args.timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = 124
        ended = time.time()
        said: dict[str, Any] = {}
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith('{"'):
                said |= json.loads(line)
        # Stacks may follow the line that names a rank.
        names = [line for line in dict.fromkeys(lines) if re.search(r"rank \d+ on ", line)]
        output = "\n".join([*names[:10], *lines[-10:]])
        return Ended(self.place.rank, status, started, ended, said, output[-4000:])


def _free_port() -> int:
    """Below those that Linux gives to connections, of which one could get it before the check has started."""
    while True:
        with suppress(OSError), socket.create_server(("", random.randrange(12_000, 32_000))) as server:
            return int(server.getsockname()[1])


def failed(ended: list[Ended]) -> list[Row]:
    """Rows of ranks that did not end with 0."""
    bad = [each for each in ended if each.status]
    if not bad:
        return []
    tail = " ".join(bad[0].output.split())[-300:].replace("|", "/")
    ranks = ", ".join(str(each.rank) for each in bad)
    return [
        Row("processes", "all end with 0", f"ranks {ranks} did not, with {bad[0].status}: ...{tail}", False)
    ]


def check_links(driver: Driver) -> list[Row]:
    ended = driver.run("links", driver.place.world_size)
    if bad := failed(ended):
        return bad
    first, *others = [each.said for each in ended]
    unlike = [each["host"] for each in others if each["versions"] != first["versions"]]
    devices = sorted({each.said["device"] for each in ended})
    hosts = {each.said["host"] for each in ended}
    shown = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    rows = [
        Row("versions", "the same on all ranks", f"{shown}; unlike on {unlike or 'none'}", not unlike),
        Row("devices", "one kind", f"{', '.join(devices)} on {len(hosts)} hosts", len(devices) == 1),
    ]
    for key, name in LINKS.items():
        rates = [each.said["rates"][key] for each in ended if key in each.said["rates"]]
        if rates:
            seen = f"{min(rates):.2f} to {max(rates):.2f} GB/s a rank"
            is_even = min(rates) >= max(rates) / 2 if driver.is_judged else None
            rows.append(Row(f"all-reduce {name}", "no rank below half of the fastest", seen, is_even))
    hosts = [each.said["host"] for each in ended]
    for key, name in PAIRS.items():
        pairs = [tuple(pair) for each in ended for pair in each.said[key]]
        for size in sorted({pair[2] for pair in pairs}):
            rows.append(_pairs_row(driver, f"{name}, {size // MEBIBYTE} MiB", hosts, pairs, size))
    return rows


def _pairs_row(driver: Driver, name: str, hosts: list[str], pairs: list[tuple[Any, ...]], size: int) -> Row:
    """Rates of all pairs at one size; judged at the largest, beside each other and what the network should do."""
    rates = sorted((rate, one, other) for one, other, own, rate in pairs if own == size)
    slowest, one, other = rates[0]
    median = rates[len(rates) // 2][0]
    between = f"rank {one} on {hosts[one]} and rank {other} on {hosts[other]}"
    seen = f"median {median:.2f} GB/s each way, slowest {slowest:.2f} between {between}"
    expected = "for comparison"
    is_right = None
    if size == max(pair[2] for pair in pairs):
        expected = "no pair below half of the median"
        least = median / 2
        if driver.is_judged and len({pair[:2] for pair in pairs}) > 1:
            is_right = slowest >= least
        if name.startswith(PAIRS["pairs_of_nodes"]) and driver.args.gbits:
            expected += f", nor below {GBITS_SHARE:g} of --gbits {driver.args.gbits:g}"
            is_right = slowest >= max(least, GBITS_SHARE * driver.args.gbits / 8)
    return Row(name, expected, seen, is_right)


def check_exact(driver: Driver) -> list[Row]:
    ended = driver.run("exact", driver.place.world_size)
    rows = failed(ended)
    for name in ("fsdp2", "ddp", "hsdp"):
        errors = [each.said[name] for each in ended if name in each.said]
        if errors:
            expected = f"within {EXACT:g} of one process"
            rows.append(
                Row(f"weights of {name}, float64", expected, f"{max(errors):.1e}", max(errors) <= EXACT)
            )
    return rows


def check_speed(driver: Driver) -> list[Row]:
    measured: dict[str, dict[str, Any]] = {}
    rows = []
    base = case_of(driver)
    for way in ("loop", "model-parallel", "automodel"):
        ended = driver.run("speed", driver.place.world_size, way=way, case=asdict(replace(base, way=way)))
        rows += failed(ended)
        if "seconds" in ended[0].said:
            measured[way] = ended[0].said | {
                "start": max(each.said["began"] - each.started for each in ended)
            }
    for way, found in measured.items():
        seen = f"{found['seconds']:.3f} s, {found['peak']:,.0f} MiB, {found['start']:.0f} s from start to step 2"
        expected = "for comparison"
        is_right = None
        if way == "automodel" and "loop" in measured:
            ratio = found["seconds"] / measured["loop"]["seconds"]
            seen += f", {ratio:.2f} of the loop's time"
            expected = "at most 1.1 of the loop's time"
            is_right = ratio <= 1.1 if driver.is_judged else None
        rows.append(Row(f"a step by {way}", expected, seen, is_right))
    if "automodel" in measured:
        chosen = measured["automodel"]["chosen"]
        planned = planned_memory(driver, base, chosen) / MEBIBYTE
        ratio = measured["automodel"]["peak"] / planned
        is_right = ratio <= MEMORY_RATIO if driver.is_judged else None
        kept = "" if chosen["reshard_during_accumulation"] else "; parameters kept for the window"
        seen = f"{measured['automodel']['peak']:,.0f} of {planned:,.0f} MiB, {ratio:.2f}{kept}"
        rows.append(Row("memory beside the plan", f"at most {MEMORY_RATIO}", seen, is_right))
    return rows


def planned_memory(driver: Driver, case: Any, chosen: dict[str, bool]) -> float:
    """What the plan says that a rank holds at its peak, with what the run has ``chosen`` for "auto" (`CHOICES`).

    Each driver of a node plans: on the meta device, of which a model takes no memory.
    """
    from llama import LlamaModule

    from lightning_automodel.options import StrategyOptions
    from lightning_automodel.plan.layouts import Plan
    from lightning_automodel.plan.recording import run

    options = StrategyOptions(activation_checkpointing=case.recompute, **{**dict(case.options), **chosen})
    batch = list(case.batches())[-1]
    planned = LlamaModule(replace(case, device="meta"))
    micro = run(lambda: (planned, batch), "bf16-true" if case.device == "cuda" else "32-true", options)
    place = driver.place
    is_host = case.device == "cpu"
    plan = Plan(micro, options, place.world_size, case.accumulate, place.local_world_size, is_host)
    return plan.high_water


def check_killed(driver: Driver) -> list[Row]:
    if driver.place.world_size == 1:
        return []
    *others, killed = driver.run("fault", driver.place.world_size, way="SIGKILL")
    if "signalled" not in killed.said:
        return failed([*others, killed])
    seconds = max(each.ended for each in others) - killed.said["signalled"]
    named = [each.rank for each in others if f"rank {killed.rank} " not in each.output]
    silent = [each.rank for each in others if each.status == 0]
    seen = f"{seconds:.1f} s; ranks that ended with 0: {silent or 'none'}; that do not name it: {named or 'none'}"
    is_right = seconds <= LEAVE_S and not silent and not named
    return [Row("the last rank is killed", f"all leave within {LEAVE_S:.0f} s, and name it", seen, is_right)]


def check_terminated(driver: Driver) -> list[Row]:
    ended = driver.run("fault", driver.place.world_size, way="SIGTERM")
    steps = sorted({each.said.get("stopped", -1) for each in ended})
    if "signalled" not in ended[-1].said or -1 in steps:
        return failed(ended)
    seconds = max(each.ended for each in ended) - ended[-1].said["signalled"]
    is_right = len(steps) == 1 and seconds <= LEAVE_S
    expected = f"all stop after the same step, within {LEAVE_S:.0f} s"
    return [Row("SIGTERM to the last rank", expected, f"after steps {steps}, {seconds:.1f} s", is_right)]


def check_resumed(driver: Driver) -> list[Row]:
    place = driver.place
    case = asdict(replace(case_of(driver), warm_up=0, steps=STEPS, accumulate=1, recompute=False))
    saved = driver.run("save", place.world_size, case=case)
    if bad := failed(saved):
        return bad
    said = saved[0].said
    fewer = max(place.world_size // 2, 1)
    resumed = driver.run("resume", fewer, case={**case, "ranks": fewer})
    if place.rank == 0:
        checkpoint = driver.args.output / "checkpoint.ckpt"  # tens of GB, for a large model
        if checkpoint.is_file():
            checkpoint.unlink()
        shutil.rmtree(checkpoint, ignore_errors=True)
    seen = f"{said['mebibytes']:,.0f} MiB in {max(each.said['saved_s'] for each in saved):.1f} s"
    rows = [Row("a save", "all ranks see it", seen, said["mebibytes"] > 0)]
    if bad := failed(resumed):
        return rows + bad
    loaded = resumed[0].said
    is_finite = all(each.said["finite"] for each in resumed)
    is_same = is_finite and loaded["step"] == 2 * STEPS and loaded["digest"] == said["digest"]
    seen = f"step {loaded['step']}, loaded in {max(each.said['loaded_s'] for each in resumed):.1f} s"
    return [*rows, Row(f"resumed on {fewer} ranks", f"the saved weights; step {2 * STEPS}", seen, is_same)]


STAGES: dict[str, Callable[[Driver], list[Row]]] = {
    "links": check_links,
    "exact": check_exact,
    "speed": check_speed,
    "killed": check_killed,
    "terminated": check_terminated,
    "resumed": check_resumed,
}


def case_of(driver: Driver) -> Any:
    """The Llama of `speed` and `resumed`."""
    from llama import Case

    args = driver.args
    is_cuda = args.device == "cuda"
    return Case(
        "automodel",
        args.shape or ("llama3-1b" if is_cuda else "narrow"),
        args.device,
        4096 if is_cuda else 32,
        accumulate=2,
        steps=8 if is_cuda else 2,
        ranks=driver.place.world_size,
        is_chunked=True,
        recompute=True,
        timeout=collective_timeout(args.timeout),
    )


def write_report(driver: Driver, rows: list[Row], seconds: dict[str, float]) -> None:
    """Into the output folder."""
    place = driver.place
    lines = [
        f"# The first hour of {place.world_size} ranks, {place.local_world_size} on a node",
        "",
        *(f"- {name}: {value}" for name, value in describe_environment("transformers").items()),
        f"- command: `benchmarks/first_hour.py {' '.join(sys.argv[1:])}`",
        f"- seconds: {', '.join(f'{name} {value:.0f}' for name, value in seconds.items())}",
        "",
        table(["check", "must be", "seen", "right"], [row.cells() for row in rows]),
    ]
    (driver.args.output / "report.md").write_text("\n".join(lines) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, required=True, help="folder that all nodes see")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(%(default)s)")
    made.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="in this order")
    made.add_argument("--shape", help="of the Llama, as in llama.py (llama3-1b)")
    made.add_argument(
        "--gbits",
        type=float,
        help="Gbit/s of the interface of a node's first rank (links judges by it)",
    )
    made.add_argument("--timeout", type=float, default=600, help="seconds of one check (%(default)s)")
    return made


def main() -> int:
    args = parser().parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    driver = Driver(Place.from_environment(), args)
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for index, stage in enumerate(args.stages):
        started = time.monotonic()
        found = STAGES[stage](driver)
        # Each of the others would wait for its timeout on links that fail. All drivers see the same rows.
        is_stopped = stage == "links" and any(row.is_right is False for row in found)
        if is_stopped:
            found += [
                Row(left, "run", "not run: first mend what `links` says", None)
                for left in args.stages[index + 1 :]
            ]
        rows += found
        seconds[stage] = time.monotonic() - started
        if driver.place.rank == 0:
            write_report(driver, rows, seconds)
            for row in found:
                print(" | ".join(row.cells()), flush=True)
        if is_stopped:
            break
    # A launcher may end all as soon as one has ended with 1: the report is written by then. And the others may still
    # read what the first rank hosts.
    if driver.place.rank != 0:
        driver.store.wait(["first_hour/left/0"])
    driver.store.set(f"first_hour/left/{driver.place.rank}", "")
    if driver.place.rank == 0:
        driver.store.wait([f"first_hour/left/{rank}" for rank in range(driver.place.world_size)])
    return 1 if any(row.is_right is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
