"""Why token weighting: one model trained four ways on the same ragged data, and how far each is from the truth.

    python examples/why_token_weighting.py          # five seeds, about four minutes on two cores
    python examples/why_token_weighting.py --quick  # one seed and few steps, to see that it works

The model writes docstrings of the standard library; only their bytes carry labels, the prompts carry none. Two ranks
accumulate four micro-batches of one function each. The truth is a plain PyTorch loop in one process that takes all
eight functions of such a window as one batch. All ways start from the same weights, see the same windows in the same
order, and minimise the usual mean cross-entropy.

The gradient error of a step is |g - g*| / |g*|, measured for the first seed. g is the whole gradient when the optimizer
is about to take it, and g* the truth's *at the same weights*, so it is the error of one step and not what earlier steps
have left. Where all micro-batches hold equally many labels, a mean of means is the token mean, and all ways agree
(`tests/trainer/test_exactness_negative.py`).
"""

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean, median

import lightning as L  # noqa: N812
import matplotlib
import torch
import torch.distributed as dist
from docstring_writer import DocstringWriter
from docstrings import DocstringData, DocstringDataset, collate
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

NUM_RANKS = 2
ACCUMULATE = 4  # micro-batches of each rank in a window, of one function each
LEARNING_RATE = 5e-3
DDP, FSDP2, OURS, TRUTH = "Lightning DDPStrategy", "Lightning ModelParallelStrategy", "AutomodelStrategy", "the truth"
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    DDP: DDPStrategy,
    FSDP2: partial(ModelParallelStrategy, data_parallel_size=NUM_RANKS, tensor_parallel_size=1),
    OURS: AutomodelStrategy,
}
COLORS = {DDP: "#D55E00", FSDP2: "#D55E00", OURS: "#0072B2"}  # vermillion and blue: no colour vision mixes them up


class Writer(DocstringWriter):
    """A smaller model with a schedule that needs no Trainer, as the truth has none.

    Args:
        seed: Of the initial weights.
        num_steps: Optimizer steps after which the learning rate is zero.
    """

    def __init__(self, seed: int, num_steps: int) -> None:
        torch.manual_seed(seed)
        super().__init__(width=64, num_layers=2)
        self.num_steps = num_steps

    def configure_model(self) -> None:
        # ModelParallelStrategy leaves the sharding to its users.
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.model, FSDPModule):
            for unit in (*self.model.blocks, self.model):
                fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.AdamW(self.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def draw_windows(seed: int, num_steps: int, num_examples: int) -> Tensor:
    """Returns the example of each step, rank and micro-batch, [steps, ranks, micro-batches]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_examples, (num_steps, NUM_RANKS, ACCUMULATE), generator=generator)


def true_gradient(writer: Writer, dataset: DocstringDataset, window: Tensor) -> Tensor:
    """Leaves the gradients of the whole window as one batch in `.grad`, and returns them as one vector."""
    writer.zero_grad()
    loss, _ = writer.token_loss(collate([dataset[index] for index in window.flatten().tolist()]))
    loss.backward()
    return whole(parameter.grad for parameter in writer.parameters())


def whole(tensors: Iterable[Tensor]) -> Tensor:
    """Returns all of them as one vector; shards are gathered, which is a collective."""
    return torch.cat([(t.full_tensor() if isinstance(t, DTensor) else t).detach().flatten() for t in tensors])


def train_truth(data: DocstringData, seed: int, num_steps: int) -> Tensor:
    """Trains in this process alone and returns the weights."""
    writer = Writer(seed, num_steps)
    [optimizer], [schedule] = writer.configure_optimizers()
    for window in draw_windows(seed, num_steps, len(data.train_set)):
        true_gradient(writer, data.train_set, window)
        optimizer.step()
        schedule["scheduler"].step()
    return whole(writer.parameters())


class Measure(L.Callback):
    """Compares gradients with the truth's on rank 0, of each step that a window is given for."""

    def __init__(self, dataset: DocstringDataset, windows: Iterable[Tensor]) -> None:
        self.dataset = dataset
        self.windows = iter(windows)
        self.truth = Writer(0, 1)
        self.errors: list[float] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        window = next(self.windows, None)
        if window is None:
            return
        weights = whole(pl_module.parameters())
        gradient = whole(parameter.grad for parameter in pl_module.parameters())
        if trainer.is_global_zero:
            vector_to_parameters(weights, self.truth.parameters())
            expected = true_gradient(self.truth, self.dataset, window)
            self.errors.append(relative_distance(gradient, expected))


def relative_distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def train_rank(rank: int, folder: Path, data: DocstringData, num_seeds: int, num_steps: int) -> None:
    """One rank of all trainings under strategies; rank 0 saves gradient errors and trained weights."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that the ranks have been started
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_point", rank=rank, world_size=NUM_RANKS)
    errors: dict[str, list[float]] = {}
    weights: dict[str, list[Tensor]] = {name: [] for name in STRATEGIES}
    for seed in range(num_seeds):
        windows = draw_windows(seed, num_steps, len(data.train_set))
        loader = DataLoader(data.train_set, sampler=windows[:, rank].flatten().tolist(), collate_fn=collate)
        for name, make_strategy in STRATEGIES.items():
            measure = Measure(data.train_set, windows if seed == 0 else [])
            trainer = L.Trainer(
                accelerator="cpu",
                devices=NUM_RANKS,
                strategy=make_strategy(),
                accumulate_grad_batches=ACCUMULATE,
                max_epochs=1,
                use_distributed_sampler=False,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[measure],
            )
            writer = Writer(seed, num_steps)
            trainer.fit(writer, loader)
            weights[name].append(whole(writer.parameters()))
            errors.setdefault(name, measure.errors)
            if rank == 0:
                print(f"seed {seed}: trained by {name}", flush=True)
    if rank == 0:
        torch.save((errors, weights), folder / "results.pt")
    dist.destroy_process_group()


@torch.no_grad()
def validation_loss(weights: Tensor, dataset: DocstringDataset) -> float:
    """Returns the mean over all label bytes of the held-back functions, in nats."""
    writer = Writer(0, 1)
    vector_to_parameters(weights, writer.parameters())
    scored = [writer.token_loss(batch) for batch in DataLoader(dataset, collate_fn=collate)]
    return float(sum(loss * count for loss, count in scored) / sum(count for _, count in scored))


def spread(values: list[float], digits: str) -> str:
    return f"{mean(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def draw(errors: dict[str, list[float]], excess: dict[str, list[float]], path: Path) -> None:
    """Draws the gradient errors by step, and by seed the validation losses less the truth's."""
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", width_ratios=[3, 2])
    figure.suptitle("Same model, same data, same windows: which gradient is that of one big batch?", weight="bold")
    for place, name in enumerate(STRATEGIES):
        color, steps = COLORS[name], range(1, len(errors[name]) + 1)
        # Lightning's two lie one upon the other: a thin dashed line on a thick one shows both.
        dashed = {"color": "black", "linestyle": "--", "linewidth": 1}
        left.semilogy(steps, errors[name], **dashed if name == FSDP2 else {"color": color, "linewidth": 3.5})
        right.plot([place] * len(excess[name]), excess[name], "o", color=color, alpha=0.6)
        right.plot([place - 0.25, place + 0.25], [mean(excess[name])] * 2, color=color, linewidth=3.5)
    for name, text in {
        DDP: f"{DDP} (solid) and\n{FSDP2} (dashed): median {{:.0%}}",
        OURS: f"{OURS}: median {{:.5%}}, float32 rounding",
    }.items():
        left.text(1, max(errors[name]) * 2, text.format(median(errors[name])), color=COLORS[name], weight="bold")
    left.set(title="Gradient error, |g - g*| / |g*|", xlabel="optimizer step", ylim=(1e-8, 100))
    left.grid(axis="y", alpha=0.3)
    right.set(title="Final validation loss above that of\none big batch: seeds and their mean", ylabel="nats per byte")
    right.axhline(0, color="black", linewidth=1, zorder=0)
    right.set_xticks(range(3), ["Lightning\nDDP", "Lightning\nFSDP2", "Automodel-\nStrategy"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    args = parse_arguments()
    data = DocstringData("outputs/corpus", max_docstring_bytes=512, num_val_examples=128)
    data.prepare_data()
    data.setup("fit")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_rank, (Path(folder), data, args.seeds, args.steps), nprocs=NUM_RANKS)
        errors, weights = torch.load(Path(folder) / "results.pt")
    weights[TRUTH] = [train_truth(data, seed, args.steps) for seed in range(args.seeds)]

    losses = {name: [validation_loss(one, data.val_set) for one in weights[name]] for name in weights}
    excess = {name: [loss - truth for loss, truth in zip(losses[name], losses[TRUTH], strict=True)] for name in weights}
    print("| trained by | gradient error, median | largest | weights' distance | validation loss | less the truth's |")
    print("|---|---|---|---|---|---|")
    for name in weights:
        steps = errors.get(name, [0.0])
        distance = mean(map(relative_distance, weights[name], weights[TRUTH]))
        numbers = f"{median(steps):.1e} | {max(steps):.1e} | {distance:.1e}"
        print(f"| {name} | {numbers} | {spread(losses[name], '.4f')} | {spread(excess[name], '+.4f')} |")
    draw(errors, excess, args.output)
    print(f"\nPicture: {args.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="of weights and data order (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each training (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/why_token_weighting.png"), help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="the same as --seeds 1 --steps 4")
    args = parser.parse_args()
    return argparse.Namespace(**vars(args) | {"seeds": 1, "steps": 4}) if args.quick else args


if __name__ == "__main__":
    main()
