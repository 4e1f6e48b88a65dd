"""Memory and communication of each layout, without weights and without the cluster."""

import argparse
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from lightning_automodel.options import StrategyOptions
from lightning_automodel.plan.layouts import Plan
from lightning_automodel.plan.recording import PRECISIONS, Build, CannotPlanError, run

_GIB = 1 << 30


def main(arguments: list[str] | None = None) -> int:
    """Plan one model. Returns the exit status: 0, or 1 if it cannot be planned or nothing fits."""
    parsed = _parser().parse_args(arguments)
    try:
        sys.path.insert(0, str(Path.cwd()))
        plans = _plans(parsed, pkgutil.resolve_name(parsed.build))
    except (CannotPlanError, ImportError, AttributeError, ValueError) as error:
        _report(f"error: {error}")
        return 1
    fitting = [plan for plan in plans if plan.high_water <= parsed.memory * _GIB]
    print(
        f"{len(fitting)} of {len(plans)} layouts of {parsed.world_size} ranks fit in {parsed.memory:g} GiB;"
        " GiB of a rank, and of one step"
    )
    print(*_table(fitting or plans), sep="\n")
    if fitting:
        return 0
    least = min(plans, key=lambda plan: plan.high_water)
    largest = max(least.memory, key=lambda name: least.memory[name])
    print(f"Nothing fits in {parsed.memory:g} GiB. The least is {least}, where {largest} take most.")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_automodel.plan", description=__doc__)
    add = parser.add_argument
    add("build", metavar="module:function", help="returns (LightningModule, batch of one micro-batch)")
    add("--world-size", type=int, required=True, help="ranks of the run")
    add("--ranks-per-node", type=int, default=8, help="devices of a node (%(default)s)")
    add("--micro-batches", type=int, help="of one optimizer step, all ranks together (the world size)")
    add("--precision", choices=PRECISIONS, default="bf16-mixed", help="of the Trainer (%(default)s)")
    add("--label-shift", type=int, default=0, help="of the strategy, for context parallelism (%(default)s)")
    add("--tensor", type=int, nargs="+", default=[1, 8], help="tensor_parallel_size to try (1 8)")
    add("--context", type=int, nargs="+", default=[1, 2], help="context_parallel_size to try (1 2)")
    add(
        "--memory", type=float, default=67.0, help="GiB that tensors may take (%(default)s: a card of 80 GB)"
    )
    return parser


def _report(line: str) -> None:
    """On stderr, since what is printed on stdout may be piped."""
    print(line, file=sys.stderr, flush=True)


def _plans(parsed: argparse.Namespace, build: Build) -> list[Plan]:
    """Plans of all layouts, the plainest first. Reports why it leaves out others."""
    plans: list[Plan] = []
    world = parsed.world_size
    total = parsed.micro_batches or world
    for tensor, context, recomputes in product(parsed.tensor, parsed.context, (False, True)):
        name = f"TP {tensor} CP {context}" + " recomputed" * recomputes
        data = max(world // (tensor * context), 1)
        if data * tensor * context != world or total % data:
            _report(
                f"left out: {name}: {world} ranks and {total} micro-batches do not divide into such groups:"
                " pass another --micro-batches, --tensor or --context"
            )
            continue
        options = StrategyOptions(
            tensor_parallel_size=tensor,
            context_parallel_size=context,
            activation_checkpointing=recomputes,
            label_shift=parsed.label_shift,
        )
        _report(f"Planning {name} ...")  # a large model takes minutes
        try:
            micro = run(build, parsed.precision, options)
        except CannotPlanError as error:
            _report(f"left out: {name}: {error}")
            continue
        nodes = -(-world // parsed.ranks_per_node)
        for layout in _layouts(options, data, nodes, accumulates=total > data):
            plans.append(Plan(micro, layout, world, total // data, parsed.ranks_per_node))
    if not plans:
        raise CannotPlanError("no layout can be planned: the lines above say why")
    return sorted(plans, key=_plainness)


def _plainness(plan: Plan) -> tuple[Any, ...]:
    """A key that sorts by what a layout adds, then by bytes between nodes."""
    options = plan.options
    num_peers = plan.sizes.tensor * plan.sizes.context
    return num_peers, options.cpu_offload, options.activation_checkpointing, plan.bytes_by_link()[1]


def _layouts(options: StrategyOptions, data: int, nodes: int, accumulates: bool) -> list[StrategyOptions]:
    """Sharded layouts of ``data`` data-parallel ranks on this number of ``nodes``."""
    deferrals: dict[int, list[bool | Literal["all_reduce"]]] = {1: [True, False]}
    if data % nodes == 0 and data > nodes:
        deferrals[nodes] = [True, "all_reduce"]
    return [
        replace(
            options,
            data_parallel_replicate_size=n,
            defer_fsdp_grad_sync=defer,
            reshard_during_accumulation=frees,
            cpu_offload=offloads,
        )
        for n, ways in deferrals.items()
        for defer in (ways if accumulates and data > 1 else ways[:1])
        for frees in (False, True)
        for offloads in (False, True)
    ]


def _table(plans: list[Plan]) -> Iterator[str]:
    kinds = ("parameters", "gathered", "gradients", "optimizer", "activations")
    names = ("layout", "high-water", *kinds, "collectives", "in nodes", "between")
    yield f"{names[0]:44}" + "".join(f"{name:>12}" for name in names[1:])
    for plan in plans:
        held = (plan.high_water, *(plan.memory[name] for name in kinds))
        sizes = "".join(f"{size / _GIB:12.2f}" for size in held)
        links = "".join(f"{size / _GIB:12.2f}" for size in plan.bytes_by_link())
        yield f"{plan!s:44}{sizes}{plan.sent.total():12}{links}"


if __name__ == "__main__":
    sys.exit(main())
