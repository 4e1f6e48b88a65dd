"""The same model and ragged data under this strategy and under what people use now: exactness, cost, lines to write.

Each way trains a small Llama for one epoch on two CPU ranks, with the recipe of its own documentation; lines
are those of its function below. The distance of the weights is from one process that takes each window of
all ranks as one batch, relative to how far those weights moved. Ways take turns, in processes of their own;
costs are medians over rounds, per optimizer step of the second half, and on rank 0.

    pip install -c constraints.txt -e '.[examples]' accelerate==1.15.0
    python benchmarks/peers.py --output report.md
"""

import argparse
import contextlib
import inspect
import json
import os
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.strategies import ModelParallelStrategy
from llama import ByteCounter
from peak_memory import MEBIBYTE, peak, start_peak
from report import describe_environment, publish, table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_automodel import AutomodelStrategy

RANKS = 2
ROWS = 5
ACCUMULATE = 4
LENGTH = 32
VOCABULARY = 512
QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
PACKAGES = ("lightning", "accelerate", "transformers")


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of 4 to 32 tokens, padded: `input_ids` and `labels`, both [s]; -100 where there is no label."""

    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (num_rows, LENGTH), generator=generator)
        self.lengths = torch.randint(4, LENGTH + 1, (num_rows, 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(torch.arange(LENGTH) >= self.lengths[index], -100),
        }


def build_model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=VOCABULARY, **sizes)).train()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD, which hides no gradient that is wrong by a factor."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Meter:
    """Measures the second half of the optimizer steps of this rank."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.first = num_steps // 2
        self.steps = 0
        self.counter = ByteCounter()
        self.before = start_peak("cpu")

    def step(self) -> None:
        """To be called after each optimizer step; the last of both ends the measurement."""
        self.steps += 1
        if self.steps == self.first:
            self.started = process_time(), perf_counter()
        if self.steps == self.num_steps - 1:
            # Counting costs time of its own: the last step is counted, and not timed.
            measured = self.steps - self.first
            self.cpu = (process_time() - self.started[0]) / measured
            self.wall = (perf_counter() - self.started[1]) / measured
            self.counter.__enter__()
        if self.steps == self.num_steps:
            self.counter.__exit__(None, None, None)

    def found(self) -> dict[str, float]:
        return {
            "cpu": self.cpu,
            "wall": self.wall,
            "collectives": sum(self.counter.counts.values()),
            "bytes": self.counter.bytes,
            "peak": (peak("cpu") - self.before) / MEBIBYTE,
        }


# --- Ways to train: what a user writes --------------------------------------------------------------------------------


def one_process(data: Rows, layers: int, on_step: Callable[[], None]) -> nn.Module:
    model = build_model(layers)
    optimizer = build_optimizer(model)
    for batch in DataLoader(data, RANKS * ROWS * ACCUMULATE):
        logits = model(batch["input_ids"]).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step()
    return model


class Module(L.LightningModule):
    """The model, with its own loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = build_model(layers)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self)


class ShardedModule(Module):
    """Shards by hand, as `ModelParallelStrategy` leaves it to its users."""

    def configure_model(self) -> None:
        for block in self.model.model.layers:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class AfterStep(L.Callback):
    """Calls `on_step` after each optimizer step."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.on_step = on_step
        self.last = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step > self.last:
            self.last = trainer.global_step
            self.on_step()


def fit(strategy: Any, module: Module, data: Rows, on_step: Callable[[], None]) -> nn.Module:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[AfterStep(on_step)],
        **QUIET,
    )
    # Lightning's sampler shuffles: rows lie so that it meets them in the order that the other ways have.
    shuffled = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(torch.utils.data.Subset(data, shuffled.argsort().tolist()), ROWS))
    return module.model


def automodel_fsdp2(data: Rows, layers: int, on_step: Callable[[], None]) -> nn.Module:
    return fit(AutomodelStrategy(label_shift=1), Module(layers), data, on_step)


def automodel_ddp(data: Rows, layers: int, on_step: Callable[[], None]) -> nn.Module:
    return fit(AutomodelStrategy(label_shift=1, data_parallel="ddp"), Module(layers), data, on_step)


def lightning_ddp(data: Rows, layers: int, on_step: Callable[[], None]) -> nn.Module:
    return fit("ddp", Module(layers), data, on_step)


def lightning_model_parallel(data: Rows, layers: int, on_step: Callable[[], None]) -> nn.Module:
    return fit(ModelParallelStrategy(RANKS, 1), ShardedModule(layers), data, on_step)


def accelerate(data: Rows, layers: int, on_step: Callable[[], None]) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = build_model(layers)
    model, optimizer, loader = accelerator.prepare(model, build_optimizer(model), DataLoader(data, ROWS))
    batches = iter(loader)
    for first in range(0, len(loader), ACCUMULATE):
        window = [next(batches) for _ in range(min(ACCUMULATE, len(loader) - first))]
        counted = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in window]).sum()
        num_items = accelerator.gather(counted).sum().item()
        for index, batch in enumerate(window):
            is_last = index == len(window) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                logits = model(batch["input_ids"]).logits
                labels = batch["labels"][:, 1:].flatten()
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum") / num_items
                # Accelerate divides by the steps of accumulation, DDP by the ranks.
                accelerator.backward(loss * ACCUMULATE * accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
        on_step()
    return accelerator.unwrap_model(model)


def hugging_face_trainer(data: Rows, layers: int, on_step: Callable[[], None]) -> nn.Module:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class AfterTrainerStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step()

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(data)

    model = build_model(layers)
    optimizer = build_optimizer(model)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=0.0,
        average_tokens_across_devices=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = InOrder(
        model, arguments, train_dataset=data, optimizers=(optimizer, schedule), callbacks=[AfterTrainerStep]
    )
    trainer.train()
    return model


WAYS: dict[str, tuple[str, Callable[..., nn.Module], tuple[Any, ...]]] = {
    "automodel-fsdp2": ("`AutomodelStrategy()`", automodel_fsdp2, (fit, Module)),
    "automodel-ddp": ('`AutomodelStrategy(data_parallel="ddp")`', automodel_ddp, (fit, Module)),
    "lightning-ddp": ('Lightning `"ddp"`', lightning_ddp, (fit, Module)),
    "model-parallel": (
        "Lightning `ModelParallelStrategy`",
        lightning_model_parallel,
        (fit, Module, ShardedModule),
    ),
    "accelerate": ("Accelerate, its recipe for ragged data", accelerate, ()),
    "trainer": ("Hugging Face `Trainer`", hugging_face_trainer, ()),
}
"""Title, function, and what else its user writes."""


# --- Running them -----------------------------------------------------------------------------------------------------


def child(way: str, num_rows: int, layers: int, path: Path) -> None:
    """One rank of one way; rank 0 leaves its measurements and weights at `path`."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    train = one_process if way == "one" else WAYS[way][1]
    meter = Meter(-(-num_rows // (RANKS * ROWS * ACCUMULATE)))
    model = train(Rows(num_rows), layers, meter.step)
    weights = torch.cat(
        [(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in model.parameters()]
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"weights": weights.double(), "steps": meter.steps, **meter.found()}, path)
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(way: str, num_rows: int, layers: int) -> dict[str, Any]:
    """Run one way in new processes."""
    ranks = 1 if way == "one" else RANKS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.pt"
        launch = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        )
        own = ["--child", json.dumps([way, num_rows, layers, str(path)])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [sys.executable, *launch, __file__, *own],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{way}, {num_rows} rows:\n{done.stderr[-4000:]}")
        return torch.load(path)


def lines_to_write(*parts: Any) -> int:
    """Lines of code, without signatures' and docstrings' blank ones."""
    return sum(1 for part in parts for line in inspect.getsource(part).splitlines() if line.strip())


def compare(layers: int, num_rows: int, rounds: int) -> str:
    """Two tables: exactness with as many rows as make whole windows and with three more; costs."""
    start = torch.cat([p.detach().flatten() for p in build_model(layers).parameters()]).double()
    distances: dict[str, list[str]] = {way: [] for way in WAYS}
    for rows in (num_rows, num_rows + 3):
        reference = measure("one", rows, layers)["weights"]
        for way in WAYS:
            found = measure(way, rows, layers)["weights"]
            distance = ((found - reference).norm() / (reference - start).norm()).item()
            distances[way].append(f"{distance:.1e}" if distance < 1e-4 else f"{distance:.1%}")
    header = ["", f"weights off, {num_rows} rows", f"{num_rows + 3} rows"]
    if not rounds:
        return table(header, [[title, *distances[way]] for way, (title, _, _) in WAYS.items()])
    costs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        turn = number % len(WAYS)
        for way in [*WAYS][turn:] + [*WAYS][:turn]:
            costs[way].append(measure(way, num_rows, layers))
    rows = []
    for way, (title, function, parts) in WAYS.items():
        ratios = [
            own["cpu"] / other["cpu"] for own, other in zip(costs[way], costs["accelerate"], strict=True)
        ]
        middle = {name: median(cost[name] for cost in costs[way]) for name in ("cpu", "wall", "peak")}
        rows.append(
            [
                title,
                *distances[way],
                f"{1e3 * middle['cpu']:.0f}",
                f"{median(ratios):.2f}",
                f"{1e3 * middle['wall']:.0f}",
                f"{costs[way][0]['collectives']}, {costs[way][0]['bytes'] / 1e6:.1f} MB",
                f"{middle['peak']:.0f}",
                str(lines_to_write(function, *parts)),
            ]
        )
    header += [
        *["CPU ms a step", "of Accelerate's"],
        *["wall ms", "collectives a step", "peak, MiB", "lines"],
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4, help="of the Llama (%(default)s)")
    parser.add_argument("--rows", type=int, default=1200, help="of the data: whole windows (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each way for its costs, 0: none (%(default)s)"
    )
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    if args.rows % (RANKS * ROWS * ACCUMULATE):
        parser.error(f"--rows must be a multiple of {RANKS * ROWS * ACCUMULATE}, got {args.rows}.")
    head = [
        "# Beside what people use now",
        "",
        *(f"- {name}: {value}" for name, value in describe_environment(*PACKAGES).items()),
        f"- command: `{shlex.join(['python', 'benchmarks/peers.py', *sys.argv[1:]])}`",
        f"- {RANKS} ranks, gloo on loopback, float32, {ROWS} rows a micro-batch, accumulation {ACCUMULATE},"
        " SGD",
    ]
    report = "\n".join([*head, "", compare(args.layers, args.rows, args.rounds)])
    publish(report, args.output)


if __name__ == "__main__":
    if "--child" in sys.argv:
        way, num_rows, layers, path = json.loads(sys.argv[-1])
        child(way, num_rows, layers, Path(path))
    else:
        main()
