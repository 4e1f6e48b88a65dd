"""What an optimizer's step costs the host on shards, beside ordinary DTensors and plain tensors.

One process, and parameters so small that a step is the host's work. The kinds take turns in one process, one
step each, and ratios are taken within a turn. On a CPU seconds are processor time, on an accelerator elapsed
time up to the end of its work.

    python benchmarks/shard_step.py --parameters 3600 --rounds 10
    python benchmarks/shard_step.py --device cuda --output report.md
"""

import argparse
import gc
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from report import describe_environment, publish, table
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_automodel.sharding.shards import make_shard

KINDS = ("plain tensors", "DTensors", "shards")
WAYS: dict[str, dict[str, Any]] = {
    "AdamW, torch's default": {},
    "AdamW(foreach=False)": {"foreach": False},
    "AdamW(foreach=True)": {"foreach": True},
    "AdamW(fused=True)": {"fused": True},
    "clip_grad_norm_": {},
}


def build(kind: str, num_parameters: int, device: str) -> nn.Module:
    """A model of layers with two parameters each, of 16 features, with gradients."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, device=device) for _ in range(num_parameters // 2)]
    model = nn.Sequential(*layers)
    if kind != "plain tensors":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    if kind == "shards":
        for parameter in model.parameters():
            make_shard(parameter)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    return model


def step_of(model: nn.Module, way: str) -> Callable[[], object]:
    """What is measured."""
    if way == "clip_grad_norm_":
        return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **WAYS[way]).step


def seconds(step: Callable[[], object], device: str) -> float:
    """Of one step."""
    if device == "cpu":
        start = process_time()
        step()
        return process_time() - start
    torch.accelerator.synchronize()
    start = perf_counter()
    step()
    torch.accelerator.synchronize()
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--parameters", type=int, default=600, help="of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind (%(default)s)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = "gloo" if args.device == "cpu" else f"cpu:gloo,{args.device}:nccl"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        gc.disable()
        models = {kind: build(kind, args.parameters, args.device) for kind in KINDS}
        rows = []
        for way in WAYS:
            steps = {kind: step_of(model, way) for kind, model in models.items()}
            turns: list[dict[str, float]] = []
            for _ in range(args.rounds + 3):
                turns.append({kind: seconds(step, args.device) for kind, step in steps.items()})
            measured = turns[3:]
            milliseconds = [f"{1e3 * median(turn[kind] for turn in measured):.1f} ms" for kind in KINDS]
            ratios = [turn["shards"] / turn["DTensors"] for turn in measured]
            rows.append(
                [way, *milliseconds, f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
            )
        dist.destroy_process_group()
    columns = ["step", *KINDS, "shards to DTensors"]
    report = "\n\n".join(
        [
            f"# An optimizer's step with {args.parameters} parameters on {args.device}",
            "\n".join(f"- {name}: {value}" for name, value in describe_environment().items()),
            f"`python benchmarks/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`",
            table(columns, rows),
        ]
    )
    publish(report, args.output)


if __name__ == "__main__":
    main()
