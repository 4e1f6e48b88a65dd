"""Everything that is to be run on the day when a GPU is at hand, in an order that gives the most in the least time.

Each stage runs in processes of its own and leaves its result in the output folder as soon as it has one; one that fails
or runs out of time is reported, and the next goes on. `report.md` holds all of them, and the lines for README and docs.

    python benchmarks/gpu.py --output benchmarks/results/gpu            # Llama 3 8B's shape in bfloat16: an hour or two
    python benchmarks/gpu.py --output folder --stages waits trace       # some of it
    python benchmarks/gpu.py --output folder --device cpu               # a small model, to try the script itself
    python benchmarks/gpu.py --output folder --device hostdev           # the same on the device of tests/second_device

Stages: `tests` (those that need CUDA), `one-device` (beside a plain loop and Lightning's strategy), `waits` (where the
host waits for the device in the steady step), `trace` (of one step: how long the device idles, and before what), `long`
(long sequences), `two-ranks` (two processes on one device).
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
        "tests/distributed/test_caller_mesh.py",
        "tests/gradients/test_gradient_scaler.py",
        "tests/trainer/test_support.py",
    ),
    "cpu": ("tests/context_parallel/test_attention.py",),
    "hostdev": ("tests/second_device/test_device.py",),
}
LONGEST_GAPS = 8


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
        events = [event for event in self._profile.events() if event.device_type == wanted]
        print(json.dumps(idle_times([(e.time_range.start, e.time_range.end, e.name) for e in events])), flush=True)


def idle_times(events: Iterable[tuple[float, float, str]]) -> dict[str, Any]:
    """The span of events (start, end, name), the part in which none runs, and the longest gaps before which event.

    Times are in the unit of the events.
    """
    gaps, busy_until, begin = [], None, None
    for start, end, name in sorted(events):
        begin = start if begin is None else begin
        if busy_until is not None and start > busy_until:
            gaps.append((start - busy_until, name))
        busy_until = end if busy_until is None else max(busy_until, end)
    span = 0.0 if busy_until is None or begin is None else busy_until - begin
    return {"span": span, "idle": sum(gap for gap, _ in gaps), "gaps": sorted(gaps, reverse=True)[:LONGEST_GAPS]}


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


# --- Stages -----------------------------------------------------------------------------------------------------------


def run_tests(args: argparse.Namespace, case: Case) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "sweep or not sweep"]
    command += TESTS[case.device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=args.timeout, check=False)
    (args.output / "tests.log").write_text(done.stdout + done.stderr)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    summary = done.stdout.strip().splitlines()[-1:] or ["no output"]
    if done.returncode:
        raise RuntimeError("\n".join([*failed[:40], *summary]))
    return f"`{shlex.join(['python', *command[1:]])}`: {summary[0]}"


def one_device(args: argparse.Namespace, case: Case) -> str:
    output = args.output / "single_gpu.md"
    sizes = [] if case.device == "cuda" else ["--length", "64", "--rounds", "1", "--steps", "1", "--shape", case.shape]
    command = [sys.executable, str(ROOT / "benchmarks" / "single_gpu.py"), "--device", case.device, *sizes]
    subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, timeout=args.timeout, check=True
    )
    return output.read_text().partition("\n## ")[2]


def waits(args: argparse.Namespace, case: Case) -> str:
    steps = case.steps * case.accumulate
    rows = []
    for title, options in FEATURES.items():
        sites = result(child("waits", replace(case, **options)), args.timeout)
        rows += [[title, where.replace(str(ROOT), "."), f"{n / steps:g}"] for where, n in sites.items()]
        rows += [] if sites else [[title, "nowhere", "0"]]
    told = "\n\nOn a CPU nothing waits: the rows say nothing." if case.device == "cpu" else ""
    return table(["option", "where the host waits", "times a micro-batch"], rows) + told


FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "`activation_checkpointing=True`": {"recompute": True},
    '`activation_checkpointing="offload"`': {"recompute": "offload"},
    "`track_grad_norm=True`": {"options": (("track_grad_norm", True),)},
    "`error_if_nonfinite=True` (reads one number a step)": {"options": (("error_if_nonfinite", True),)},
    "`count_window_ahead=True`": {"options": (("count_window_ahead", True),)},
    "`cpu_offload=True`": {"options": (("cpu_offload", True),)},
}


def trace(args: argparse.Namespace, case: Case) -> str:
    path = args.output / "trace.json"
    found = result(child("trace", replace(case, steps=1, recompute=True), TRACE=str(path)), args.timeout)
    share = found["idle"] / found["span"] if found["span"] else 0.0
    gaps = [[f"{gap:,.0f}", name.replace("|", "/")[:100]] for gap, name in found["gaps"]]
    head = f"One optimizer step of {found['span'] / 1e3:,.1f} ms, of which {share:.1%} idle; `{path.name}`."
    return f"{head}\n\n{table(['gap, us', 'before'], gaps)}"


def long(args: argparse.Namespace, case: Case) -> str:
    rows = []
    for length in (16_384, 65_536, 131_072) if case.device == "cuda" else (128, 256):
        for recompute in (True, "offload"):
            long_case = replace(case, length=length, rows=1, is_chunked=True, recompute=recompute)
            try:
                measured = result(child("time", long_case), args.timeout)
                row = [f"{measured['seconds']:.2f}", f"{measured['peak']:,.0f}"]
            except RuntimeError as error:
                if "out of memory" not in str(error).lower():
                    raise
                row = ["out of memory", ""]
            rows.append([f"{length:,}", f"`activation_checkpointing={recompute!r}`", *row])
    return table(["tokens of a row", "with `token_loss` and", "seconds a step", "peak, MiB"], rows)


def two_ranks(args: argparse.Namespace, case: Case) -> str:
    rows = []
    for backend in ("nccl", "gloo") if case.device == "cuda" else (None,):
        shared = replace(case, ranks=2, shares_device=True, options=(("process_group_backend", backend),))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        nodes = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
        ranks = [child("time", shared, NODE_RANK=rank, **nodes) for rank in "01"]
        try:
            # Only the first rank prints.
            rows.append([backend or "default", f"{result(ranks[0], args.timeout)['seconds']:.2f} seconds a step"])
            break
        except RuntimeError as error:
            rows.append([backend or "default", str(error).strip().splitlines()[-1].replace("|", "/")[:300]])
        finally:
            for rank in ranks:
                rank.kill()
    return table(["backend of two processes on one device", ""], rows)


STAGES: dict[str, Callable[[argparse.Namespace, Case], str]] = {
    "tests": run_tests,
    "one-device": one_device,
    "waits": waits,
    "trace": trace,
    "long": long,
    "two-ranks": two_ranks,
}


def main() -> int:
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    is_cuda = args.device == "cuda"
    shape, length, rows = ("llama3-8b", 4096, 4) if is_cuda else ("narrow", 64, 1)
    case = Case("automodel", shape, args.device, length, rows=rows, accumulate=2, warm_up=2, steps=2)
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
            results[name] = STAGES[name](args, case)
        except (RuntimeError, subprocess.SubprocessError) as error:
            failed.append(name)
            output = getattr(error, "stderr", None) or str(error)
            results[name] = f"**failed**\n\n```\n{str(output)[-3000:]}\n```"
        results[name] += f"\n\n({time.monotonic() - started:.0f} s)"
        sections = [f"## {stage}\n\n{text}" for stage, text in results.items()]
        (args.output / "report.md").write_text("\n\n".join(["\n".join(head), *sections, proven(environment, results)]))
        print(f"{name}: {'failed' if name in failed else 'done'}", flush=True)
    return 1 if failed else 0


def proven(environment: dict[str, str], results: dict[str, str]) -> str:
    """The lines for README and docs: what was proven, and what was not."""
    done = [name for name, text in results.items() if not text.startswith("**failed**")]
    lacking = [name for name in STAGES if name not in done]
    where = f"{environment['device']}, {environment['date']}, {environment['versions']}"
    return (
        f"## For README and docs\n\nRun on {where}: {', '.join(done) or 'nothing'}."
        f" Not run: {', '.join(lacking) or 'nothing of it'}; several devices, several nodes.\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=TESTS, help="(%(default)s)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="in this order")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of one run (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fields = json.loads(sys.argv[3])
        run(Case.from_fields(fields), METERS[sys.argv[2]])
    else:
        sys.exit(main())
