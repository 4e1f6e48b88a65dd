"""The plan's seconds of an optimizer step beside those of a run, on two nodes that a slow network joins.

The nodes are network namespaces with one rank each (`tests/launch/two_nodes.py`; Linux, root), and `tc ...
tbf` limits what each sends. What is assumed of the machine is measured first, by both ranks at a time:
matrix products, copies, all-gathers. Nothing is fitted to the steps that are then planned.

    python benchmarks/plan_seconds.py --rate 1gbit --output report.md
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from llama import SHAPES, Case, Meter, run
from plan_check import cases, plan, title
from report import describe_environment, publish, table

from lightning_automodel.plan.layouts import DEVICES

sys.path.append(str(Path(__file__).parents[1]))
from tests.launch.two_nodes import TwoNodes, connect_two_nodes

REPEATS = 7


class WallMeter(Meter):
    """Measures what a user waits for, not the processor's time."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.clock = perf_counter


def machine() -> dict[str, float]:
    """What a table of assumptions has of this machine, measured by all ranks at a time."""

    def seconds(action: Callable[[], Any]) -> float:
        found = []
        for _ in range(REPEATS):
            dist.barrier()
            started = perf_counter()
            action()
            found.append(perf_counter() - started)
        return median(found)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = torch.randn(256, 512)
    weight = torch.randn(512, 1376)
    page = torch.randn(1 << 22)
    small = torch.ones(1)
    large = torch.ones(1 << 21)
    gathered = {each: torch.empty(2 * each.numel()) for each in (small, large)}
    latency = seconds(lambda: dist.all_gather_into_tensor(gathered[small], small))
    gather = seconds(lambda: dist.all_gather_into_tensor(gathered[large], large)) - latency
    copy = seconds(lambda: page.clone())
    speeds = {}
    for name, dtype in {"flops": torch.bfloat16, "flops_32": torch.float32}.items():
        left = rows.to(dtype)
        right = weight.to(dtype)
        product = seconds(lambda left=left, right=right: [left @ right for _ in range(20)]) / 20  # type: ignore[misc]
        speeds[name] = 2 * rows.numel() * weight.shape[1] / product
    dist.destroy_process_group()
    return {
        **speeds,
        "memory_bandwidth": 2 * page.nbytes / copy,
        "network_bandwidth": large.nbytes / gather,
        "latency": latency,
    }


def on_nodes(nodes: TwoNodes, what: str) -> dict[str, float]:
    """What the first rank of both nodes prints: of a case in JSON, or of the machine."""
    first, second = nodes.torchrun(Path(__file__), "--child", what, ranks_per_node=1, timeout_s=600.0)
    if first.status or second.status:
        raise RuntimeError(f"{what}:\n{first.output[-2000:]}\n{second.output[-2000:]}")
    found: dict[str, float] = json.loads(
        [line for line in first.output.splitlines() if line.startswith("{")][-1]
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="what each node may send (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of each case (%(default)s)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parsed = parser.parse_args()
    rows = []
    chosen = [case for case in cases() if case.ranks == 2 and case.context == 1]
    chosen = [case for case in chosen if "tensor_parallel_size" not in dict(case.options)]
    with connect_two_nodes() as nodes:
        for namespace, device in zip(nodes.namespaces, nodes.devices, strict=True):
            limit = ["root", "tbf", "rate", parsed.rate, "burst", "1mb", "latency", "400ms"]
            subprocess.run(
                ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *limit], check=True
            )
        found = on_nodes(nodes, "machine")
        assumed = replace(DEVICES["cpu"], **found)
        for case in (replace(case, shares_device=True, steps=parsed.steps) for case in chosen):
            planned = plan(case, assumed, local_ranks=1)
            run_seconds = on_nodes(nodes, json.dumps(asdict(case)))["seconds"]
            parts = (f"{planned.seconds[name]:.2f}" for name in ("compute", "communicate", "step"))
            ratio = planned.seconds["step"] / run_seconds
            rows.append([title(case, planned), *parts, f"{run_seconds:.2f}", f"{ratio:.2f}"])
            print(*rows[-1], flush=True)
    header = ["layout", "compute", "communicate", "planned step", "measured step", "planned / measured"]
    report = [
        f"# The plan's seconds beside a run, two nodes at {parsed.rate}",
        "",
        *(f"- {name}: {value}" for name, value in describe_environment("transformers").items()),
        f"- command: `python benchmarks/plan_seconds.py {shlex.join(sys.argv[1:])}`",
        f"- Llama of the shape {SHAPES['plan']}, 256 tokens a micro-batch, AdamW; float32 where not named;"
        " wall time",
        f"- measured of the machine: {', '.join(f'{name} {value:.3g}' for name, value in found.items())}",
        "",
        table(header, rows),
    ]
    publish("\n".join(report), parsed.output)


if __name__ == "__main__":
    if "--child" in sys.argv:
        what = sys.argv[sys.argv.index("--child") + 1]
        if what != "machine":
            run(Case.from_fields(json.loads(what)), WallMeter)
        else:
            print(json.dumps(machine()), flush=True)
    else:
        main()
