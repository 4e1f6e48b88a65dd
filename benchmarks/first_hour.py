"""A cluster's first hour: on any number of ranks, each check with what must be seen; docs/first_hour.md.

torchrun starts one of these for each rank, on one node or on several. It starts each check in a process of its
own, so that a rank that is killed or hangs ends its check alone, and the next one follows. The first rank writes
`report.md` into the output folder, which all nodes should see, after each check.

    torchrun --standalone --nproc-per-node 8 benchmarks/first_hour.py --output first_hour
    torchrun --standalone --nproc-per-node 8 benchmarks/first_hour.py --output dry --device cpu    # without a GPU
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import statistics
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
from first_hour_checks import HEARTBEAT_S, MEBIBYTE, STEPS, Place, collective_timeout
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
    "pairs_of_nodes": "like ranks of two nodes, all at once",
}
GBITS_SHARE = 0.7  # of what --gbits says that a pair of nodes must reach
MEMORY_RATIO = 1.15  # of the plan
TIME_RATIO = 1.1  # of the loop's median step
WAYS = ("loop", "automodel", "loop", "automodel", "model-parallel")  # of `speed`, in turns
# Distances from the loop, as shares of what it has. On 2 CPU ranks they are 0 in each precision, also after several
# steps; on GPUs kernels add in another order each time. In bfloat16, to round the frequencies of rotary positions
# moved gradients by 3e-4 to 5e-4 and losses by 3e-6 to 3e-5; a mean of means moved gradients by 1.3e-2.
LOSSES_OFF = {"bf16-true": 1e-3, "bf16-mixed": 1e-3, "32-true": 1e-5}
GRADIENTS_OFF = {"bf16-true": 2e-3, "bf16-mixed": 2e-3, "32-true": 1e-5}


@dataclass(frozen=True)
class Ended:
    """How a rank's process of a check has ended.

    Attributes:
        rank: The rank.
        status: Of its process; 124 if it ran out of time.
        started: Seconds since 1970.
        ended: The same.
        said: Its JSON lines as one mapping.
        names: Ranks that its log names, as "rank 7 on node3".
        output: The last lines of its log.
        networks: What NCCL names as its network, where it was asked.
    """

    rank: int
    status: int
    started: float
    ended: float
    said: dict[str, Any]
    names: list[str]
    output: str
    networks: list[str]


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
        key = f"first_hour/{_label(check, arguments)}"
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
        nccl_log = self.args.output / f"{check}.rank{self.place.rank}.nccl.log"
        asks_network = check == "links" and self.args.device == "cuda"
        if asks_network:
            # Into a file of its own, where NCCL cannot tear a line of the check.
            asked = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(nccl_log)}
            environment |= asked
        described = {**vars(self.args), "output": str(self.args.output), **arguments}
        script = Path(__file__).with_name("first_hour_checks.py")
        command = [sys.executable, str(script), check, json.dumps(described)]
        log = self.args.output / f"{_label(check, arguments)}.rank{self.place.rank}.log"
        started = time.time()
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
            try:
                status = process.wait(self.args.timeout)
            except subprocess.TimeoutExpired:
                status = 124
            finally:  # also where torchrun ends this process: the other would keep its GPU
                process.kill()
                process.wait()
        ended = time.time()
        text = log.read_text(errors="replace")
        networks = []
        if asks_network:
            nccl_text = text
            if nccl_log.is_file():
                nccl_text += nccl_log.read_text(errors="replace")
            networks = networks_of(nccl_text)
        return Ended(
            rank=self.place.rank,
            status=status,
            started=started,
            ended=ended,
            said=said_in(text),
            names=names_in(text),
            output="\n".join(text.splitlines()[-10:])[-4000:],
            networks=networks,
        )


def _label(check: str, arguments: dict[str, Any]) -> str:
    """Of one run of a check."""
    return f"{check}{arguments.get('way', '')}{arguments.get('turn', '')}"


def said_in(text: str) -> dict[str, Any]:
    """The JSON lines of a log as one mapping, without those that were torn, as by a process that was killed."""
    said: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith('{"'):
            with suppress(json.JSONDecodeError):
                said |= json.loads(line)
    return said


def names_in(text: str) -> list[str]:
    """The ranks that a log names, wherever: stacks may follow the line that does."""
    return list(dict.fromkeys(re.findall(r"rank \d+ on \S+", text)))


def networks_of(text: str) -> list[str]:
    """The networks between nodes that NCCL's INFO lines name: by its connections, else by what it has chosen."""
    for pattern in (
        r"via NET/([^/\s][^/\n]*)/",
        r"Assigned NET plugin (.+?) to comm",
        r"Using network (.+)",
    ):
        found = {name.strip() for name in re.findall(pattern, text)}
        if found:
            return sorted(found)
    return []


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
    num_hosts = len({each.said["host"] for each in ended})
    shown = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    rows = [
        Row("versions", "the same on all ranks", f"{shown}; unlike on {unlike or 'none'}", not unlike),
        Row("devices", "one kind", f"{', '.join(devices)} on {num_hosts} hosts", len(devices) == 1),
    ]
    rows.append(network_row(driver, ended))
    for key, name in LINKS.items():
        rates = [each.said["rates"][key] for each in ended if key in each.said["rates"]]
        if rates:
            seen = f"{min(rates):.2f} to {max(rates):.2f} GB/s of bus bandwidth"
            is_even = min(rates) >= max(rates) / 2 if driver.is_judged else None
            rows.append(Row(f"all-reduce {name}", "no rank below half of the fastest", seen, is_even))
    hosts = [each.said["host"] for each in ended]
    for key, name in PAIRS.items():
        pairs = [tuple(pair) for each in ended for pair in each.said[key]]
        for size in sorted({pair[2] for pair in pairs}):
            rows.append(_pairs_row(driver, f"{name}, {size // MEBIBYTE} MiB", hosts, pairs, size))
    return rows


def network_row(driver: Driver, ended: list[Ended]) -> Row:
    """Which network NCCL takes. Not judged within one node, nor where its log does not tell."""
    name = "network of NCCL"
    expected = "between nodes, with --gbits: not Socket (TCP)"
    if driver.args.device != "cuda":
        return Row(name, expected, "gloo", None)
    found = sorted({network for each in ended for network in each.networks})
    seen = ", ".join(found) or "unknown"
    is_right = None
    if found and driver.place.world_size > driver.place.local_world_size:
        is_right = "Socket" not in found
        if not is_right and not driver.args.gbits:
            is_right = None
    return Row(name, expected, seen, is_right)


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
    runs: dict[str, list[dict[str, Any]]] = {}
    rows = []
    base = case_of(driver)
    for turn, way in enumerate(WAYS):
        case = asdict(replace(base, way=way))
        ended = driver.run("speed", driver.place.world_size, way=way, turn=turn, case=case)
        rows += failed(ended)
        if "steps" in ended[0].said:
            start = max(each.said["began"] - each.started for each in ended)
            runs.setdefault(way, []).append({**ended[0].said, "start": start})
    rows += [_time_row(driver, base, way, runs) for way in runs]
    for way in runs:
        if way != "loop" and "loop" in runs:
            rows += _training_rows(base, way, runs)
    if "automodel" in runs:
        chosen = runs["automodel"][0]["chosen"]
        planned = planned_memory(driver, base, chosen) / MEBIBYTE
        held = max(each["peak"] for each in runs["automodel"])
        ratio = held / planned
        is_right = ratio <= MEMORY_RATIO if driver.is_judged else None
        kept = "" if chosen["reshard_during_accumulation"] else "; parameters kept for the window"
        seen = f"{held:,.0f} of {planned:,.0f} MiB, {ratio:.2f}{kept}"
        rows.append(Row("memory beside the plan", f"at most {MEMORY_RATIO}", seen, is_right))
    return rows


def _time_row(driver: Driver, case: Any, way: str, runs: dict[str, list[dict[str, Any]]]) -> Row:
    """The median step of a way over all its runs, and of each run."""
    from llama import flops_a_token

    median = _median_step(runs[way])
    each_run = ", ".join(f"{statistics.median(run['steps']):.3f}" for run in runs[way])
    tokens_per_s = case.rows * case.length * case.accumulate / median
    peak = max(run["peak"] for run in runs[way])
    start = max(run["start"] for run in runs[way])
    seen = f"median {median:.3f} s ({each_run}), {tokens_per_s:,.0f} tokens/s a rank"
    if driver.args.peak_tflops:
        utilization = tokens_per_s * flops_a_token(case) / (driver.args.peak_tflops * 1e12)
        seen += f", MFU {utilization:.1%}"
    seen += f", {peak:,.0f} MiB, {start:.0f} s from start to the first measured step"
    expected = "for comparison"
    is_right = None
    if way == "automodel" and "loop" in runs:
        ratio = median / _median_step(runs["loop"])
        seen += f", {ratio:.2f} of the loop's time"
        expected = f"at most {TIME_RATIO} of the loop's time"
        is_right = ratio <= TIME_RATIO if driver.is_judged else None
    return Row(f"a step by {way}", expected, seen, is_right)


def _median_step(runs: list[dict[str, Any]]) -> float:
    return statistics.median(seconds for run in runs for seconds in run["steps"])


def _training_rows(case: Any, way: str, runs: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Losses of all steps, and gradients of the first one, beside those of the loop with the same weights and data."""
    loop = runs["loop"][0]
    rows = []
    for key, what, limits in (
        ("losses", "losses", LOSSES_OFF),
        ("norms", "gradients", GRADIENTS_OFF),
    ):
        limit = limits[case.trainer_precision]
        off = max(how_far_off(key, run, loop) for run in runs[way])
        again = max(how_far_off(key, run, loop) for run in runs["loop"])
        seen = f"{off:.1e} off; the loop itself, run again: {again:.1e}"
        if key == "losses":
            values = runs[way][0]["losses"]
            seen = f"{values[0]:.5f} to {values[-1]:.5f} in {len(values)} steps, {seen}"
        expected = "for comparison: its mean is of micro-batches"
        is_right = None
        if way == "automodel":
            expected = f"at most {limit:g} off"
            is_right = off <= limit
        rows.append(Row(f"{what} of {way} beside the loop", expected, seen, is_right))
    return rows


def how_far_off(key: str, run: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest distance of two losses, or that of all gradient norms, as a share of the other's; infinite if NaN."""
    if not all(math.isfinite(number) for number in (*run[key], *other[key])):
        return math.inf
    if key == "losses":
        pairs = zip(run[key], other[key], strict=True)
        return max(abs(own - right) / abs(right) for own, right in pairs)
    size = math.hypot(*other[key])
    return math.dist(run[key], other[key]) / size if size else math.inf


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
    planned = LlamaModule(replace(case, device="meta", precision=case.trainer_precision))
    micro = run(lambda: (planned, batch), case.trainer_precision, options)
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
    unnamed = []
    for each in others:
        if not any(name.startswith(f"rank {killed.rank} ") for name in each.names):
            unnamed.append(each.rank)
    silent = [each.rank for each in others if each.status == 0]
    seen = f"{seconds:.1f} s; ranks that ended with 0: {silent or 'none'}; that do not name it: {unnamed or 'none'}"
    is_right = seconds <= LEAVE_S and not silent and not unnamed
    # The only rank of a node is missed by its heartbeats alone.
    expected = f"all leave within {LEAVE_S:.0f} s (heartbeat_timeout is {HEARTBEAT_S:.0f} s), and name it"
    return [Row("the last rank is killed", expected, seen, is_right)]


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
    differ = [name for name in ("weights", "optimizer") if loaded[name] != said[name]]
    is_right = is_finite and loaded["step"] == 2 * STEPS and not differ
    seen = (
        f"step {loaded['step']}, loaded in {max(each.said['loaded_s'] for each in resumed):.1f} s; sums of"
        f" {len(loaded['weights'])} weights and {len(loaded['optimizer'])} tensors of the optimizer,"
        f" differ: {' and '.join(differ) or 'none'}"
    )
    expected = f"the saved weights and optimizer state; step {2 * STEPS}"
    return [*rows, Row(f"resumed on {fewer} ranks", expected, seen, is_right)]


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
        warm_up=2 if is_cuda else 1,
        steps=16 if is_cuda else 2,
        ranks=driver.place.world_size,
        is_chunked=True,
        recompute=True,
        precision=args.precision,
        is_ragged=True,
        reduces_in_float32=True,
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
    made.add_argument(
        "--shape",
        choices=("llama3-8b", "llama3-3b", "llama3-1b", "tiny", "narrow"),
        help="of the Llama, as in llama.py (llama3-1b)",
    )
    made.add_argument(
        "--precision",
        choices=LOSSES_OFF,
        help="of speed and resumed (bf16-true; 32-true on a CPU)",
    )
    made.add_argument(
        "--gbits",
        type=float,
        help="Gbit/s of a rank when all ranks of its node send: of the interfaces together by the ranks (links)",
    )
    made.add_argument(
        "--peak-tflops",
        type=float,
        help="of a device in the precision, dense; speed then tells the MFU",
    )
    made.add_argument("--timeout", type=float, default=600, help="seconds of one check (%(default)s)")
    return made


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args = parser().parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    driver = Driver(Place.from_environment(), args)
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for index, stage in enumerate(args.stages):
        started = time.monotonic()
        try:
            found = STAGES[stage](driver)
        except KeyError as error:  # the same for all drivers: they read from the store
            found = [Row(stage, "each rank says what it sees", f"a rank does not say {error}", False)]
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
