"""How far a mixture of experts is from one process, under each way to spread its experts over four ranks.

All train the toy of tests/expert_parallel in float64 with SGD and momentum, on micro-batches that have
equally many label tokens, so that a mean over them is exact everywhere and what is off are the experts.

    python benchmarks/expert_parallel_others.py --output report.md
"""

import argparse
import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from ranks import launch
from report import describe_environment, publish, table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_automodel import AutomodelStrategy, spread_experts
from lightning_automodel.expert_parallel.dispatch import dispatch_tokens
from tests.expert_parallel import mixtures

RANKS = 4
ACCUMULATE = 2
STEPS = 3
LENGTH = 12


class LocalExperts(mixtures.Experts):
    """This rank's experts, as plain parameters: the way of DeepSpeed and fairseq."""

    def __init__(self, whole: mixtures.Experts) -> None:
        super().__init__(0)
        rank = dist.get_rank()
        self.up = nn.Parameter(whole.up.detach().chunk(RANKS)[rank].clone())
        self.down = nn.Parameter(whole.down.detach().chunk(RANKS)[rank].clone())


class LocalMixture(mixtures.Mixture):
    """Sends tokens to the ranks that hold their experts."""

    @override
    def mix(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        mesh = init_device_mesh("cpu", (RANKS,))
        return dispatch_tokens(tokens, chosen, weights, mixtures.NUM_EXPERTS, self.experts, mesh)


class Toy(pl.LightningModule):
    """Trains the mean loss over the label tokens of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mixtures.MixtureDecoder().double()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": mean_loss(self.model, batch), "num_label_tokens": batch.numel()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class Spread(Toy):
    """Experts spread by this package."""

    def configure_model(self) -> None:
        for block in self.model.blocks:
            spread_experts(block.experts, self.device_mesh["expert_parallel"])


class Local(Toy):
    """Each rank keeps its experts as plain parameters."""

    @override
    def setup(self, stage: str) -> None:
        for block in self.model.blocks:
            block.__class__ = LocalMixture
            block.experts = LocalExperts(block.experts)


class LocalUnderFSDP(Local):
    """Sharded by the user, as Lightning's ModelParallelStrategy asks for."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class LocalBesideFSDP(Local):
    """The same, and FSDP2 leaves the experts alone."""

    def configure_model(self) -> None:
        experts = {parameter for block in self.model.blocks for parameter in block.experts.parameters()}
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"], ignored_params=experts)


class Planned(Toy):
    """Experts are DTensors on a mesh of the user's, of which FSDP2 knows nothing."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            for name, weight in list(block.experts.named_parameters()):
                sharded = DTensor.from_local(weight.detach().chunk(RANKS)[dist.get_rank()].clone(), mesh)
                setattr(block.experts, name, nn.Parameter(sharded))
        fully_shard(self.model, mesh=mesh)


def fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)


WAYS: dict[str, tuple[type[Toy], Callable[[], Any]]] = {
    "`AutomodelStrategy(expert_parallel_size=4)`": (
        Spread,
        lambda: AutomodelStrategy(expert_parallel_size=RANKS),
    ),
    "`AutomodelStrategy()`, plain parameters a rank": (Local, AutomodelStrategy),
    "`AutomodelStrategy(data_parallel='ddp')`, plain parameters a rank": (
        Local,
        lambda: AutomodelStrategy(data_parallel="ddp"),
    ),
    "Lightning `DDPStrategy`, plain parameters a rank": (Local, DDPStrategy),
    "Lightning `ModelParallelStrategy`, plain parameters a rank": (LocalUnderFSDP, fsdp2),
    "the same, left out of FSDP2": (LocalBesideFSDP, fsdp2),
    "the same, DTensors on the data-parallel mesh": (Planned, fsdp2),
}


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())


def batches_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (STEPS * ACCUMULATE, 1, LENGTH)
    return list(torch.randint(mixtures.VOCABULARY, shape, generator=generator))


def one_process() -> dict[str, Tensor]:
    """Weights after training on the batches of all ranks."""
    model = mixtures.MixtureDecoder().double()
    optimizer = optimizer_of(model)
    data = [batches_of(rank) for rank in range(RANKS)]
    for step in range(STEPS):
        window = range(step * ACCUMULATE, (step + 1) * ACCUMULATE)
        losses = [mean_loss(model, batches[index]) for batches in data for index in window]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of all ranks; of experts that are plain parameters, those of each rank. A collective."""
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        if ".experts." in name and len(weight) < mixtures.NUM_EXPERTS:
            parts = [torch.empty_like(weight) for _ in range(RANKS)]
            dist.all_gather(parts, weight.contiguous())
            weight = torch.cat(parts)
        yield name, weight


def train(way: str) -> dict[str, float]:
    """On every rank: how far the weights are from one process, as a share of how far training has moved them."""
    make_module, make_strategy = WAYS[way]
    module = make_module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=make_strategy(),
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = batches_of(int(os.environ["RANK"]))
    trainer.fit(module, DataLoader(data, batch_size=None, shuffle=False))
    expected = one_process()
    started = dict(mixtures.MixtureDecoder().double().named_parameters())
    off = {"experts": 0.0, "others": 0.0}
    for name, weight in whole_weights(module.model):
        kind = "experts" if ".experts." in name else "others"
        moved = (expected[name] - started[name].detach()).norm()
        off[kind] = max(off[kind], float((weight - expected[name]).norm() / moved))
    return off


def child(case: dict[str, Any]) -> None:
    """One rank of one way."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    found = train(case["way"])
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)


def row(way: str) -> list[str]:
    """A row of the table: figures, or the last line of the error."""
    try:
        found = launch(Path(__file__), {"way": way}, RANKS, None)
    except RuntimeError as error:
        said = [
            line.split("]: ")[-1]
            for line in str(error).splitlines()
            if "Error: " in line and "ChildFailed" not in line
        ]
        return [way, f"ends: {said[-1][:160] if said else 'without an error in its output'}", ""]
    return [way, f"{found['experts']:.1e}", f"{found['others']:.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the report here too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(json.loads(arguments.child))
        return
    report = "\n".join(
        [
            f"# Ways to spread experts over {RANKS} ranks",
            "",
            *(f"- {name}: {value}" for name, value in describe_environment().items()),
            f"- command: `python benchmarks/expert_parallel_others.py {shlex.join(sys.argv[1:])}`",
            f"- float64, {mixtures.NUM_EXPERTS} experts in 2 blocks, SGD with momentum, {STEPS} steps of"
            f" {ACCUMULATE} micro-batches a rank, all of equally many label tokens",
            "- off: distance of a tensor's weights from one process, as a share of how far training has"
            " moved them; the largest of all tensors",
            "",
            table(["way", "experts off by", "other weights off by"], [row(way) for way in WAYS]),
        ]
    )
    publish(report, arguments.output)


if __name__ == "__main__":
    main()
