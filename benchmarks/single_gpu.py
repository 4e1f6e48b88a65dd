"""One device: what the strategy costs compared with a plain loop, and what each option costs and saves.

The first table compares the strategy with FSDP2 by hand and with Lightning's `ModelParallelStrategy`, all with full
recomputation: a round runs each once, in a process of its own, and ratios are taken within a round. The second table
adds one option per row. On a CPU, seconds are processor time (one thread), so that other load counts less.

    python benchmarks/single_gpu.py --output report.md                   # a small model on a CPU
    python benchmarks/single_gpu.py --device cuda --output report.md     # Llama 3 8B's shape in bfloat16
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from llama import SHAPES, Case, device_name, main_or_case
from report import describe_environment, publish, table

WAYS = {
    "loop": "FSDP2 by hand",
    "automodel": "`AutomodelStrategy()`",
    "model-parallel": "Lightning `ModelParallelStrategy`",
}
SWITCHES: dict[str, dict[str, Any]] = {
    "`AutomodelStrategy()`, `F.cross_entropy` over all logits": {},
    "+ `token_loss`": {"is_chunked": True},
    '+ `activation_checkpointing="selective"`': {"recompute": "selective"},
    "+ `activation_checkpointing=True` in its place": {"recompute": True},
    "+ `compile=True`": {"compile": True},
}


def main() -> None:
    args = parse_arguments()
    case = Case(
        "automodel",
        args.shape or ("llama3-8b" if args.device == "cuda" else "tiny"),
        args.device,
        **{name: getattr(args, name) for name in ("length", "rows", "accumulate", "steps")},
        warm_up=2,
    )
    report = "\n".join(
        [
            "# One device",
            "",
            *(f"- {name}: {value}" for name, value in describe_environment().items()),
            f"- command: `python benchmarks/single_gpu.py {shlex.join(sys.argv[1:])}`",
            f"- {device_name(args.device)}, {str(case.dtype).removeprefix('torch.')}",
            f"- shape {case.shape}: {SHAPES[case.shape]}",
            f"- sequence {case.length:,}, batch {case.rows}, accumulation {case.accumulate}",
            *([f"- MFU of {args.peak_tflops:g} TFLOP/s, without recomputation"] if args.peak_tflops else []),
            "",
            "## Beside a plain loop, all with full recomputation",
            "",
            compare_ways(case, args.rounds, args.peak_tflops),
            "",
            "## Switches",
            "",
            add_switches(case, args.peak_tflops),
        ]
    )
    publish(report, args.output)


def compare_ways(case: Case, rounds: int, peak_tflops: float) -> str:
    measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        turn = number % len(WAYS)
        ways = list(WAYS)
        for way in ways[turn:] + ways[:turn]:
            measured[way].append(replace(case, way=way, recompute=True).measure(__file__))
            print(number, way, measured[way][-1], file=sys.stderr, flush=True)
    rows = []
    for way, title in WAYS.items():
        if not all(measured[way]):
            rows.append([title, "out of memory", *[""] * 4])
            continue
        ratios = [
            own["seconds"] / loop["seconds"] for own, loop in zip(measured[way], measured["loop"], strict=True) if loop
        ]
        middle = {name: median(run[name] for run in measured[way]) for name in ("seconds", "peak")}
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        rows.append([title, *figures(case, middle, peak_tflops), spread])
    return table(["way", *FIGURES, "seconds / loop's"], rows)


FIGURES = ["seconds", "tokens/s", "MFU", "peak, MiB"]


def figures(case: Case, measured: dict[str, float], peak_tflops: float) -> list[str]:
    tokens = case.rows * case.accumulate * case.length / measured["seconds"]
    utilisation = f"{tokens * flops_per_token(case) / peak_tflops / 1e12:.1%}" if peak_tflops else ""
    return [f"{measured['seconds']:.2f}", f"{tokens:,.0f}", utilisation, f"{measured['peak']:,.0f}"]


def flops_per_token(case: Case) -> float:
    """FLOPs of forward and backward: six for each weight of a matrix product, and half of attention's products."""
    config = case.config()
    head = config.hidden_size // config.num_attention_heads
    attention = 2 * config.hidden_size * head * (config.num_attention_heads + config.num_key_value_heads)
    block = attention + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_hidden_layers * block + config.vocab_size * config.hidden_size
    return 6 * weights + 6 * config.num_hidden_layers * config.hidden_size * case.length


def add_switches(case: Case, peak_tflops: float) -> str:
    rows = []
    for title, switch in SWITCHES.items():
        if "compile" in switch and case.device == "hostdev":
            continue  # torch.compile has no backend for it
        case = replace(case, **switch)
        measured = case.measure(__file__)
        rows.append([title, *(figures(case, measured, peak_tflops) if measured else ["out of memory", "", "", ""])])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return table(["switches", *FIGURES], rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda", "hostdev"], default="cpu", help="(%(default)s)")
    parser.add_argument("--shape", choices=SHAPES, help="of the model (tiny on a CPU, else llama3-8b)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (1024 on a CPU, else 4096)")
    parser.add_argument("--rows", type=int, help="sequences of a micro-batch (1 on a CPU, else 4)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps that are measured (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (%(default)s)")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for MFU (989 on CUDA: an H100 or H200)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    is_cuda = args.device == "cuda"
    for name, cpu, cuda in (("length", 1024, 4096), ("rows", 1, 4), ("peak_tflops", 0.0, 989.0)):
        if getattr(args, name) is None:
            setattr(args, name, cuda if is_cuda else cpu)
    return args


if __name__ == "__main__":
    main_or_case(main)
