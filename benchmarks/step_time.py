"""Seconds per optimizer step, by strategy, on CPU ranks with gloo over loopback or between two nodes.

Every variant trains the same model on the same micro-batches in the same processes. All of them are set up
first; then they take turns of a few optimizer steps, in an order that rotates from round to round. Ratios
are taken inside a round, so that other load on the machine affects both sides. In the end, variants whose
gradients are exact must have the weights of the plain loop.

    python benchmarks/step_time.py --batch-tokens 64 256 --count --output report.md
    python benchmarks/step_time.py --nodes --rate 1gbit --rounds 8      # a rank on each of two nodes (namespaces, root)
"""

import argparse
import gc
import json
import logging
import os
import shlex
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import launch
from report import describe_environment, table
from torch import Tensor
from turns import CollectiveCounter, PausedTraining
from variants import RATIOS, VARIANTS, Variant
from workload import Workload

from lightning_automodel.distributed.network import choose_interface

REFERENCE = "loop"
# Where losses are divided before the backward, not gradients after it, float32 rounding comes to 2e-4. Where
# gradients are means of micro-batch means, weights end 0.1 to 0.3 away.
TOLERANCE = 2e-3
COLLECTIVES = {
    "all-gathers": "allgather",
    "reduce-scatters": "reduce_scatter",
    "all-reduces": "allreduce",
    "broadcasts": "broadcast",
}
STATISTICS = ("median", "quiet median", "min", "max", "CPU median")
INTRODUCTION = f"""\
Each round gives a variant one number: the seconds of its turn, from a barrier to the barrier after it, by the optimizer
steps of a turn. Ratios are taken inside a round. Medians, min and max are over rounds; the quiet median is that of the
quarter of the rounds in which all variants together were fastest, when the rest of the machine disturbed least. The CPU
median is of the CPU seconds of one rank, which leave out all waiting, for other ranks as well as for other processes.
Deviation: distance of the final weights from the reference's, relative to how far training has moved those; where
gradients are exact it must stay below {TOLERANCE:g}."""


@dataclass(frozen=True)
class Measurement:
    """Results of one variant.

    Attributes:
        seconds: For each round, seconds per optimizer step.
        cpu_seconds: Likewise, CPU time of this rank.
        collectives: Collectives of one optimizer step on this rank, by operator.
        weights: All weights at the end.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    collectives: Counter[str]
    weights: Tensor


def measure(
    variants: Sequence[Variant], workload: Workload, rounds: int, steps: int, warm_up: int
) -> dict[str, Measurement]:
    """Set up and warm up all variants, let them take turns, then count the collectives of one more step of each.

    A collective over the world.

    Args:
        variants: The variants to train.
        workload: Its number of optimizer steps must be that of the warm-up, of all turns, and one.
        rounds: Turns of each variant.
        steps: Optimizer steps of a turn.
        warm_up: Optimizer steps before the first turn.

    Returns:
        Measurements by key of the variant.
    """
    trainings = {variant.key: PausedTraining(partial(variant.train, workload)) for variant in variants}
    keys = list(trainings)
    for key in keys * warm_up:
        trainings[key].step()
    gc.collect()
    wall: dict[str, list[float]] = {key: [] for key in keys}
    cpu: dict[str, list[float]] = {key: [] for key in keys}
    for number in range(rounds):
        turn = number % len(keys)
        for key in keys[turn:] + keys[:turn]:
            start = perf_counter()
            cpu_start = process_time()
            for _ in range(steps):
                trainings[key].step()
            wall[key].append((perf_counter() - start) / steps)
            cpu[key].append((process_time() - cpu_start) / steps)
        say(f"round {number + 1}/{rounds}: " + ", ".join(f"{key} {wall[key][-1]:.3f} s" for key in keys))
    measured = {}
    for key, training in trainings.items():
        counter = CollectiveCounter()
        training.step(counter)
        measured[key] = Measurement(wall[key], cpu[key], counter.counts, training.finish())
    return measured


def find_deviations(
    variants: Sequence[Variant], workload: Workload, measured: dict[str, Measurement]
) -> dict[str, float]:
    """Distance of each variant's weights from the reference's, relative to how far the reference's moved, by key.

    Raises:
        RuntimeError: If a variant whose gradients are exact deviates by more than ``TOLERANCE``.
    """
    start = torch.cat([p.detach().reshape(-1) for p in workload.build_model().parameters()])
    reference = measured[REFERENCE].weights
    way = (reference - start).norm()
    deviations = {v.key: float((measured[v.key].weights - reference).norm() / way) for v in variants}
    wrong = {v.key: deviations[v.key] for v in variants if v.is_exact and not deviations[v.key] <= TOLERANCE}
    if wrong:
        raise RuntimeError(
            f"Weights deviate from those of {REFERENCE!r} by more than {TOLERANCE:g}: {wrong}."
        )
    return deviations


def format_section(
    variants: Sequence[Variant],
    workload: Workload,
    measured: dict[str, Measurement],
    deviations: dict[str, float],
) -> str:
    """One workload's part of the report, in Markdown."""
    quiet = find_quiet_rounds(measured)
    timings = []
    for variant in variants:
        own = measured[variant.key]
        gradients = "exact" if variant.is_exact else "mean of micro-batch means"
        spread = summarise(own.seconds, own.cpu_seconds, quiet, digits=3)
        timings.append((variant.title, *spread, gradients, f"{deviations[variant.key]:.1e}"))
    titles = {variant.key: variant.title for variant in variants}
    ratios = []
    for key, baseline, target in RATIOS:
        if key in titles and baseline in titles:
            ours = measured[key]
            theirs = measured[baseline]
            wall = [a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
            cpu = [a / b for a, b in zip(ours.cpu_seconds, theirs.cpu_seconds, strict=True)]
            ratios.append(
                (f"{titles[key]} / {titles[baseline]}", *summarise(wall, cpu, quiet, digits=2), target)
            )
    return "\n\n".join(
        (
            f"## {workload.batch_tokens} tokens a micro-batch",
            table(("seconds an optimizer step", *STATISTICS, "gradients", "deviation"), timings),
            table(("ratio", *STATISTICS, "target"), ratios),
        )
    )


def find_quiet_rounds(measured: dict[str, Measurement]) -> list[int]:
    """The quarter of the rounds in which all variants together were fastest."""
    totals = [sum(seconds) for seconds in zip(*(m.seconds for m in measured.values()), strict=True)]
    fastest_first = sorted(range(len(totals)), key=totals.__getitem__)
    return fastest_first[: max(1, len(totals) // 4)]


def summarise(wall: Sequence[float], cpu: Sequence[float], quiet: Sequence[int], digits: int) -> list[str]:
    """The ``STATISTICS`` of one number per round."""
    values = (median(wall), median(wall[i] for i in quiet), min(wall), max(wall), median(cpu))
    return [f"{value:.{digits}f}" for value in values]


def format_collectives(variants: Sequence[Variant], measured: dict[str, Measurement]) -> str:
    """Table of the collectives of one optimizer step."""
    rows = []
    for variant in variants:
        counts = measured[variant.key].collectives
        kinds = [
            sum(n for op, n in counts.items() if op.startswith(prefix)) for prefix in COLLECTIVES.values()
        ]
        rows.append((variant.title, *map(str, kinds), str(counts.total() - sum(kinds))))
    return table(("collectives of one optimizer step, on each rank", *COLLECTIVES, "others"), rows)


def run_rank(rank: int, meeting_point: str, arguments: argparse.Namespace, command: str) -> str:
    """One rank: join, measure, and on rank 0 print and write the report, which is returned."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=arguments.ranks
    )
    variants = [variant for variant in VARIANTS if variant.key in (REFERENCE, *arguments.variants)]
    sections = []
    for batch_tokens in arguments.batch_tokens:
        workload = Workload(
            width=arguments.width,
            layers=arguments.layers,
            accumulate=arguments.accumulate,
            batch_tokens=batch_tokens,
            steps=arguments.warm_up + arguments.rounds * arguments.steps + 1,
        )
        measured = measure(variants, workload, arguments.rounds, arguments.steps, arguments.warm_up)
        deviations = find_deviations(variants, workload, measured)
        sections.append(format_section(variants, workload, measured, deviations))
    if arguments.count:
        sections.append("## Collectives\n\n" + format_collectives(variants, measured))
    report = "\n\n".join((format_head(arguments, workload, command), *sections)) + "\n"
    say(report)
    if rank == 0 and arguments.output is not None:
        arguments.output.write_text(report)
    dist.destroy_process_group()
    return report


def run_node(case: dict[str, Any]) -> None:
    """The rank of one node; rank 0 prints the report for `launch`."""
    sys.argv[1:] = case["arguments"]
    choose_interface(os.environ["MASTER_ADDR"])
    rank = int(os.environ["RANK"])
    report = run_rank(rank, case["meeting_point"], parse_arguments(), case["command"])
    if rank == 0:
        print(json.dumps({"report": report}), flush=True)


def format_head(arguments: argparse.Namespace, workload: Workload, command: str) -> str:
    """Title, environment, and how to read the numbers."""
    parameters = sum(p.numel() for p in workload.build_model().parameters())
    where = f"two nodes at {arguments.rate}" if arguments.nodes else "gloo on loopback"
    environment = describe_environment() | {
        "command": f"`{command}`",
        "model": f"{parameters / 1e6:.1f} M float32 parameters, {workload.layers} blocks of width {workload.width}",
        "run": (
            f"{arguments.ranks} ranks, {where}, accumulation {workload.accumulate},"
            f" {arguments.rounds} rounds; optimizer steps before the first round {arguments.warm_up}, in"
            f" each turn {arguments.steps}"
        ),
    }
    title = f"# Seconds an optimizer step, by strategy, {environment.pop('date')}"
    return "\n\n".join((title, table(("machine and run", ""), environment.items()), INTRODUCTION))


def say(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Seconds an optimizer step takes, by strategy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=288, help="channels of the model")
    parser.add_argument(
        "--layers", type=int, default=8, help="transformer blocks, of 12 x width^2 parameters each"
    )
    parser.add_argument("--accumulate", type=int, default=8, help="micro-batches of an optimizer step")
    parser.add_argument(
        "--batch-tokens", type=int, nargs="+", default=[64], help="tokens of a micro-batch; a run each"
    )
    parser.add_argument("--rounds", type=int, default=40, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a turn")
    parser.add_argument("--warm-up", type=int, default=3, help="optimizer steps before the first turn")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--nodes", action="store_true", help="half of the ranks on each of two nodes")
    parser.add_argument("--rate", default="1gbit", help="what each node may send")
    keys = [variant.key for variant in VARIANTS]
    usual = [key for key in keys if "prefetch" not in key]
    parser.add_argument(
        "--variants", nargs="+", choices=keys, default=usual, help=f"{REFERENCE} always runs"
    )
    parser.add_argument(
        "--count", action="store_true", help="also report the collectives of one optimizer step"
    )
    parser.add_argument("--output", type=Path, help="Markdown file to write the report to")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.steps, arguments.warm_up) < 1:
        parser.error("--rounds, --steps and --warm-up must be at least 1")
    return arguments


def main() -> None:
    if "--child" in sys.argv:
        run_node(json.loads(sys.argv[-1]))
        return
    arguments = parse_arguments()
    command = shlex.join(["python", "benchmarks/step_time.py", *sys.argv[1:]])
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = str(Path(folder) / "meeting_point")
        if arguments.nodes:
            case = {"arguments": sys.argv[1:], "meeting_point": meeting_point, "command": command}
            print(launch(Path(__file__), case, arguments.ranks, arguments.rate)["report"])
        else:
            mp.spawn(run_rank, (meeting_point, arguments, command), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
