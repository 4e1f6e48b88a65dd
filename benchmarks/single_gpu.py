"""One device: what the strategy costs compared with a plain loop, and what each option costs and saves.

The first table compares the strategy with FSDP2 by hand and with Lightning's `ModelParallelStrategy`, all
with full recomputation: a round runs each once, in a process of its own, and ratios are taken within a
round. The second table adds one option per row. On a CPU, seconds are processor time (one thread), so that
other load counts less.

    python benchmarks/single_gpu.py --output report.md                   # a small model on a CPU
    python benchmarks/single_gpu.py --device cuda --output report.md     # Llama 3.2 3B's shape in bfloat16, for 80 GB
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
PEAK_TFLOPS = {
    **{
        "B200": 2250,
        "H100 PCIe": 756,
        "H100 NVL": 835,
        "H200 NVL": 835,
        "H100": 989,
        "H200": 989,
        "GH200": 989,
    },
    **{"H800": 989, "H20": 148, "A100": 312, "A800": 312, "L40S": 362, "L4": 121, "A10G": 70, "A10": 125},
    **{"RTX 6000 Ada": 364, "RTX 4090": 165, "RTX A6000": 155, "MI300X": 1307},
}
"""Dense bfloat16, by what a card's name contains as whole words: data sheets' figures, none of them measured here."""


def known_peak(name: str) -> float:
    """Peak of a card in TFLOP/s, by the longest name in the table that its own contains; 0 if it is not known."""
    words = f" {name.replace('-', ' ')} "
    found = [known for known in PEAK_TFLOPS if f" {known} " in words]
    return float(PEAK_TFLOPS[max(found, key=len)]) if found else 0.0


def main() -> None:
    args = parse_arguments()
    case = Case(
        "automodel",
        args.shape or ("llama3-3b" if args.device == "cuda" else "tiny"),
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
            f"- MFU of {args.peak_tflops:g} TFLOP/s (dense bfloat16, by its name or given), without"
            " recomputation"
            if args.peak_tflops
            else "- no MFU: the peak of this device is not known (`--peak-tflops`)",
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


def ways(case: Case) -> dict[str, Case]:
    """The first table's cases: with `token_loss`, as all logits of a large vocabulary would decide what fits."""
    return {way: replace(case, way=way, recompute=True, is_chunked=True) for way in WAYS}


def switched(case: Case) -> dict[str, Case]:
    """The second table's cases, each with the switches of those before it."""
    cases = {}
    for title, switch in SWITCHES.items():
        if "compile" in switch and case.device == "hostdev":
            continue  # torch.compile has no backend for it
        cases[title] = case = replace(case, **switch)
    return cases


def measured_or_why(case: Case) -> dict[str, Any] | str:
    """The measurements of a case, or why there are none: the others go on."""
    try:
        return case.measure(__file__) or "out of memory"
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return f"**failed**: {str(error).strip().splitlines()[-1][:200].replace('|', '/')}"


def compare_ways(case: Case, rounds: int, peak_tflops: float) -> str:
    measured: dict[str, list[dict[str, Any] | str]] = {way: [] for way in WAYS}
    cases = ways(case)
    for number in range(rounds):
        turn = number % len(WAYS)
        order = list(WAYS)
        for way in order[turn:] + order[:turn]:
            measured[way].append(measured_or_why(cases[way]))
            print(number, way, measured[way][-1], file=sys.stderr, flush=True)
    rows = []
    for way, title in WAYS.items():
        runs = [run for run in measured[way] if isinstance(run, dict)]
        if len(runs) < rounds:
            rows.append([title, next(run for run in measured[way] if isinstance(run, str)), *[""] * 4])
            continue
        loops = [run for run in measured["loop"] if isinstance(run, dict)]
        ratios = [own["seconds"] / loop["seconds"] for own, loop in zip(runs, loops, strict=False)]
        middle = {name: median(run[name] for run in runs) for name in ("seconds", "peak")}
        spread = (
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if len(loops) == rounds else ""
        )
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
    for title, each in switched(case).items():
        measured = measured_or_why(each)
        columns = (
            [measured, "", "", ""] if isinstance(measured, str) else figures(each, measured, peak_tflops)
        )
        rows.append([title, *columns])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return table(["switches", *FIGURES], rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda", "hostdev"], default="cpu", help="(%(default)s)")
    parser.add_argument("--shape", choices=SHAPES, help="of the model (tiny on a CPU, else llama3-3b)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (1024 on a CPU, else 4096)")
    parser.add_argument("--rows", type=int, default=1, help="sequences of a micro-batch (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=5, help="optimizer steps that are measured (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (%(default)s)")
    parser.add_argument(
        "--peak-tflops", type=float, help="of the device, for MFU (on CUDA by the card's name)"
    )
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    is_cuda = args.device == "cuda"
    if args.length is None:
        args.length = 4096 if is_cuda else 1024
    if args.peak_tflops is None:
        args.peak_tflops = known_peak(device_name("cuda")) if is_cuda else 0.0
    return args


if __name__ == "__main__":
    main_or_case(main)
