"""What an optimizer's step costs where Muon needs whole matrices: processor time, bytes, collectives, memory.

All variants live in the same processes and take turns, one step each, with the same gradients. Only the step
is measured: what happens between the end of the closure and the end of `step`. There is no forward and no
backward.

    python benchmarks/optimizer_step.py --ranks 2 --output report.md
    python benchmarks/optimizer_step.py --ranks 2 --size 100M --ns-steps 1 --rounds 2
    python benchmarks/optimizer_step.py --nodes --rate 1gbit     # one rank on each of two nodes (namespaces, root)
    python benchmarks/optimizer_step.py --count 2 4 8 16          # bytes and collectives alone, by shapes
    python benchmarks/optimizer_step.py --ranks 4 --replicas 2 --variants whole ddp
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from peak_memory import MEBIBYTE, peak, start_peak
from ranks import launch, sent_by_device
from report import describe_environment, publish, table
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.muon_and_adamw import MuonAndAdamW
from lightning_automodel.gradients.whole_tensors import WholeSteps

SIZES = {"tiny": (32, 2), "8M": (256, 10), "100M": (512, 32)}
"""Width and number of blocks."""
VOCABULARY = 512
VARIANTS = {
    "adamw": "AdamW on shards",
    "shards": "Muon on the shards of FSDP2, as torch computes it without this strategy",
    "gather": "gradients and weights of all matrices gathered, Muon on every rank",
    "gather-gradients": "gradients of all matrices gathered, Muon on every rank",
    "ddp": 'Muon under `data_parallel="ddp"`: whole matrices on every rank',
    "whole": 'Muon with an owner for each matrix (`optimizer_step="whole"`)',
}


class Traffic(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank must send and receive.

    Of an all-gather or a reduction, those of the ring algorithm; what a rank keeps for itself is not
    counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.sent = 0.0
        self.received = 0.0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives come here again
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional") and any(isinstance(each, str | list) for each in args):
            self._count(name.strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple) -> None:
        self.collectives += 1
        if name == "alltoall_base":
            output, given, _, num_received, num_sent = args[:5]
            own = dist.get_rank() % len(num_sent)  # shards are the last dimension of the mesh
            self.sent += (given.numel() - num_sent[own]) * given.element_size()
            self.received += (output.numel() - num_received[own]) * output.element_size()
            return
        [group_name] = [
            each for each in args if isinstance(each, str) and each not in ("sum", "avg", "max", "min")
        ]
        size = _resolve_process_group(group_name).size()
        if name == "all_gather_into_tensor":
            travels = (size - 1) * args[0].nbytes
        elif name == "all_reduce":
            travels = 2 * (size - 1) / size * args[0].nbytes
        elif name == "reduce_scatter_tensor":
            travels = (size - 1) / size * args[0].nbytes
        else:
            raise NotImplementedError(name)
        self.sent += travels
        self.received += travels


# --- Variants ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """The parameters of a transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])


class Model(nn.Module):
    """Its blocks' matrices have 12 `width`**2 elements a block."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def matrices(self) -> list[nn.Parameter]:
        return [each for each in self.blocks.parameters() if each.ndim == 2]

    def others(self) -> list[nn.Parameter]:
        return [each for each in self.parameters() if each.ndim != 2 or each is self.embedding.weight]


class GatheringMuon:
    """Muon that gathers one matrix after the other on every rank, which all compute the same.

    Args:
        gathers_weights: Without, it gathers gradients alone, and adds the step to the shard.
    """

    def __init__(
        self, model: Model, muon: dict[str, Any], adamw: dict[str, Any], gathers_weights: bool
    ) -> None:
        self._matrices = model.matrices()
        self._gathers_weights = gathers_weights
        self._decay = 1 - muon["lr"] * muon["weight_decay"]
        decay = muon["weight_decay"] if gathers_weights else 0.0
        self._wholes = [nn.Parameter(torch.empty(0, 0)) for _ in self._matrices]
        self._steps = [
            torch.optim.Muon([whole], **{**muon, "weight_decay": decay}) for whole in self._wholes
        ]
        self._adamw = torch.optim.AdamW(model.others(), **adamw)

    @torch.no_grad()
    def step(self) -> None:
        for sharded, whole, optimizer in zip(self._matrices, self._wholes, self._steps, strict=True):
            whole.data = sharded.full_tensor() if self._gathers_weights else torch.zeros(sharded.shape)
            whole.grad = sharded.grad.full_tensor()
            optimizer.step()
            own = distribute_tensor(whole.data, sharded.device_mesh, sharded.placements, src_data_rank=None)
            if self._gathers_weights:
                sharded.copy_(own)
            else:
                sharded.mul_(self._decay).add_(own)
            whole.grad = None
            whole.data = whole.new_empty(0, 0)
        self._adamw.step()


class Variant:
    """A model of its own, with gradients that stay, and its optimizer.

    Args:
        mesh: What parameters are sharded over.
    """

    def __init__(self, name: str, size: str, ns_steps: int, mesh: Any) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = Model(*SIZES[size])
        if name != "ddp":
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, mesh, parameter.placements, src_data_rank=None)
            parameter.grad = gradient
        muon = {"lr": 0.02, "weight_decay": 0.1, "ns_steps": ns_steps}
        adamw = {"lr": 3e-4}
        self._whole: WholeSteps | None = None
        self._optimizer: Any
        if name == "adamw":
            self._optimizer = torch.optim.AdamW(self.model.parameters(), **adamw)
        elif name.startswith("gather"):
            self._optimizer = GatheringMuon(self.model, muon, adamw, gathers_weights=name == "gather")
        else:
            self._optimizer = MuonAndAdamW(self.model.matrices(), self.model.others(), muon, adamw)
        if name == "whole":
            self._whole = WholeSteps(torch.get_default_device(), "auto")
            self._whole.take(self._optimizer)

    def step(self) -> float:
        """Take a step; returns the processor seconds of what travels to owners and back, where that is apart."""
        if self._whole is None:
            self._optimizer.step()
            return 0.0
        started = process_time()
        self._whole.begin(self._optimizer)
        seconds = process_time() - started
        self._optimizer.step()
        started = process_time()
        self._whole.end(self._optimizer)
        return seconds + process_time() - started

    def matrices(self) -> list[Tensor]:
        """Whole, of all blocks. A collective."""
        return [full(parameter.detach()) for parameter in self.model.matrices()]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def of_ranks(number: float, combine: Callable[[Tensor], Tensor]) -> float:
    """A number of all ranks in one. A collective."""
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([number], dtype=torch.float64))
    return float(combine(torch.cat(found)))


def child(
    size: str, names: list[str], rounds: int, ns_steps: int, replicas: int
) -> dict[str, dict[str, Any]]:
    """What a rank measures, by variant."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    variants = [Variant(name, size, ns_steps, mesh) for name in names]
    before = variants[0].matrices()
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:  # states are made; collectives counted
        sent = sent_by_device()
        with Traffic() as traffic:
            variant.step()
        dist.barrier()
        found[variant.name] = {
            "collectives": traffic.collectives,
            "sent": of_ranks(traffic.sent, torch.max),
            "received": of_ranks(traffic.received, torch.max),
            "sent by device": of_ranks(sent_by_device() - sent, torch.max),
            **{key: [] for key in ("seconds", "processor", "exchange", "memory")},
        }
    for _ in range(rounds):
        for variant in variants:
            held = start_peak("cpu")
            dist.barrier()
            wall = perf_counter()
            processor = process_time()
            exchange = variant.step()
            processor = process_time() - processor
            wall = perf_counter() - wall
            of_variant = found[variant.name]
            of_variant["memory"].append(of_ranks(peak("cpu") - held, torch.max))
            of_variant["seconds"].append(of_ranks(wall, torch.max))
            of_variant["processor"].append(of_ranks(processor, torch.mean))
            of_variant["exchange"].append(of_ranks(exchange, torch.mean))
    reference = next(variant for variant in variants if variant.name == "ddp").matrices()
    for variant in variants:
        off = [new - expected for new, expected in zip(variant.matrices(), reference, strict=True)]
        moved = [expected - old for old, expected in zip(before, reference, strict=True)]
        found[variant.name]["off"] = norm(off) / norm(moved)
    dist.destroy_process_group()
    return found


def count(sizes: list[str], numbers: list[int], ns_steps: int) -> str:
    """A table of bytes and collectives by shapes alone: nothing is computed, and no rank is started."""
    names = [name for name in VARIANTS if name not in ("adamw", "ddp")]
    rows = []
    for size in sizes:
        for ranks in numbers:
            cells = []
            for name in names:
                sent = []
                for rank in range(ranks):
                    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
                    mesh = dist.init_device_mesh("cpu", (ranks,))
                    with torch.device("meta"):
                        variant = Variant(name, size, ns_steps, mesh)
                        with Traffic() as traffic:
                            variant.step()
                    sent.append(traffic.sent)
                    dist.destroy_process_group()
                    if name != "whole":
                        break  # alike on all ranks
                cells.append(f"{max(sent) / 1e6:,.1f} in {traffic.collectives:,}")
            rows.append([size, str(ranks), *cells])
    return table(["parameters", "ranks", *names], rows)


def norm(tensors: list[Tensor]) -> float:
    return sum(float(each.double().square().sum()) for each in tensors) ** 0.5


# --- Report -----------------------------------------------------------------------------------------------------------


def ratio(found: dict[str, dict[str, Any]], key: str, one: str, other: str) -> str:
    """Median of the ratios within each round, the least and the most."""
    ratios = [a / b for a, b in zip(found[one][key], found[other][key], strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def marks(found: dict[str, dict[str, Any]], ranks: int) -> list[str]:
    """Lines of what the variant `whole` is beside the others."""
    ours = found["whole"]
    lines = []
    for other in found:
        if other in ("whole", "adamw"):
            continue
        parts = [f"seconds {ratio(found, 'seconds', 'whole', other)}"]
        parts.append(f"processor {ratio(found, 'processor', 'whole', other)}")
        if found[other]["sent"]:
            parts.append(f"bytes sent {ours['sent'] / found[other]['sent']:.2f}")
        lines.append(f"- whole / {other}: {', '.join(parts)}")
    pairs = zip(ours["processor"], ours["exchange"], found["ddp"]["processor"], strict=True)
    shares = [(all_of_it - exchange) / (ddp / ranks) for all_of_it, exchange, ddp in pairs]
    exchange = median(ours["exchange"])
    lines.append(
        f"- processor seconds without the exchange / (ddp / {ranks} ranks): {median(shares):.2f}"
        f" ({min(shares):.2f} to {max(shares):.2f}); the exchange takes {1000 * exchange:.0f} ms of a"
        " processor"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--replicas", type=int, default=1, help="HSDP: so many copies of the shards (%(default)s)"
    )
    parser.add_argument("--size", choices=SIZES, default="8M", help="parameters (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant (%(default)s)")
    parser.add_argument("--ns-steps", type=int, default=5, help="Newton-Schulz iterations (%(default)s)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="(all)")
    parser.add_argument("--nodes", action="store_true", help="half of the ranks on each of two nodes")
    parser.add_argument("--rate", default="1gbit", help="what each node may send (%(default)s)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parser.add_argument(
        "--count", type=int, nargs="+", metavar="RANKS", help="count bytes alone, for all sizes"
    )
    parsed = parser.parse_args()
    if parsed.count:
        counted = count([size for size in SIZES if size != "tiny"], parsed.count, parsed.ns_steps)
        title = f"MB that the rank that sends most sends in a step, and collectives; {parsed.ns_steps} iterations"
        publish(f"{title}\n\n{counted}", parsed.output)
        return
    case = {
        "size": parsed.size,
        "names": parsed.variants,
        "rounds": parsed.rounds,
        "ns_steps": parsed.ns_steps,
        "replicas": parsed.replicas,
    }
    found = launch(Path(__file__), case, parsed.ranks, parsed.rate if parsed.nodes else None)
    rows = []
    for name, of_variant in found.items():
        numbers = [
            f"{1000 * median(of_variant['seconds']):,.0f}",
            f"{1000 * median(of_variant['processor']):,.0f}",
        ]
        numbers += [f"{of_variant[key] / 1e6:.2f}" for key in ("sent", "received")]
        if parsed.nodes:
            numbers.append(f"{of_variant['sent by device'] / 1e6:.2f}")
        numbers += [str(of_variant["collectives"]), f"{median(of_variant['memory']) / MEBIBYTE:.0f}"]
        off = "" if name == "adamw" else f"{100 * of_variant['off']:.2g}"
        rows.append([name, *numbers, off])
    on_device = ["MB sent by the device"] if parsed.nodes else []
    header = ["variant", "ms", "processor ms a rank", "MB sent", "MB received", *on_device, "collectives"]
    header += ["MiB more at the peak", "off by %"]
    with torch.device("meta"):
        model = Model(*SIZES[parsed.size])
    in_matrices = sum(each.numel() for each in model.matrices())
    in_all = sum(each.numel() for each in model.parameters())
    where = f"two nodes at {parsed.rate}" if parsed.nodes else "one machine, gloo on loopback"
    layout = f"{parsed.replicas} replicas" if parsed.replicas > 1 else "one copy"
    report = [
        f"# An optimizer's step, {parsed.size}, {parsed.ranks} ranks",
        "",
        *(f"- {key}: {value}" for key, value in describe_environment().items()),
        f"- command: `python benchmarks/optimizer_step.py {shlex.join(sys.argv[1:])}`",
        f"- {where}; {layout}; float32; {in_all:,} parameters, {in_matrices:,} of them in Muon's matrices,"
        f" the others in AdamW; {parsed.ns_steps} Newton-Schulz iterations; {parsed.rounds} rounds",
        "- medians; bytes of the rank that sends or receives most; off: from `ddp`, as a share of how far"
        " it has moved",
        "",
        table(header, rows),
        "",
        *(f"- {name}: {VARIANTS[name]}" for name in found),
        "",
        "Medians of the ratios within each round, the least and the most:",
        "",
        *marks(found, parsed.ranks),
    ]
    publish("\n".join(report), parsed.output)


if __name__ == "__main__":
    if "--child" in sys.argv:
        result = child(**json.loads(sys.argv[sys.argv.index("--child") + 1]))
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)
    else:
        main()
