"""A user's program with every public name and annotations throughout: `mypy --strict` finds nothing in it, and it runs.

mypy checks it beside the package (pyproject.toml), and `.ci/wheel` beside an installed wheel, as a user
would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypedDict

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

import lightning_automodel
from lightning_automodel import (
    AutomodelStrategy,
    DistInfo,
    EvaluationLoss,
    ExactnessCheck,
    FirstRankPerNode,
    ModelExport,
    StepMonitor,
    StepReport,
    TrainingReport,
    barrier_and_log,
    clip_gradients,
    context_parallel_attention,
    destroy_global_state,
    dispatch_tokens,
    dp_eval_sample_shard,
    get_local_rank_preinit,
    get_local_world_size_preinit,
    get_rank_safe,
    get_sync_ctx,
    get_world_size_safe,
    initialize_distributed,
    reduce_loss,
    rescale_gradients,
    spread_experts,
    token_loss,
)
from lightning_automodel.checkpoint import CheckpointError, export_hugging_face

VOCABULARY = 17


class Batch(TypedDict):
    """What the loader yields, [b, s] each."""

    input_ids: Tensor
    labels: Tensor


class Sequences(Dataset[Batch]):
    """Ragged sequences of random tokens, padded, with -100 where there is no label."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Batch:
        ids = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": torch.where(torch.arange(8) <= index % 8, ids, -100)}


class Attention(nn.Module):
    """One head over slices of a sequence."""

    def forward(self, hidden: Tensor) -> Tensor:
        heads = hidden.unsqueeze(1)  # [b, h, s, d]
        mixed: Tensor = context_parallel_attention(heads, heads, heads)
        return mixed.squeeze(1)


class Model(pl.LightningModule):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.attention = Attention()
        self.head = nn.Linear(8, VOCABULARY)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The mean loss and its count."""
        hidden = self.attention(self.embedding(batch["input_ids"]))
        loss_sum, count = token_loss(hidden, self.head, batch["labels"])
        return {"loss": loss_sum / count.clamp(min=1), "num_label_tokens": count}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The same."""
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any."""
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def spread(layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """What `configure_model` of a mixture of experts does."""
    for layer in layers:
        spread_experts(layer, mesh["expert_parallel"], names=["up", "down"])


def mixed(tokens: Tensor, scores: Tensor, up: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """What the forward of such a mixture does."""

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([part @ own for part, own in zip(rows.split(counts), up, strict=True)])

    weights, chosen = scores.topk(2)
    return dispatch_tokens(tokens, chosen, weights, scores.shape[1], compute, mesh)


def count(batch: Batch) -> Tensor:
    """A function for `count_label_tokens`."""
    return (batch["labels"] != -100).sum()


def lightning_program(directory: Path, devices: int) -> float:
    """Trains and evaluates; the last step's loss."""
    strategy = AutomodelStrategy(
        data_parallel="fsdp2", count_label_tokens=count, auto_wrap_policy={Attention}
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        accumulate_grad_batches=2,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=directory,
        callbacks=[
            StepMonitor(every_n_steps=1),
            EvaluationLoss(perplexity="{stage}_perplexity"),
            ExactnessCheck(steps=1),
            ModelExport("exported", dtype="bfloat16", prefix=""),
        ],
    )
    trainer.fit(Model(), DataLoader(Sequences(), batch_size=2), DataLoader(Sequences(), batch_size=2))
    report: StepReport | None = strategy.last_step
    described: dict[str, object] = strategy.describe()
    assert report is not None
    assert "mesh" in described
    assert trainer.callback_metrics["val_perplexity"] > 1
    return report.loss.item()


def report_and_export(directory: Path, module: pl.LightningModule) -> TrainingReport:
    """What needs plotly, and a Hugging Face model."""
    try:
        export_hugging_face(module, directory / "exported", dtype=torch.bfloat16)
    except CheckpointError as error:
        print(error)
    return TrainingReport(directory / "report.html")


def plain_program() -> float:
    """The same in a plain loop; the loss of its last step."""
    info: DistInfo = initialize_distributed("gloo", timeout_minutes=1)
    with FirstRankPerNode() as is_first:
        barrier_and_log(f"rank {info.rank} of {info.world_size}, first: {is_first}")
    local: tuple[int, int] = get_local_rank_preinit(), get_local_world_size_preinit()
    assert local[0] < local[1]
    assert get_rank_safe() < get_world_size_safe()
    shard: tuple[int, int] | None = dp_eval_sample_shard("ddp", info.rank, info.world_size)
    assert shard in ((info.rank, info.world_size), None)
    model = nn.Linear(8, VOCABULARY)
    group = dist.group.WORLD
    losses: list[Tensor] = []
    batches: Iterator[Batch] = iter(DataLoader(Sequences(), batch_size=2))
    tokens = torch.tensor(0)
    for is_last in (False, True):
        batch = next(batches)
        context: AbstractContextManager[None] = get_sync_ctx(model, is_last, defer_fsdp_grad_sync=True)
        with context:
            logits = model(F.one_hot(batch["input_ids"] % 8, 8).float())
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            torch.autograd.backward(loss)
        losses.append(loss.detach())
        tokens += count(batch)
    rescale_gradients(model, tokens, group)
    norm: Tensor = clip_gradients(model, 1.0)
    assert norm.item() > 0
    total, denominator = reduce_loss(losses, tokens, dp_group=group)
    destroy_global_state()
    return (total / denominator).item()


if __name__ == "__main__":
    import sys

    # After `import lightning_automodel` alone.
    assert lightning_automodel.callbacks.StepMonitor is StepMonitor
    print(f"{lightning_automodel.__file__}: {lightning_program(Path(sys.argv[2]), int(sys.argv[1])):.3f}")
    if "plain" in sys.argv:
        print(f"plain: {plain_program():.3f}")
