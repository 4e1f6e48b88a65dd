"""Memory and communication of each layout, without weights and without the cluster."""

import argparse
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import yaml  # type: ignore[import-untyped]

from lightning_automodel.options import StrategyOptions
from lightning_automodel.plan.layouts import Plan
from lightning_automodel.plan.recording import PRECISIONS, Build, CannotPlanError, run

_GIB = 1 << 30
_REMEDIES = {
    "activations": "fewer rows in a micro-batch, shorter sequences, token_loss, or a larger --context",
    "gradients": "smaller FSDP units (auto_wrap_policy), or more ranks",
    "gathered": "smaller FSDP units (auto_wrap_policy), or a larger --tensor",
}


def main(arguments: list[str] | None = None) -> int:
    """Plan one model. Returns the exit status: 0, or 1 if it cannot be planned or nothing fits."""
    parsed = _parser().parse_args(arguments)
    try:
        plans, left_out = _plans(parsed, _import(parsed.build))
    except (CannotPlanError, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if parsed.precision == "bf16-mixed":
        left_out["DDP"] = (
            "its autocast does not reach the meta device: pass --precision bf16-true or 32-true"
        )
    fitting = [plan for plan in plans if plan.high_water <= parsed.memory * _GIB]
    print(
        f"{len(fitting)} of {len(plans)} layouts of {parsed.world_size} ranks fit in {parsed.memory:g} GiB;"
        " GiB of a rank, and of one step"
    )
    print(*_table((fitting or plans)[: parsed.top]), "", sep="\n")
    print(*(f"left out: {name}: {reason}\n" for name, reason in left_out.items()), sep="")
    if fitting:
        print(_yaml(parsed, fitting[0]))
        return 0
    memory = min(plans, key=lambda plan: plan.high_water).memory
    most = max(memory, key=lambda name: memory[name])
    remedy = _REMEDIES.get(most, "more ranks, a larger --tensor, or another optimizer")
    print(f"Nothing fits in {parsed.memory:g} GiB. Most of the least is {most}: {remedy}.")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_automodel.plan", description=__doc__)
    add = parser.add_argument
    add(
        "build",
        metavar="module:function",
        help="returns (LightningModule, batch of one micro-batch); or config.yaml",
    )
    add("--world-size", type=int, required=True, help="ranks of the run")
    add("--ranks-per-node", type=int, default=8, help="devices of a node (%(default)s)")
    add("--micro-batches", type=int, help="of one optimizer step, all ranks together (the world size)")
    add("--precision", choices=PRECISIONS, default="bf16-mixed", help="of the Trainer (%(default)s)")
    add("--label-shift", type=int, default=0, help="of the strategy, for context parallelism (%(default)s)")
    add("--tensor", type=int, nargs="+", help="tensor_parallel_size to try (1, and the ranks of a node)")
    add("--context", type=int, nargs="+", default=[1, 2, 8], help="context_parallel_size to try (1 2 8)")
    add(
        "--memory", type=float, default=67.0, help="GiB that tensors may take (%(default)s: a card of 80 GB)"
    )
    add("--cpu", action="store_true", help="ranks compute on the CPU, and communicate by gloo")
    add("--top", type=int, default=12, help="layouts to print (%(default)s)")
    return parser


def _import(target: str) -> Build:
    sys.path.insert(0, str(Path.cwd()))
    try:
        if target.endswith((".yaml", ".yml")):
            return _configured(target)
        build: Build = pkgutil.resolve_name(target)
    except Exception as error:  # the user's modules can raise anything
        raise CannotPlanError(
            f"{target} cannot be imported ({type(error).__name__}: {error}): run it where `import` finds its"
            " modules."
        ) from error
    return build


def _configured(path: str) -> Build:
    """A function that builds a LightningCLI configuration's module; it adds the first batch of the data."""
    from jsonargparse import ArgumentParser  # an extra of Lightning's, which LightningCLI needs

    given = yaml.safe_load(Path(path).read_text())
    parser = ArgumentParser(exit_on_error=False)
    for name, base in {"model": pl.LightningModule, "data": pl.LightningDataModule}.items():
        if "class_path" not in (given.get(name) or {}):
            raise ValueError(f"{path} has no class_path for {name}: write it there, or pass module:function")
        parser.add_subclass_arguments(base, name)
    with warnings.catch_warnings(action="ignore"), torch.device("meta"):
        chosen = parser.parse_object({name: given[name] for name in ("model", "data")})
        data = parser.instantiate_classes(chosen).data
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    return lambda: (parser.instantiate_classes(chosen).model, batch)


def _plans(parsed: argparse.Namespace, build: Build) -> tuple[list[Plan], dict[str, str]]:
    """Plans of all layouts, the plainest first, and reasons for leaving out the others."""
    plans: list[Plan] = []
    left_out: dict[str, str] = {}
    world = parsed.world_size
    total = parsed.micro_batches or world
    sizes = [(t, 1) for t in parsed.tensor or (1, parsed.ranks_per_node)]
    sizes += [(t, c) for c in parsed.context if c > 1 for t in parsed.tensor or (1,)]
    for (tensor, context), recomputes in product(dict.fromkeys(sizes), (False, True)):
        name = f"TP {tensor} CP {context}"
        data = max(world // (tensor * context), 1)
        if data * tensor * context != world or total % data:
            left_out[name] = (
                f"{world} ranks and {total} micro-batches do not divide into such groups: pass another"
                " --micro-batches, --tensor or --context"
            )
            continue
        options = StrategyOptions(
            tensor_parallel_size=tensor,
            context_parallel_size=context,
            activation_checkpointing=recomputes,
            label_shift=parsed.label_shift,
        )
        _report_progress(f"{name}{', recomputed' * recomputes}")
        try:
            micro = run(build, parsed.precision, options)
        except CannotPlanError as error:
            if tensor * context == 1 and not recomputes:
                raise  # the model itself cannot be planned
            left_out[name + " recomputed" * recomputes] = str(error)
            continue
        layouts = _layouts(options, data, -(-world // parsed.ranks_per_node), accumulates=total > data)
        if tensor == 1 and parsed.precision != "bf16-mixed":
            layouts.append(replace(options, data_parallel="ddp"))
        for layout in layouts:
            plans.append(Plan(micro, layout, world, total // data, parsed.ranks_per_node, parsed.cpu))
    if not plans:
        raise CannotPlanError("; ".join(dict.fromkeys(left_out.values())))
    return sorted(plans, key=_plainness), left_out


def _plainness(plan: Plan) -> tuple[Any, ...]:
    """A key that sorts by what a layout adds, then by bytes between nodes, bytes within them, and memory."""
    options = plan.options
    within, between = plan.bytes_by_link()
    adds = (
        plan.sizes.tensor * plan.sizes.context,
        options.cpu_offload,
        options.activation_checkpointing,
    )
    return *adds, between, within, plan.high_water


def _report_progress(name: str) -> None:
    """On stderr, since what is printed on stdout may be piped. A large model takes minutes."""
    print(f"Planning {name} ...", file=sys.stderr, flush=True)


def _layouts(options: StrategyOptions, data: int, nodes: int, accumulates: bool) -> list[StrategyOptions]:
    """Sharded layouts of ``data`` data-parallel ranks on this number of ``nodes``."""
    copies = {1}
    if data % nodes == 0 and data > nodes:
        copies.add(nodes)
    layouts: list[StrategyOptions] = []
    for n, frees, offloads in product(copies, (False, True), (False, True)):
        layout = replace(
            options,
            data_parallel_replicate_size=n,
            reshard_during_accumulation=frees,
            cpu_offload=offloads,
        )
        if accumulates and data > 1:
            undeferred: bool | Literal["all_reduce"] = "all_reduce" if n > 1 else False
            layouts += [replace(layout, defer_fsdp_grad_sync=defer) for defer in (True, undeferred)]
        else:
            layouts.append(layout)
    return layouts


def _table(plans: list[Plan]) -> Iterator[str]:
    kinds = ("parameters", "gathered", "gradients", "optimizer", "activations")
    names = ("layout", "high-water", *kinds, "collectives", "in nodes", "between")
    yield f"{names[0]:44}" + "".join(f"{name:>12}" for name in names[1:])
    for plan in plans:
        held = (plan.high_water, *(plan.memory[name] for name in kinds))
        sizes = "".join(f"{size / _GIB:12.2f}" for size in held)
        links = "".join(f"{size / _GIB:12.2f}" for size in plan.bytes_by_link())
        yield f"{plan!s:44}{sizes}{plan.sent.total():12}{links}"


def _yaml(parsed: argparse.Namespace, plan: Plan) -> str:
    options = {field.name: getattr(plan.options, field.name) for field in fields(plan.options)}
    changed = {name: value for name, value in options.items() if value != getattr(StrategyOptions, name)}
    trainer = {
        "accelerator": "cpu" if plan.is_host else "gpu",
        "num_nodes": plan.nodes,
        "devices": parsed.world_size // plan.nodes,
        "precision": parsed.precision,
        "accumulate_grad_batches": plan.accumulate,
        "strategy": {"class_path": "lightning_automodel.AutomodelStrategy", "init_args": changed},
    }
    return str(yaml.safe_dump({"trainer": trainer}, sort_keys=False))


if __name__ == "__main__":
    sys.exit(main())
