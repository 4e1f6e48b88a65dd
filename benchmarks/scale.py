"""What grows with the number of ranks and what does not: Llama 3 8B and 70B from 8 to 4,096 ranks, by the plan's code.

Nothing of it was run: `plan_check.py` holds the plan beside runs on up to 4 ranks.

    python benchmarks/scale.py --output report.md
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import describe_environment, publish, table

from examples.llama3 import build_8b, build_70b
from lightning_automodel.options import StrategyOptions
from lightning_automodel.plan.layouts import DEVICES, Plan
from lightning_automodel.plan.recording import run

NODE = 8
GIB = 1 << 30
CASES = [("8B", build_8b, 1), ("70B", build_70b, 1), ("70B", build_70b, NODE)]
HEADER = [
    "model",
    "ranks",
    "layout",
    "GiB a rank",
    "of it state",
    "GiB sent a rank",
    "between nodes",
    "seconds",
    "hidden",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parsed = parser.parse_args()
    rows = []
    for name, build, tensor in CASES:
        options = StrategyOptions(
            tensor_parallel_size=tensor, activation_checkpointing=True, reshard_during_accumulation=True
        )
        micro = run(build, "bf16-mixed", options)
        for ranks in (8, 64, 512, 4096):
            # One shard of everything on each rank, or on each of 64.
            for copies in sorted({1, max(ranks // 64, 1)}):
                layout = replace(options, data_parallel_replicate_size=copies)
                # As many micro-batches in a step as there are ranks, whatever the layout.
                plan = Plan(micro, layout, ranks, tensor, DEVICES["h100"], NODE)
                within, between = plan.bytes_by_link()
                sizes = (plan.high_water, plan.state, within + between, between)
                seconds = (f"{plan.seconds[key]:.2f}" for key in ("step", "hidden"))
                rows.append(
                    [name, f"{ranks:,}", str(plan), *(f"{size / GIB:.1f}" for size in sizes), *seconds]
                )
    report = [
        "# Llama 3 from 8 to 4,096 ranks, planned",
        "",
        *(f"- {key}: {value}" for key, value in describe_environment("transformers").items()),
        f"- command: `python benchmarks/scale.py {' '.join(sys.argv[1:])}`",
        f"- assumed: {DEVICES['h100']}",
        "- sequences of 8,192 tokens, one a micro-batch, as many in a step as ranks; bf16-mixed, AdamW,"
        " `token_loss`",
        "",
        table(HEADER, rows),
    ]
    publish("\n".join(report), parsed.output)


if __name__ == "__main__":
    main()
