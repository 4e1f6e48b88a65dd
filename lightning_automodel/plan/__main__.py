"""The command line: ``python -m lightning_automodel.plan my_module:build --world-size 64 ...``."""

import argparse
import functools
import importlib
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml  # type: ignore[import-untyped]

from lightning_automodel.plan.layouts import DEVICES, Assumptions, Layout, Plan
from lightning_automodel.plan.recording import PRECISIONS, Build, CannotPlanError, run

_GIB = 1 << 30
_REMEDIES = {
    "activations": "fewer rows in a micro-batch, shorter sequences, token_loss, or a larger --context",
    "for a while": "fewer rows in a micro-batch, token_loss, or smaller layers",
    "unsharded_gradients": "as many --micro-batches as data-parallel ranks, or defer_fsdp_grad_sync=False",
    "gathered": "smaller FSDP units (auto_wrap_policy), or a larger --tensor",
}


def main(arguments: list[str] | None = None) -> int:
    """Plan one model. Returns the exit status: 0, or 1 if it cannot be planned or nothing fits."""
    parsed = _parser().parse_args(arguments)
    try:
        assumed = _assumptions(parsed)
        plans, left_out = _plans(parsed, _import(parsed.build), assumed)
    except (CannotPlanError, ImportError, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    fitting = [plan for plan in plans if plan.high_water <= assumed.memory]
    print(f"# assumed ({parsed.device}); to change it, save these lines and pass --assume FILE.toml")
    print(*(f"{name} = {str(value).lower()}" for name, value in asdict(assumed).items()), "", sep="\n")
    print(f"{len(fitting)} of {len(plans)} layouts of {parsed.world_size} ranks fit; GiB and seconds of one step")
    print(*_table((fitting or plans)[: parsed.top]), "", sep="\n")
    print(*(f"left out: {name}: {reason}\n" for name, reason in left_out.items()), sep="", end="")
    best = fitting[0] if fitting else min(plans, key=lambda plan: plan.high_water)
    print(*_details(best), "", *(_yaml(parsed, best) if fitting else _what_would_fit(best)), sep="\n")
    return 0 if fitting else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_automodel.plan",
        description="Memory, communication and time of each layout, without weights and without the cluster.",
    )
    add = parser.add_argument
    add("build", metavar="module:function", help="returns (LightningModule, batch of one micro-batch); or config.yaml")
    add("--world-size", type=int, required=True, help="ranks of the run")
    add("--ranks-per-node", type=int, default=8, help="devices of a node (%(default)s)")
    add("--micro-batches", type=int, help="of one optimizer step, all ranks together (the world size)")
    add("--precision", choices=PRECISIONS, default="bf16-mixed", help="of the Trainer (%(default)s)")
    add("--label-shift", type=int, default=0, help="of the strategy, for context parallelism (%(default)s)")
    add("--tensor", type=int, nargs="+", help="tensor_parallel_size to try (1, and the ranks of a node)")
    add("--context", type=int, nargs="+", default=[1, 2, 8], help="context_parallel_size to try (1 2 8)")
    add("--device", choices=DEVICES, default="h100", help="what is assumed of the machines (%(default)s)")
    add("--assume", metavar="FILE.toml", type=Path, help="values that replace those of --device, as printed")
    add("--top", type=int, default=12, help="layouts to print (%(default)s)")
    return parser


def _import(target: str) -> Build:
    sys.path.insert(0, str(Path.cwd()))
    if target.endswith((".yaml", ".yml")):
        return _configured(Path(target))
    name, _, function = target.partition(":")
    try:
        build: Build = getattr(importlib.import_module(name), function)
    except Exception as error:  # the user's module can raise anything
        raise CannotPlanError(
            f"{target} cannot be imported ({type(error).__name__}: {error}): run it where `import {name}` works."
        ) from error
    return build


def _configured(path: Path) -> Build:
    """What a LightningCLI configuration builds, and the first batch of its data, which has values."""
    from jsonargparse import ArgumentParser  # what LightningCLI needs; an extra of Lightning's

    given = yaml.safe_load(path.read_text())

    def instance(name: str, base: type) -> Any:
        if "class_path" not in (given.get(name) or {}):
            raise CannotPlanError(f"{path} has no class_path for {name}: write it there, or pass module:function.")
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(base, name)
        return parser.instantiate_classes(parser.parse_object({name: given[name]}))[name]

    @functools.cache
    def batch() -> Any:
        with torch.device("cpu"):
            data = instance("data", pl.LightningDataModule)
            data.prepare_data()
            data.setup("fit")
            return next(iter(data.train_dataloader()))

    return lambda: (instance("model", pl.LightningModule), batch())


def _assumptions(parsed: argparse.Namespace) -> Assumptions:
    assumed = DEVICES[parsed.device]
    given = {} if parsed.assume is None else tomllib.loads(parsed.assume.read_text())
    if unknown := sorted(set(given) - set(asdict(assumed))):
        raise CannotPlanError(f"{parsed.assume} has {', '.join(unknown)}; known are {', '.join(asdict(assumed))}.")
    return replace(assumed, **given)


def _plans(parsed: argparse.Namespace, build: Build, assumed: Assumptions) -> tuple[list[Plan], dict[str, str]]:
    """Plans of all layouts, the fastest first, and why others were left out."""
    world, plans, left_out = parsed.world_size, list[Plan](), dict[str, str]()
    total = parsed.micro_batches or world
    sizes = [(t, 1) for t in parsed.tensor or (1, parsed.ranks_per_node)]
    sizes += [(t, c) for c in parsed.context if c > 1 for t in parsed.tensor or (1,)]
    for tensor, context in dict.fromkeys(sizes):
        data = max(world // (tensor * context), 1)
        if data * tensor * context != world or total % data:
            left_out[f"TP {tensor} CP {context}"] = (
                f"{world} ranks and {total} micro-batches do not divide into such groups: pass another --micro-batches,"
                " --tensor or --context"
            )
            continue
        for recomputes in (False, True):
            shape = (tensor, context, recomputes)
            try:
                micro = run(build, parsed.precision, *shape, parsed.label_shift, foreach=not assumed.is_host)
            except (CannotPlanError, ValueError) as error:
                if tensor * context == 1 and not recomputes:
                    raise  # the model itself
                left_out[f"TP {tensor} CP {context}{' recomputed' * recomputes}"] = " ".join(str(error).split())
                break
            for layout in _layouts(parsed, data, *shape):
                is_half = parsed.precision != "32-true"
                plans.append(Plan(micro, layout, total // data, assumed, parsed.ranks_per_node, is_half))
    if not plans:
        raise CannotPlanError("; ".join(dict.fromkeys(left_out.values())))
    if parsed.precision == "bf16-mixed":
        left_out["DDP"] = "its autocast does not reach the meta device: pass --precision bf16-true or 32-true"
    if not any(plan.high_water <= assumed.memory for plan in plans) and not assumed.is_host:
        sharded = [p.layout for p in plans if p.layout.data_parallel == "fsdp2" and not p.layout.retains]
        plans += [p.with_layout(replace(p.layout, offloads=True)) for p in plans if p.layout in sharded]
    return sorted(plans, key=lambda plan: plan.seconds["step"]), left_out


def _layouts(parsed: argparse.Namespace, data: int, tensor: int, context: int, recomputes: bool) -> Iterator[Layout]:
    nodes = -(-parsed.world_size // parsed.ranks_per_node)
    if tensor == 1 and parsed.precision != "bf16-mixed":
        yield Layout("ddp", data, 1, 1, context, recomputes)
    for retains in (True, False):
        yield Layout("fsdp2", 1, data, tensor, context, recomputes, retains)
        if 1 < nodes < data and data % nodes == 0:
            yield Layout("fsdp2", nodes, data // nodes, tensor, context, recomputes, retains)


def _table(plans: list[Plan]) -> Iterator[str]:
    names = ("layout", "high-water", "parameters", "optimizer", "gradients", "activations", "between", "step")
    yield f"{names[0]:34}" + "".join(f"{name:>12}" for name in names[1:])
    for plan in plans:
        memory = plan.memory
        activations = memory.get("activations", 0) + memory["for a while"]
        gradients = memory.get("gradients", 0) + memory.get("unsharded_gradients", 0) + memory.get("buckets", 0)
        parameters = memory.get("parameters", 0) + memory.get("gathered", 0)
        held = (plan.high_water, parameters, memory.get("optimizer", 0), gradients, activations)
        columns = [size / _GIB for size in (*held, plan.bytes_between_nodes())]
        yield f"{plan.layout!s:34}" + "".join(f"{size:12.2f}" for size in columns) + f"{plan.seconds['step']:12.3f}"


def _details(plan: Plan) -> Iterator[str]:
    yield f"{plan.layout}, {plan.high_water / _GIB:.2f} GiB where most is held:"
    yield from (f"  {size / _GIB:9.2f} {name.replace('_', ' ')}" for name, size in plan.memory.items())
    for each in plan.collectives:
        where = f"{each.ranks} {each.group} ranks, {each.neighbours} on a node"
        yield f"  {each.times} {each.kind} over {where}: {each.num_bytes / _GIB:.3f} GiB"
    yield "  seconds: " + ", ".join(f"{name} {value:.3f}" for name, value in plan.seconds.items())


def _yaml(parsed: argparse.Namespace, plan: Plan) -> Iterator[str]:
    nodes = -(-parsed.world_size // parsed.ranks_per_node)
    yield "trainer:"
    yield f"  accelerator: {'cpu' if plan.assumed.is_host else 'gpu'}"
    yield f"  num_nodes: {nodes}\n  devices: {parsed.world_size // nodes}\n  precision: {parsed.precision}"
    yield f"  accumulate_grad_batches: {plan.accumulate}\n  strategy:"
    yield "    class_path: lightning_automodel.AutomodelStrategy\n    init_args:"
    options = plan.layout.options() | ({"label_shift": parsed.label_shift} if parsed.label_shift else {})
    yield from (f"      {name}: {str(value).lower()}" for name, value in options.items())


def _what_would_fit(plan: Plan) -> Iterator[str]:
    most = max(plan.memory, key=lambda name: plan.memory[name])
    remedy = _REMEDIES.get(most, "more ranks, a larger --tensor, or another optimizer")
    limit, largest = f"{plan.assumed.memory / _GIB:.1f} GiB", most.replace("_", " ")
    yield f"Nothing fits in {limit}. Most of the least is {largest}: {remedy}."


if __name__ == "__main__":
    sys.exit(main())
