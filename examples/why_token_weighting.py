"""Why token weighting: one model trained four ways on the same ragged data, and how far each is from the truth.

    python examples/why_token_weighting.py          # five seeds, about four minutes on two cores
    python examples/why_token_weighting.py --quick  # one seed and few steps, to see that it works
    python examples/why_token_weighting.py --mixed  # answers of one to 512 bytes, as chats have

The model writes docstrings of the standard library; only their bytes carry labels, the prompts carry none.
Two ranks accumulate four micro-batches of one function each. The truth is a plain PyTorch loop in one
process that takes all eight functions of such a window as one batch. All ways start from the same weights,
see the same windows in the same order, and minimise the usual mean cross-entropy.

The gradient error of a step is |g - g*| / |g*|, measured for the first seed. g is the whole gradient just
before the optimizer step, and g* the truth's *at the same weights*, so it is the error of one step without
those of earlier steps. Where all micro-batches hold equally many labels, a mean of means is the token mean,
and all ways agree. With `--mixed` each docstring ends after a
part of it, short ones being as likely as long ones: the more the numbers of labels differ, the more it
matters.
"""

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, median

import matplotlib
import torch
import torch.distributed as dist
from docstrings import DocstringData, DocstringDataset, collate
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from one_process import NUM_RANKS, Writer, draw_windows, relative_distance, train, train_alone
from torch import Tensor
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

SIZE = {"width": 64, "num_layers": 2}
DDP = "Lightning DDPStrategy"
FSDP2 = "Lightning ModelParallelStrategy"
OURS = "AutomodelStrategy"
TRUTH = "the truth"
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    DDP: DDPStrategy,
    FSDP2: partial(ModelParallelStrategy, data_parallel_size=NUM_RANKS, tensor_parallel_size=1),
    OURS: AutomodelStrategy,
}
COLORS = {
    DDP: "#D55E00",
    FSDP2: "#D55E00",
    OURS: "#0072B2",
}  # vermillion and blue: no colour vision mixes them up


def cut(dataset: DocstringDataset) -> None:
    """Ends each docstring after 1 to all of its bytes, the logarithm of their number being uniform."""
    random = Random(0)
    for index, example in enumerate(dataset.examples):
        length = max(1, int((len(example.docstring) + 1) ** random.random()))
        dataset.examples[index] = example._replace(docstring=example.docstring[:length])


def draw(seed: int, num_steps: int, data: DocstringData) -> tuple[Writer, Tensor]:
    """Returns the initial model and the windows of a seed."""
    return Writer(seed, num_steps, **SIZE), draw_windows(seed, num_steps, len(data.train_set))


def train_rank(rank: int, folder: Path, data: DocstringData, num_seeds: int, num_steps: int) -> None:
    """One rank of all trainings under strategies; rank 0 saves gradient errors and trained weights."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that the ranks have been started
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting_point", rank=rank, world_size=NUM_RANKS
    )
    errors: dict[str, list[float]] = {}
    weights: dict[str, list[Tensor]] = {name: [] for name in STRATEGIES}
    for seed in range(num_seeds):
        for name, make_strategy in STRATEGIES.items():
            writer, windows = draw(seed, num_steps, data)
            measured = train(make_strategy(), writer, data.train_set, windows, rank, measure=seed == 0)
            weights[name].append(measured.weights)
            errors.setdefault(name, measured.errors)
            if rank == 0:
                print(f"seed {seed}: trained by {name}", flush=True)
    if rank == 0:
        torch.save((errors, weights), folder / "results.pt")
    dist.destroy_process_group()


@torch.no_grad()
def validation_loss(weights: Tensor, dataset: DocstringDataset) -> float:
    """Returns the mean over all label bytes of the held-back functions, in nats."""
    writer = Writer(0, 1, **SIZE)
    vector_to_parameters(weights, writer.parameters())
    scored = [writer.token_loss(batch) for batch in DataLoader(dataset, collate_fn=collate)]
    return float(sum(loss * count for loss, count in scored) / sum(count for _, count in scored))


def spread(values: list[float], digits: str) -> str:
    return f"{mean(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def draw_picture(errors: dict[str, list[float]], excess: dict[str, list[float]], path: Path) -> None:
    """Draws the gradient errors by step, and by seed the validation losses minus the truth's."""
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", width_ratios=[3, 2])
    figure.suptitle(
        "Same model, same data, same windows: which gradient is that of one big batch?", weight="bold"
    )
    for place, name in enumerate(STRATEGIES):
        color = COLORS[name]
        steps = range(1, len(errors[name]) + 1)
        # Lightning's two curves overlap: a thin dashed line on a thick one shows both.
        dashed = {"color": "black", "linestyle": "--", "linewidth": 1}
        left.semilogy(steps, errors[name], **dashed if name == FSDP2 else {"color": color, "linewidth": 3.5})
        right.plot([place] * len(excess[name]), excess[name], "o", color=color, alpha=0.6)
        right.plot([place - 0.25, place + 0.25], [mean(excess[name])] * 2, color=color, linewidth=3.5)
    for name, text in {
        DDP: f"{DDP} (solid) and\n{FSDP2} (dashed): median {{:.0%}}",
        OURS: f"{OURS}: median {{:.5%}}, float32 rounding",
    }.items():
        left.text(
            1, max(errors[name]) * 2, text.format(median(errors[name])), color=COLORS[name], weight="bold"
        )
    left.set(title="Gradient error, |g - g*| / |g*|", xlabel="optimizer step", ylim=(1e-8, 100))
    left.grid(axis="y", alpha=0.3)
    right.set(
        title="Final validation loss above that of\none big batch: seeds and their mean",
        ylabel="nats per byte",
    )
    right.axhline(0, color="black", linewidth=1, zorder=0)
    right.set_xticks(range(3), ["Lightning\nDDP", "Lightning\nFSDP2", "Automodel-\nStrategy"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    args = parse_arguments()
    data = DocstringData("outputs/corpus", max_docstring_bytes=512, num_val_examples=128)
    data.prepare_data()
    data.setup("fit")
    if args.mixed:
        cut(data.train_set)
        cut(data.val_set)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            train_rank, (Path(folder), data, args.seeds, args.steps), nprocs=NUM_RANKS
        )
        errors, weights = torch.load(Path(folder) / "results.pt")
    weights[TRUTH] = []
    for seed in range(args.seeds):
        writer, windows = draw(seed, args.steps, data)
        weights[TRUTH].append(train_alone(writer, data.train_set, windows))

    losses = {name: [validation_loss(one, data.val_set) for one in weights[name]] for name in weights}
    excess = {
        name: [loss - truth for loss, truth in zip(losses[name], losses[TRUTH], strict=True)]
        for name in weights
    }
    print(
        "| trained by | gradient error, median | largest | weights' distance | validation loss | less the"
        " truth's |"
    )
    print("|---|---|---|---|---|---|")
    for name in weights:
        steps = errors.get(name, [0.0])
        distance = mean(map(relative_distance, weights[name], weights[TRUTH]))
        numbers = f"{median(steps):.1e} | {max(steps):.1e} | {distance:.1e}"
        print(f"| {name} | {numbers} | {spread(losses[name], '.4f')} | {spread(excess[name], '+.4f')} |")
    draw_picture(errors, excess, args.output)
    print(f"\nPicture: {args.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="of weights and data order (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=60, help="optimizer steps of each training (%(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/why_token_weighting.png"), help="(%(default)s)"
    )
    parser.add_argument(
        "--mixed", action="store_true", help="end docstrings anywhere, so that many are short"
    )
    parser.add_argument("--quick", action="store_true", help="the same as --seeds 1 --steps 4")
    args = parser.parse_args()
    return argparse.Namespace(**vars(args) | {"seeds": 1, "steps": 4}) if args.quick else args


if __name__ == "__main__":
    main()
