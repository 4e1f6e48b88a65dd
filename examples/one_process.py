"""How far a training under a strategy is from the same training in one process, in gradients and in weights.

"The truth" is a plain PyTorch loop in one process, which takes all micro-batches of all ranks of a window as
one batch. Both start from the same weights, see the same windows in the same order, and minimise the usual
mean cross-entropy.
"""

from collections.abc import Iterable
from copy import deepcopy

import lightning as L  # noqa: N812
import torch
from docstring_writer import DocstringWriter
from docstrings import DocstringDataset, collate
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader

NUM_RANKS = 2
ACCUMULATE = 4  # micro-batches of each rank in a window, of one function each
LEARNING_RATE = 5e-3


class Writer(DocstringWriter):
    """A model with a schedule that needs no Trainer, as the truth has none.

    Args:
        seed: Seed of the initial weights.
        num_steps: Optimizer steps after which the learning rate is zero.
        **size: Size of the model, see `DocstringWriter`.
    """

    def __init__(self, seed: int, num_steps: int, **size: int) -> None:
        torch.manual_seed(seed)
        super().__init__(**size)
        self.num_steps = num_steps

    def configure_model(self) -> None:
        # ModelParallelStrategy leaves the sharding to its users.
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(
            self.model, FSDPModule
        ):
            for unit in (*self.model.blocks, self.model):
                fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.AdamW(self.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def draw_windows(seed: int, num_steps: int, num_examples: int, num_ranks: int = NUM_RANKS) -> Tensor:
    """Returns the example of each step, rank and micro-batch, [steps, ranks, micro-batches]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_examples, (num_steps, num_ranks, ACCUMULATE), generator=generator)


def whole(tensors: Iterable[Tensor]) -> Tensor:
    """Returns all `tensors` as one vector. A collective if they are sharded."""
    return torch.cat(
        [(t.full_tensor() if isinstance(t, DTensor) else t).detach().flatten() for t in tensors]
    )


def relative_distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def true_gradient(writer: Writer, dataset: DocstringDataset, window: Tensor) -> Tensor:
    """Leaves the gradients of the whole window as one batch in `.grad`, and returns them as one vector."""
    writer.zero_grad()
    loss, _ = writer.token_loss(collate([dataset[index] for index in window.flatten().tolist()]))
    loss.backward()
    return whole(parameter.grad for parameter in writer.parameters())


def train_alone(writer: Writer, dataset: DocstringDataset, windows: Tensor) -> Tensor:
    """The truth: trains in this process and returns the weights."""
    [optimizer], [schedule] = writer.configure_optimizers()
    for window in windows:
        true_gradient(writer, dataset, window)
        optimizer.step()
        schedule["scheduler"].step()
    return whole(writer.parameters())


class Measure(L.Callback):
    """Compares gradients with the truth's in as many steps as there are windows, and keeps the trained weights.

    Attributes:
        errors: On rank 0, |g - g*| / |g*| by step: g is the whole gradient just before the optimizer step,
            and g* the truth's at the same weights.
        weights: All weights when training has ended.
    """

    def __init__(self, truth: Writer, dataset: DocstringDataset, windows: Iterable[Tensor]) -> None:
        self.truth = truth
        self.dataset = dataset
        self.windows = iter(windows)
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

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights = whole(pl_module.parameters())


def train(
    strategy: Strategy | str,
    writer: Writer,
    dataset: DocstringDataset,
    windows: Tensor,
    rank: int,
    measure: bool,
) -> Measure:
    """Trains under a strategy, every rank on its share of the windows; measures errors if `measure` is true."""
    measured = Measure(deepcopy(writer), dataset, windows if measure else [])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=windows.shape[1],
        strategy=strategy,
        accumulate_grad_batches=ACCUMULATE,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[measured],
    )
    sampler = windows[:, rank].flatten().tolist()
    trainer.fit(writer, DataLoader(dataset, sampler=sampler, collate_fn=collate))
    return measured
