"""Peak memory and seconds of a head's forward and backward: `token_loss`, torch's own chunks, and all logits at once.

Each case is a process of its own: it holds hidden states, the head's weight and nothing else, runs once to
warm up on a few positions, and then once on all of them. Its peak is the most that this second run held,
above what was there before. On a CPU, seconds are processor time (one thread), so that other load on the
machine counts less.

    python benchmarks/token_loss.py --output report.md
    python benchmarks/token_loss.py --device cuda --positions 16384 --width 4096 --dtype bfloat16
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.nn.functional as F  # noqa: N812
from peak_memory import MALLOC, MEBIBYTE, peak, start_peak
from report import describe_environment, publish, table
from torch import Tensor, nn

from lightning_automodel import token_loss

ALL_LOGITS = "F.cross_entropy"
DEFAULT = "token_loss"
TORCH = "F.linear_cross_entropy"


def main() -> None:
    args = parse_arguments()
    if args.case:
        way, vocabulary = args.case
        print(*measure(args, way, int(vocabulary)))
        return
    ways = [ALL_LOGITS, TORCH, DEFAULT, *(str(2**power) for power in args.chunk_powers)]
    rows = []
    for vocabulary in args.vocabularies:
        # The peak includes the weight's gradient; the weight itself was there before.
        gradient = vocabulary * args.width * getattr(torch, args.dtype).itemsize / MEBIBYTE
        for way in ways:
            command = [sys.executable, *sys.argv, "--case", way, str(vocabulary)]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env={**os.environ, **MALLOC}
            )
            peak, seconds = map(float, done.stdout.split())
            name = f"token_loss, 2^{int(way).bit_length() - 1} elements" if way.isdecimal() else way
            numbers = (peak / MEBIBYTE, gradient, peak / MEBIBYTE - gradient)
            rows.append(
                [f"{vocabulary:,}", name, *(f"{number:,.0f}" for number in numbers), f"{seconds:.1f}"]
            )
            print(*rows[-1], sep=" | ", file=sys.stderr)
    header = ["vocabulary", "loss", "peak, MiB", "of it the head's gradient", "beyond it", "seconds"]
    report = "\n".join(
        [
            "# Peak memory of the loss",
            "",
            *(f"- {name}: {value}" for name, value in describe_environment().items()),
            f"- command: `python benchmarks/token_loss.py {shlex.join(sys.argv[1:])}`",
            f"- {args.positions:,} positions, width {args.width}, {args.dtype} on {args.device}, one"
            " process a case",
            "",
            table(header, rows),
        ]
    )
    publish(report, args.output)


def measure(args: argparse.Namespace, way: str, vocabulary: int) -> tuple[int, float]:
    """Returns the bytes of the peak above what was there before, and the seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    head = nn.Linear(args.width, vocabulary, bias=False, **options)
    hidden = torch.randn(1, args.positions, args.width, requires_grad=True, **options)
    labels = torch.randint(vocabulary, (1, args.positions), device=args.device)

    def run(positions: int) -> None:
        loss_of(way, hidden[:, :positions], head, labels[:, :positions]).backward()
        if args.device != "cpu":
            torch.cuda.synchronize()

    run(8)
    head.weight.grad = hidden.grad = None
    before = start_peak(args.device)
    clock = process_time if args.device == "cpu" else perf_counter
    started = clock()
    run(args.positions)
    return peak(args.device) - before, clock() - started


def loss_of(way: str, hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    if way == ALL_LOGITS:
        return F.cross_entropy(head(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum")
    if way == TORCH:
        options = nn.LinearCrossEntropyOptions()
        rows = hidden.flatten(0, 1)
        return F.linear_cross_entropy(rows, head.weight, labels.flatten(), reduction="sum", options=options)
    return token_loss(hidden, head, labels, chunk_elements=None if way == DEFAULT else int(way))[0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 150_000])
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--chunk-powers", type=int, nargs="*", default=[20, 22, 26], help="2 to the power of these"
    )
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
