"""Compares the first steps of a model under this strategy, and under Lightning's DDP, with those in one process.

    python examples/check_your_model.py

To check yours, replace `Writer`, `rows` and `padded` (which `(x, y)` batches do not need). Give the Trainer and
`AutomodelStrategy` the options that you train with, as `label_shift=1` for a Hugging Face model. One process takes each
window of all ranks as one batch; for a GAN it must accumulate too (docs/how_it_works.md). All train in evaluation mode:
no dropout, and BatchNorm keeps its statistics.
"""

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

from lightning_automodel import AutomodelStrategy

RANKS, ROWS, ACCUMULATE, STEPS = 2, 2, 4, 3  # ROWS: of a micro-batch of one rank
Row = dict[str, Tensor]  # input_ids and labels, both [s]


class Writer(L.LightningModule):
    """A small recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.recurrent = nn.GRU(64, 64, batch_first=True)

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        states, _ = self.recurrent(self.embedding(batch["input_ids"]))
        return F.cross_entropy(self.head(states).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def rows() -> list[Row]:
    """Returns a row for each method of str: its name is the prompt, without labels, its docstring the answer."""
    found = []
    for name in dir(str):
        prompt, answer = name.encode(), (getattr(str, name).__doc__ or "").encode()
        ids = torch.tensor(list(prompt + answer))
        labels = ids[1:].clone()
        labels[: len(prompt) - 1] = -100
        found.append({"input_ids": ids[:-1], "labels": labels})
    return found


def padded(batch: list[Row]) -> Row:
    """Pads rows at their ends, to [b, s]."""
    values = {"input_ids": 0, "labels": -100}
    return {key: pad_sequence([row[key] for row in batch], True, value) for key, value in values.items()}


class InOrder(L.LightningDataModule):
    """Gives ranks their rows in order. Lightning's own sampler would shuffle them, but only on several ranks.

    Args:
        num_rows: Rows of a micro-batch.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        data, ranks = rows()[: RANKS * ROWS * ACCUMULATE * STEPS], self.trainer.world_size
        sampler = DistributedSampler(data, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=self.num_rows, sampler=sampler, collate_fn=padded)


class EvaluationMode(L.Callback):
    """Undoes Lightning's `module.train()`."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *batch: object) -> None:
        pl_module.eval()


def train(strategy: Strategy | str, devices: int, num_rows: int, accumulate: int) -> tuple[Tensor, Tensor]:
    """Returns all weights as one vector, before and after."""
    L.seed_everything(0, verbose=False)
    module = Writer()
    before = weights(module)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        precision="64-true",
        max_steps=STEPS,
        use_distributed_sampler=False,
        callbacks=[EvaluationMode()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, InOrder(num_rows))
    return before, weights(module)


def weights(module: nn.Module) -> Tensor:
    """Returns all parameters as one vector. A collective if they are sharded."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().double().flatten() for p in whole])


def main() -> None:
    before, expected = train("auto", 1, RANKS * ROWS * ACCUMULATE, 1)
    _, ours = train(AutomodelStrategy(), RANKS, ROWS, ACCUMULATE)
    _, lightnings = train("ddp", RANKS, ROWS, ACCUMULATE)
    if torch.distributed.get_rank() == 0:
        print(f"\nDistance of the weights from one process after {STEPS} steps, as a share of how far they have moved")
        for name, found in {"AutomodelStrategy": ours, "Lightning DDPStrategy": lightnings}.items():
            print(f"  {name:<22}{100 * (found - expected).norm() / (expected - before).norm():.2g} %")
        print("Expect 1e-8 % or less in float64, about 0.1 % if the loss is float32 (Hugging Face).")


if __name__ == "__main__":
    main()
