"""What spreading experts over ranks costs and saves: time, bytes and memory of an optimizer step, by size.

All variants train the same mixture of experts on the same micro-batches, live in the same processes and take
turns, one optimizer step each. In the end they must have the same weights.

    python benchmarks/expert_parallel.py --batch-tokens 64 512 2048 --output report.md
    python benchmarks/expert_parallel.py --nodes --rate 1gbit     # two ranks on each of two nodes (namespaces, root)
"""

import argparse
import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from peak_memory import MEBIBYTE, peak, start_peak
from ranks import launch, sent_by_device
from report import describe_environment, publish, table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from turns import PausedTraining
from typing_extensions import override
from variants import CallAfterStep
from workload import VOCABULARY_SIZE, Batch, Workload, mean_loss, whole_weights

from lightning_automodel import AutomodelStrategy, dispatch_tokens, spread_experts

NUM_EXPERTS = 16
CHOSEN = 2
WARM_UP = 2
HEADS = 4
TOLERANCE = 2e-3  # float32, relative to how far training has moved the weights
SIZES = (1, 2, 4)
MODES = {"kept": False, "resharded": True}


@dataclass(frozen=True)
class Case:
    """What all ranks run.

    Attributes:
        width: Channels of the residual stream; experts have twice as many.
        layers: Blocks of attention and a mixture of experts.
        accumulate: Micro-batches of an optimizer step.
        batch_tokens: Tokens of a micro-batch.
        rounds: Optimizer steps that are measured of each variant.
        sizes: Expert-parallel sizes.
    """

    width: int
    layers: int
    accumulate: int
    batch_tokens: int
    rounds: int
    sizes: list[int]


class Mixture(nn.Module):
    """Attention, then experts of which a gate chooses some for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True, bias=False)
        self.gate = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * width, width) / (2 * width) ** 0.5)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mesh: Any = None

    def spread(self, mesh: Any) -> None:
        """Keep this rank's experts alone."""
        if self.mesh is None:
            spread_experts(self, mesh, ["up", "down"])
            self.mesh = mesh

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows that are sorted by this rank's experts, and how many each of them gets."""
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = [
            (part @ own_up).relu() @ own_down
            for part, own_up, own_down in zip(rows.split(counts), up, down, strict=True)
        ]
        return torch.cat(parts)

    @override
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        tokens = self.norms[1](hidden).flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(CHOSEN)
        mixed = dispatch_tokens(tokens, chosen, weights, NUM_EXPERTS, self.compute, self.mesh)
        return hidden + mixed.view_as(hidden)


class Decoder(nn.Module):
    """Causal mixture of experts, token ids [b, s] to logits [b, s, v]; each block becomes one FSDP unit."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY_SIZE, case.width)
        self.blocks = nn.ModuleList(Mixture(case.width) for _ in range(case.layers))
        self.head = nn.Linear(case.width, VOCABULARY_SIZE, bias=False)

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden)


class Module(pl.LightningModule):
    """Spreads the experts where the mesh has a dimension for them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = Decoder(case)

    @override
    def configure_model(self) -> None:
        if "expert_parallel" in self.device_mesh.mesh_dim_names:
            for block in self.model.blocks:
                block.spread(self.device_mesh["expert_parallel"])

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss, num_label_tokens = mean_loss(self.model, batch)
        return {"loss": loss, "num_label_tokens": num_label_tokens}

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


def train(case: Case, size: int, resharded: bool, on_step: Callable[[], None]) -> Tensor:
    """Train in the process group that exists; returns all weights."""
    module = Module(case)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=AutomodelStrategy(expert_parallel_size=size, reshard_during_accumulation=resharded),
        max_epochs=1,
        accumulate_grad_batches=case.accumulate,
        callbacks=[CallAfterStep(on_step)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, workload_of(case).build_loader(dist.get_rank()))
    return whole_weights(list(module.model.parameters()))


def workload_of(case: Case) -> Workload:
    """The batches of all steps. Its own model is not used."""
    return Workload(32, 1, case.accumulate, case.batch_tokens, steps=WARM_UP + case.rounds)


# --- A rank -----------------------------------------------------------------------------------------------------------


def child(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a rank measures, by variant."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = Case(**arguments)
    trainings = {
        f"{size} {mode}": PausedTraining(partial(train, case, size, resharded))
        for mode, resharded in MODES.items()
        for size in case.sizes
    }
    measured: dict[str, dict[str, list[float]]] = {}
    for name, training in trainings.items():
        for _ in range(WARM_UP):  # the first with the set-up
            training.step()
        measured[name] = {"seconds": [], "processor": [], "sent": [], "memory": []}
    names = list(trainings)
    for number in range(case.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            of_step = measure(trainings[name])
            for key, value in of_step.items():
                measured[name][key].append(value)
    weights = {name: training.finish() for name, training in trainings.items()}
    deviations = compare(case, weights)
    dist.destroy_process_group()
    return {name: {**measured[name], "deviation": deviations[name]} for name in names}


def measure(training: PausedTraining) -> dict[str, float]:
    """One optimizer step of all ranks. A collective."""
    held = start_peak("cpu")
    dist.barrier()
    sent = sent_by_device()
    wall = perf_counter()
    processor = process_time()
    training.step()
    processor = process_time() - processor
    wall = perf_counter() - wall
    of_rank = [wall, processor, float(sent_by_device() - sent), float(peak("cpu") - held)]
    by_rank = [torch.zeros(4, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, torch.tensor(of_rank, dtype=torch.float64))
    together = torch.stack(by_rank)
    return {
        "seconds": float(together[:, 0].max()),
        "processor": float(together[:, 1].mean()),
        "sent": float(together[:, 2].max()),
        "memory": float(together[:, 3].max()),
    }


def compare(case: Case, weights: dict[str, Tensor]) -> dict[str, float]:
    """Distance of the weights from those of the first variant, relative to how far these have moved.

    Raises:
        RuntimeError: If it is more than rounding.
    """
    start = torch.cat([p.detach().reshape(-1) for p in Decoder(case).parameters()])
    reference = next(iter(weights.values()))
    way = (reference - start).norm()
    deviations = {name: float((own - reference).norm() / way) for name, own in weights.items()}
    if not max(deviations.values()) <= TOLERANCE:
        raise RuntimeError(f"Weights deviate by more than {TOLERANCE:g}: {deviations}.")
    return deviations


# --- Report -----------------------------------------------------------------------------------------------------------


def section(batch_tokens: int, found: dict[str, dict[str, Any]], num_senders: int) -> str:
    """One number of tokens: a row for each variant, times also as a ratio within each round."""
    rows = []
    for name, of_variant in found.items():
        size, mode = name.split()
        without = found[f"1 {mode}"]
        ratios = [own / other for own, other in zip(of_variant["seconds"], without["seconds"], strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        times = [f"{1000 * median(of_variant[key]):,.0f}" for key in ("seconds", "processor")]
        sent = f"{min(of_variant['sent']) / num_senders / 1e6:.1f}"  # others may use the device too
        memory = f"{median(of_variant['memory']) / MEBIBYTE:.0f}"
        rows.append([size, mode, times[0], spread, times[1], sent, memory, f"{of_variant['deviation']:.0e}"])
    header = ["expert_parallel_size", "parameters", "ms", "beside size 1", "processor ms a rank", "MB sent"]
    header += ["MiB more at the peak", "deviation"]
    return f"## {batch_tokens} tokens a micro-batch\n\n{table(header, rows)}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="channels of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a step (%(default)s)")
    parser.add_argument(
        "--batch-tokens", type=int, nargs="+", default=[512], help="of a micro-batch (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="steps of each variant (%(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), help="of which 1 is one (%(default)s)"
    )
    parser.add_argument("--nodes", action="store_true", help="half of the ranks on each of two nodes")
    parser.add_argument("--rate", default="1gbit", help="what each node may send (%(default)s)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    return parser.parse_args()


def main() -> None:
    parsed = parse_arguments()
    sections = []
    for batch_tokens in parsed.batch_tokens:
        case = Case(
            parsed.width, parsed.layers, parsed.accumulate, batch_tokens, parsed.rounds, parsed.sizes
        )
        found = launch(Path(__file__), vars(case), parsed.ranks, parsed.rate if parsed.nodes else None)
        sections.append(section(batch_tokens, found, 1 if parsed.nodes else parsed.ranks))
    model = Decoder(case)
    in_all = sum(p.numel() for p in model.parameters())
    in_experts = sum(block.up.numel() + block.down.numel() for block in model.blocks)
    where = f"two nodes at {parsed.rate}, gloo" if parsed.nodes else "one machine, gloo on loopback"
    counted = "what a node sends to the other" if parsed.nodes else "what a rank sends"
    report = [
        f"# Expert parallelism, {parsed.ranks} ranks",
        "",
        *(f"- {key}: {value}" for key, value in describe_environment().items()),
        f"- command: `python benchmarks/expert_parallel.py {shlex.join(sys.argv[1:])}`",
        f"- {where}; float32; {in_all:,} parameters, {in_experts:,} of them in {NUM_EXPERTS} experts a"
        f" block, of which each token takes {CHOSEN}; {parsed.layers} blocks of width {parsed.width}",
        f"- {parsed.accumulate} micro-batches a step, {parsed.rounds} rounds; medians, and for the ratio"
        f" within each round the least and the most; MB: {counted} in a step, with all headers, the least"
        " of all rounds",
        "- deviation: of the weights at the end from those of the first row, as a share of how far they"
        " have moved",
        "",
        "\n\n".join(sections),
    ]
    publish("\n".join(report), parsed.output)


if __name__ == "__main__":
    if "--child" in sys.argv:
        result = child(json.loads(sys.argv[sys.argv.index("--child") + 1]))
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)
    else:
        main()
