"""What a micro-batch, an optimizer step and a start cost on the host, by strategy and number of layers.

A GPU waits whenever Python is late, so this trains models that have next to nothing to compute (width 32,
one row), and measures processor seconds of a rank, which leave out all waiting. As in `step_time.py`, all
variants are set up in the same two processes and take turns of an optimizer step; ratios are medians of
those within a round. The start is from the call of `fit`, or of the loop, to the end of the first optimizer
step, less one step; what happens once a process, such as imports, comes before, with two layers. A start is
long and can be repeated; `--starts` does only that. It leaves out what Python's full garbage collections take
(0.3 s each at 600 layers): they come when enough objects were made since the last one, and whether that is
within a start or in the step after it is chance. Their number from `fit` to the fourth step is reported.

    python benchmarks/host_cost.py --layers 10 100 300 --output report.md
    python benchmarks/host_cost.py --layers 600 --starts 4
"""

import argparse
import gc
import logging
import os
import shlex
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import describe_environment, publish, table
from turns import CollectiveCounter, PausedTraining
from variants import VARIANTS
from workload import Workload

ACCUMULATE = 4
COMPARED = {
    "loop": "loop",
    "automodel": "loop",
    "model-parallel": "loop",
    "ddp-loop": "ddp",
    "automodel-ddp": "ddp",
}
"""Variants, each with the one that it is compared with."""
KEYS = [*COMPARED, "ddp"]
STARTED = {"automodel": "model-parallel", "automodel-ddp": "ddp"}
"""Variants whose starts are repeated, each with the one that it is compared with."""


@dataclass
class Cost:
    """What one variant takes: processor seconds of its start, and of each step; operators and collectives of a step."""

    start: float = 0.0
    steps: list[float] = field(default_factory=list)
    operators: int = 0
    collectives: int = 0


def measure(layers: int, rounds: int) -> dict[str, Cost]:
    """Start each variant, then take turns. A collective over the world."""
    workload = Workload(width=32, layers=layers, accumulate=ACCUMULATE, batch_tokens=16, steps=rounds + 3)
    variants = {variant.key: variant for variant in VARIANTS}
    trainings = {key: PausedTraining(partial(variants[key].train, workload)) for key in KEYS}
    costs = {key: Cost() for key in KEYS}
    for key, training in trainings.items():
        costs[key].start = _timed(training)
        costs[key].start -= _timed(training)
    gc.collect()
    for number in range(rounds):
        turn = number % len(KEYS)
        for key in KEYS[turn:] + KEYS[:turn]:
            costs[key].steps.append(_timed(trainings[key]))
    for key, training in trainings.items():
        counter = CollectiveCounter()
        training.step(counter)
        costs[key].operators = counter.operators
        costs[key].collectives = counter.counts.total()
        training.finish()
    return costs


def compare_starts(layers: int, rounds: int) -> str:
    """One table: starts of each variant, in turn. A collective over the world."""
    variants = {variant.key: variant for variant in VARIANTS}
    workload = Workload(width=32, layers=layers, accumulate=1, batch_tokens=16, steps=4)
    starts: dict[str, list[float]] = {key: [] for pair in STARTED.items() for key in pair}
    collected: dict[str, int] = {}
    for _ in range(rounds):
        for key, of_variant in starts.items():
            training = PausedTraining(partial(variants[key].train, workload))
            collections = FullCollections()
            first, *steps = (_timed(training, collections) for _ in range(workload.steps))
            collections.close()
            of_variant.append(first - median(steps))
            collected[key] = collections.number
            training.finish()
            gc.collect()
    rows = []
    for key, of_variant in starts.items():
        seconds = ", ".join(f"{start:.2f}" for start in of_variant)
        ratio = ""
        if other := STARTED.get(key):
            ratios = [own / base for own, base in zip(of_variant, starts[other], strict=True)]
            ratio = f"{median(ratios):.2f} of {variants[other].title}"
        rows.append([variants[key].title, seconds, f"{median(of_variant):.2f}", ratio, str(collected[key])])
    header = ["", "s of each start", "median", "ratio", "full collections"]
    return f"## Starts at {layers} layers\n\n{table(header, rows)}"


class FullCollections:
    """Counts Python's full garbage collections in this process, and their processor seconds."""

    def __init__(self) -> None:
        self.number = 0
        self.seconds = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._start = process_time()
        else:
            self.number += 1
            self.seconds += process_time() - self._start

    def close(self) -> None:
        """Count no more."""
        gc.callbacks.remove(self._note)


def _timed(training: PausedTraining, left_out: FullCollections | None = None) -> float:
    collected = left_out.seconds if left_out else 0.0
    start = process_time()
    training.step()
    taken = process_time() - start
    return taken if left_out is None else taken - (left_out.seconds - collected)


def format_costs(layers: int, costs: dict[str, Cost]) -> str:
    """One table."""
    titles = {variant.key: variant.title for variant in VARIANTS}
    rows = []
    for key, cost in costs.items():
        row = [titles[key], f"{1e3 * median(cost.steps) / ACCUMULATE:.1f}"]
        if other := COMPARED.get(key):
            ratios = [own / base for own, base in zip(cost.steps, costs[other].steps, strict=True)]
            row.append("" if other == key else f"{median(ratios):.2f} of {titles[other]}")
        else:
            row.append("")
        rows.append([*row, f"{cost.operators:,}", str(cost.collectives), f"{cost.start:.2f}"])
    header = ["", "ms a micro-batch", "ratio", "operators a step", "collectives a step", "s of the start"]
    return f"## {layers} layers\n\n{table(header, rows)}"


def run_rank(rank: int, meeting_point: str, args: argparse.Namespace, command: str) -> None:
    """One rank: join, measure, and on rank 0 print and write the report."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    measure(layers=2, rounds=1)
    if args.starts:
        sections = [compare_starts(layers, args.starts) for layers in args.layers]
    else:
        sections = [format_costs(layers, measure(layers, args.rounds)) for layers in args.layers]
    if rank == 0:
        head = [
            "# Processor seconds on the host",
            "",
            *(f"- {name}: {value}" for name, value in describe_environment().items()),
            f"- command: `{command}`",
            "- two ranks, gloo on loopback, width 32, 16 tokens, "
            + (
                f"{args.starts} starts"
                if args.starts
                else f"accumulation {ACCUMULATE}, {args.rounds} rounds"
            ),
        ]
        report = "\n\n".join(["\n".join(head), *sections])
        publish(report, args.output)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[10, 100, 300], help="of the model (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant (%(default)s)")
    parser.add_argument(
        "--starts", type=int, default=0, help="compare this many starts of each variant, not steps"
    )
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    command = shlex.join(["python", "benchmarks/host_cost.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (str(Path(folder) / "meeting_point"), args, command), nprocs=2)


if __name__ == "__main__":
    main()
