"""Writes the table of docs/scale.md: Llama 3 8B and 70B from 8 to 4,096 ranks, by the plan's code.

Nothing of it is run: `plan_check.py` holds the plan beside runs on up to 4 ranks. tests/test_plan.py compares
the page with what this prints.

    python benchmarks/scale.py             # prints the table
    python benchmarks/scale.py --write     # and puts it into the page
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import table

from examples.llama3 import build_8b, build_70b
from lightning_automodel.options import StrategyOptions
from lightning_automodel.plan.layouts import Plan
from lightning_automodel.plan.recording import run

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
NODE = 8
GIB = 1 << 30
CASES = [("8B", build_8b, 1), ("70B", build_70b, 1), ("70B", build_70b, NODE)]
HEADER = ["model", "ranks", "layout", "GiB a rank", "state in it", "GiB sent a rank", "sent between nodes"]


def rows(names: tuple[str, ...] = ("8B", "70B")) -> list[list[str]]:
    """The rows of these models."""
    found = []
    for name, build, tensor in CASES:
        if name not in names:
            continue
        options = StrategyOptions(
            tensor_parallel_size=tensor, activation_checkpointing=True, reshard_during_accumulation=True
        )
        micro = run(build, "bf16-mixed", options)
        for ranks in (8, 64, 512, 4096):
            # One shard of everything on each rank, or on each of 64.
            for copies in sorted({1, max(ranks // 64, 1)}):
                layout = replace(options, data_parallel_replicate_size=copies)
                # As many micro-batches in a step as there are ranks, whatever the layout.
                plan = Plan(micro, layout, ranks, tensor, NODE)
                within, between = plan.bytes_by_link()
                shape = f"{plan.sizes.replicate} x {plan.sizes.shard} TP {plan.sizes.tensor}"
                sizes = (plan.high_water, plan.state, within + between, between)
                found.append([name, f"{ranks:,}", shape, *(f"{size / GIB:.1f}" for size in sizes)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace the table in docs/scale.md")
    parsed = parser.parse_args()
    written = table(HEADER, rows())
    print(written)
    if parsed.write:
        before, _, rest = PAGE.read_text().partition("| model |")
        _, _, after = rest.partition("\n\n")
        PAGE.write_text(f"{before}{written}\n\n{after}")


if __name__ == "__main__":
    main()
