"""Seconds, memory and communication of an optimizer step by sequence length, as options are added.

Each case is a run of its own, of two CPU ranks that train on two sequences per optimizer step: without
context parallelism one each, with it they share first one, then the other. Memory is the peak of a rank in a
step, above what it held before the model was built. Seconds are processor time of the first rank, which
leaves out all waiting.

    python benchmarks/long_context.py --output report.md
    python benchmarks/long_context.py --lengths 2048 4096
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from llama import SHAPES, Case, main_or_case
from report import describe_environment, publish, table

SWITCHES = {
    "`F.cross_entropy` over all logits": {},
    "+ `token_loss`": {"is_chunked": True},
    "+ `activation_checkpointing=True`": {"recompute": True},
    "+ `context_parallel_size=2`": {"context": 2, "accumulate": 2},
}
HEADER = [
    "length",
    "switches",
    "CPU seconds of a rank",
    "peak of a rank, MiB",
    "collectives",
    "MiB communicated",
]


def main() -> None:
    args = parse_arguments()
    rows = []
    for length in args.lengths:
        case = Case("automodel", args.shape, "cpu", length, ranks=2, steps=args.steps)
        for title, switch in SWITCHES.items():
            case = replace(case, **switch)
            logits = (
                0
                if case.is_chunked
                else 12 * length * SHAPES[args.shape]["vocab_size"] / case.context / 2**30
            )
            if case.ranks * logits > args.gibibytes:
                row = [f"not run: about {logits:.0f} GiB of logits a rank", "", "", ""]
            else:
                measured = case.measure(__file__)
                row = [
                    f"{measured['seconds']:.1f}",
                    f"{measured['peak']:,.0f}",
                    f"{measured['collectives']:.0f}",
                    f"{measured['megabytes']:,.0f}",
                ]
            rows.append([f"{length:,}", title, *row])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    report = "\n".join(
        [
            "# Long sequences",
            "",
            *(f"- {name}: {value}" for name, value in describe_environment().items()),
            f"- command: `python benchmarks/long_context.py {shlex.join(sys.argv[1:])}`",
            f"- Llama of the shape {SHAPES[args.shape]}, float32, two ranks, two sequences an optimizer"
            " step",
            "- MiB communicated: of each collective the larger of what a rank gives and what it gets, added"
            " up",
            "",
            table(HEADER, rows),
        ]
    )
    publish(report, args.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--shape", choices=SHAPES, default="narrow", help="of the model (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=1, help="optimizer steps that are measured (%(default)s)"
    )
    parser.add_argument(
        "--gibibytes", type=float, default=16, help="cases with more logits are not run (%(default)s)"
    )
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main_or_case(main)
