"""Everything that is to be run on the day when a GPU is at hand, in an order that gives the most in the least time.

Each stage runs in processes of its own and leaves its result in the output folder as soon as it has one; one
that fails or runs out of time is reported, and the next goes on, as do the other rows of a table.
`report.md` holds all of them, and the lines for README and docs. Models have a size that fits on a card of
80 or 141 GB by the plan (`STAGE_SHAPES`).

    python benchmarks/gpu.py --output benchmarks/results/gpu            # Llamas of 1B to 8B in bfloat16: an hour or two
    python benchmarks/gpu.py --output folder --stages waits trace       # some of it
    python benchmarks/gpu.py --output folder --device cpu               # a small model, to try the script itself
    python benchmarks/gpu.py --output folder --device hostdev           # the same on the device of tests/second_device

Stages: `tests` (those that need CUDA), `one-device` (beside a plain loop and Lightning's strategy), `waits`
(where the host waits for the device in the steady step), `trace` (of one step: how long the device idles,
and before what), `long` (long sequences), `two-ranks` (two processes, on a device each, or by gloo on one
device), `first-hour` (`first_hour.py` on `--ranks` of this node: docs/first_hour.md).
"""

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from llama import Case, Meter, device_name, run
from report import describe_environment, table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[1]
TESTS = {
    "cuda": (
        "tests/context_parallel/test_attention.py",
        "tests/distributed/test_process_group_alone.py",
        "tests/distributed/test_mesh.py",
        "tests/gradients/test_gradient_scaler.py",
        "tests/trainer/test_support.py",
    ),
    "cpu": ("tests/context_parallel/test_attention.py",),
    "hostdev": ("tests/second_device/test_device.py",),
}
LONGEST_GAPS = 8
STAGE_SHAPES = {
    "one-device": {80: "llama3-3b", 141: "llama3-8b"},
    "waits": {80: "llama3-1b", 141: "llama3-1b"},
    "trace": {80: "llama3-3b", 141: "llama3-8b"},
    "long": {80: "llama3-1b", 141: "llama3-3b"},
    "two-ranks": {80: "llama3-1b", 141: "llama3-1b"},
}
"""The model of each stage by the GB of a card, all with AdamW in bfloat16: 8 bytes a parameter, and activations.

`tests/test_benchmarks.py` computes them by the plan, in GB: one-device 3B 53 and 8B 100 (all logits, nothing
recomputed), waits 1B 23 (nothing recomputed), trace 3B 37 and 8B 81, long 1B 42 and 3B 77 (131,072 tokens),
two-ranks 1B 15 each.
"""
FAILED = "**failed**"


class WaitsMeter(Meter):
    """Notes where the host waits for the device in the measured steps, as torch or the second device tells it."""

    def start(self) -> None:
        self._recording = ExitStack()
        if self.case.device == "hostdev":
            from tests.second_device.device import recorded_waits

            self._waits = self._recording.enter_context(recorded_waits())
        self._caught = self._recording.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if self.case.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            self._recording.callback(torch.cuda.set_sync_debug_mode, "default")

    def stop(self) -> None:
        self._recording.close()
        sites = [f"{w.filename}:{w.lineno}" for w in self._caught if "synchronizing" in str(w.message)]
        if self.case.device == "hostdev":
            sites = [f"{where}, {what}" for (what, where), n in self._waits.items() for _ in range(n)]
        print(json.dumps(Counter(sites)), flush=True)


class TraceMeter(Meter):
    """Profiles the measured steps, keeps their trace, and tells how long the device idles."""

    def start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.case.device == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        self._synchronize()
        self._profile.stop()
        self._profile.export_chrome_trace(os.environ["TRACE"])
        wanted = DeviceType.CUDA if self.case.device == "cuda" else DeviceType.CPU
        print(json.dumps(idle_times(busy_times(self._profile, wanted))), flush=True)


def busy_times(profiled: profile, device_type: DeviceType) -> list[tuple[float, float, str]]:
    """Start, end and name of what ran on a device. Ranges that annotate, as FSDP2's, also span what is idle in them."""
    events = [
        each for each in profiled.events() if each.device_type == device_type and not each.is_user_annotation
    ]
    return [(each.time_range.start, each.time_range.end, each.name) for each in events]


def idle_times(events: Iterable[tuple[float, float, str]]) -> dict[str, Any]:
    """The span of events (start, end, name), the part in which none runs, and the longest gaps before which event.

    Times are in the unit of the events.
    """
    gaps = []
    busy_until = None
    begin = None
    for start, end, name in sorted(events):
        begin = start if begin is None else begin
        if busy_until is not None and start > busy_until:
            gaps.append((start - busy_until, name))
        busy_until = end if busy_until is None else max(busy_until, end)
    span = 0.0 if busy_until is None or begin is None else busy_until - begin
    return {
        "span": span,
        "idle": sum(gap for gap, _ in gaps),
        "gaps": sorted(gaps, reverse=True)[:LONGEST_GAPS],
    }


METERS: dict[str, type[Meter]] = {"time": Meter, "waits": WaitsMeter, "trace": TraceMeter}


def child(meter: str, case: Case, **environment: str) -> subprocess.Popen[str]:
    """Start a process that trains ``case`` under a meter of `METERS`; its last line is what the meter prints."""
    command = [sys.executable, __file__, "--child", meter, json.dumps(asdict(case))]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def result(process: subprocess.Popen[str], timeout: float) -> Any:
    """What a child has printed."""
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(errors[-3000:])
    return json.loads(output.splitlines()[-1])


def attempt(measure: Callable[[], list[list[str]]], title: list[str], num_columns: int) -> list[list[str]]:
    """Rows of a table; where they cannot be measured one that says why, so that the others go on."""
    try:
        return measure()
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr, flush=True)
        text = " ".join(str(error).split()).replace("|", "/")
        why = "out of memory" if "out of memory" in text.lower() else f"{FAILED}: ...{text[-200:]}"
        return [[*title, why, *[""] * (num_columns - len(title) - 1)]]


# --- Stages -----------------------------------------------------------------------------------------------------------


def run_tests(args: argparse.Namespace, case: Case) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "sweep or not sweep"]
    command += TESTS[case.device]
    if case.device == "cuda" and torch.cuda.device_count() == 1:
        # Cells of more ranks train on the host.
        command += ["-k", "one_process or cuda or on_one or not test_cell"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=args.timeout, check=False
    )
    (args.output / "tests.log").write_text(done.stdout + done.stderr)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    summary = done.stdout.strip().splitlines()[-1:] or ["no output"]
    if done.returncode:
        raise RuntimeError("\n".join([*failed[:40], *summary]))
    return f"`{shlex.join(['python', *command[1:]])}`: {summary[0]}"


def one_device(args: argparse.Namespace, case: Case) -> str:
    output = args.output / "single_gpu.md"
    sizes = ["--shape", case.shape]
    if case.device != "cuda":
        sizes += ["--length", "64", "--rounds", "1", "--steps", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "single_gpu.py"), "--device", case.device, *sizes]
    subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, timeout=args.timeout, check=True
    )
    return output.read_text().partition("\n## ")[2]


FEATURES: dict[str, dict[str, Any]] = {
    "`token_loss` and `activation_checkpointing=True`": {},
    '`activation_checkpointing="offload"`': {"recompute": "offload"},
    "`activation_checkpointing=False`": {"recompute": False, "rows": 1},
    "`track_grad_norm=True`": {"options": (("track_grad_norm", True),)},
    "`error_if_nonfinite=True` (reads one number a step)": {"options": (("error_if_nonfinite", True),)},
    "`count_window_ahead=True`": {"options": (("count_window_ahead", True),)},
    "`cpu_offload=True`": {"options": (("cpu_offload", True),)},
}


def waits(args: argparse.Namespace, case: Case) -> str:
    steps = case.steps * case.accumulate

    def measure(title: str, options: dict[str, Any]) -> list[list[str]]:
        sites = result(child("waits", replace(case, **options)), args.timeout)
        rows = [[title, where.replace(str(ROOT), "."), f"{n / steps:g}"] for where, n in sites.items()]
        return rows or [[title, "nowhere", "0"]]

    rows = []
    for title, options in FEATURES.items():
        rows += attempt(partial(measure, title, options), [title], 3)
    told = "\n\nOn a CPU nothing waits: the rows say nothing." if case.device == "cpu" else ""
    return table(["option", "where the host waits", "times a micro-batch"], rows) + told


def trace(args: argparse.Namespace, case: Case) -> str:
    path = args.output / "trace.json"
    found = result(child("trace", replace(case, steps=1), TRACE=str(path)), args.timeout)
    share = found["idle"] / found["span"] if found["span"] else 0.0
    gaps = [[f"{gap:,.0f}", name.replace("|", "/")[:100]] for gap, name in found["gaps"]]
    head = f"One optimizer step of {found['span'] / 1e3:,.1f} ms, of which {share:.1%} idle; `{path.name}`."
    return f"{head}\n\n{table(['gap, us', 'before'], gaps)}"


def long_cases(case: Case) -> list[Case]:
    """Sequences of growing length, recomputed, with and without the inputs of blocks in host memory."""
    lengths = (16_384, 65_536, 131_072) if case.device == "cuda" else (128, 256)
    recomputes: tuple[bool | str, ...] = (True, "offload")
    return [
        replace(case, length=length, rows=1, recompute=recompute)
        for length in lengths
        for recompute in recomputes
    ]


def long(args: argparse.Namespace, case: Case) -> str:
    def measure(each: Case, title: list[str]) -> list[list[str]]:
        measured = result(child("time", each), args.timeout)
        return [[*title, f"{measured['seconds']:.2f}", f"{measured['peak']:,.0f}"]]

    rows = []
    for each in long_cases(case):
        title = [f"{each.length:,}", f"`activation_checkpointing={each.recompute!r}`"]
        rows += attempt(partial(measure, each, title), title, 4)
    return table(["tokens of a row", "with `token_loss` and", "seconds a step", "peak, MiB"], rows)


def two_ranks(args: argparse.Namespace, case: Case) -> str:
    """NCCL refuses two ranks on one device."""
    has_two = case.device == "cuda" and torch.cuda.device_count() > 1
    backend = {"cuda": "nccl" if has_two else "gloo"}.get(case.device)
    shared = replace(case, ranks=2, shares_device=not has_two, options=(("process_group_backend", backend),))

    def measure() -> list[list[str]]:
        measured = (
            result(child("time", shared), args.timeout) if has_two else _on_one_device(shared, args.timeout)
        )
        return [[backend or "default", f"{measured['seconds']:.2f} seconds a step"]]

    where = "a device each" if has_two else "one device"
    return table([f"backend of two processes on {where}", ""], attempt(measure, [backend or "default"], 2))


def first_hour(args: argparse.Namespace, case: Case) -> str:
    """The checks of a cluster on all ranks of this node; several nodes start `first_hour.py` by torchrun themselves."""
    ranks = args.ranks or (torch.cuda.device_count() if case.device == "cuda" else 8)
    output = args.output / "first_hour"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(ROOT / "benchmarks" / "first_hour.py"), "--output", str(output)]
    command += ["--device", "cuda" if case.device == "cuda" else "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, check=False)
    report = output / "report.md"
    if done.returncode and not report.exists():
        raise RuntimeError(done.stderr[-3000:])
    failed = f"{FAILED}: a check is not right\n\n" if done.returncode else ""
    return failed + report.read_text().partition("\n\n")[2]


def _on_one_device(case: Case, timeout: float) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    nodes = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    ranks = [child("time", case, NODE_RANK=rank, **nodes) for rank in "01"]
    try:
        return result(ranks[0], timeout)  # only the first rank prints
    finally:
        for rank in ranks:
            rank.kill()


STAGES: dict[str, Callable[[argparse.Namespace, Case], str]] = {
    "tests": run_tests,
    "one-device": one_device,
    "waits": waits,
    "trace": trace,
    "long": long,
    "two-ranks": two_ranks,
    "first-hour": first_hour,
}


def stage_case(stage: str, device: str, gigabytes: float) -> Case:
    """What a stage starts from, on a card of so much memory; on a CPU a toy."""
    shape = "narrow"
    length = 64
    rows = 1
    if device == "cuda":
        by_memory = STAGE_SHAPES.get(stage, {80: ""})
        shape = by_memory[max((size for size in by_memory if size <= gigabytes), default=80)]
        length = 4096
        rows = 2
    sizes: dict[str, Any] = {"rows": rows, "accumulate": 2, "warm_up": 2, "steps": 2}
    return Case("automodel", shape, device, length, **sizes, is_chunked=True, recompute=True)


def main() -> int:
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9 if args.device == "cuda" else 0.0
    environment = {**describe_environment(), "device": device_name(args.device)}
    head = [
        "# On the day of a GPU",
        "",
        *(f"- {name}: {value}" for name, value in environment.items()),
        f"- command: `python benchmarks/gpu.py {shlex.join(sys.argv[1:])}`",
    ]
    results: dict[str, str] = {}
    failed = []
    for name in args.stages:
        started = time.monotonic()
        try:
            results[name] = STAGES[name](args, stage_case(name, args.device, gigabytes))
        except (RuntimeError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            results[name] = f"{FAILED}\n\n```\n{str(output)[-3000:]}\n```"
        if FAILED in results[name]:
            failed.append(name)
        results[name] += f"\n\n({time.monotonic() - started:.0f} s)"
        sections = [f"## {stage}\n\n{text}" for stage, text in results.items()]
        (args.output / "report.md").write_text(
            "\n\n".join(["\n".join(head), *sections, proven(environment, results)])
        )
        print(f"{name}: {'failed' if name in failed else 'done'}", flush=True)
    return 1 if failed else 0


def proven(environment: dict[str, str], results: dict[str, str]) -> str:
    """The lines for README and docs: what was proven, and what was not."""
    done = [name for name, text in results.items() if FAILED not in text]
    lacking = [name for name in STAGES if name not in done]
    where = f"{environment['device']}, {environment['date']}, {environment['versions']}"
    return (
        f"## For README and docs\n\nRun on {where}: {', '.join(done) or 'nothing'}."
        f" Not run: {', '.join(lacking) or 'nothing of it'}; several nodes.\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=TESTS, help="(%(default)s)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="in this order")
    parser.add_argument("--ranks", type=int, help="of first-hour (all devices; 8 on a CPU)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of one run (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fields = json.loads(sys.argv[3])
        run(Case.from_fields(fields), METERS[sys.argv[2]])
    else:
        sys.exit(main())
