"""What every variant of a benchmark trains: one model, one optimizer, one stream of micro-batches per rank.

Shapes: b = rows of a micro-batch, s = tokens of a row, d = model width, v = vocabulary.
"""

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parameter import Parameter
from torch.utils.data import DataLoader

IGNORE_INDEX = -100
VOCABULARY_SIZE = 256
ROW_TOKENS = 16
HEAD_WIDTH = 32

Batch = dict[str, Tensor]


class Decoder(nn.Module):
    """Causal transformer, token ids [b, s] -> logits of the next token [b, s, v]; each block becomes one FSDP unit."""

    causal_mask: Tensor

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                width // HEAD_WIDTH,
                4 * width,
                dropout=0.0,
                batch_first=True,
                norm_first=True,
                bias=False,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY_SIZE, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(ROW_TOKENS)
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)  # [b, s, d]
        for block in self.blocks:
            x = block(x, src_mask=self.causal_mask, is_causal=True)
        return self.head(self.norm(x))


def mean_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the label tokens, in nats, and their number, both []."""
    logits = model(batch["input_ids"])  # [b, s, v]
    labels = batch["labels"]  # [b, s]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    return loss, (labels != IGNORE_INDEX).sum()


@dataclass(frozen=True)
class Workload:
    """Size of the model and of the run.

    Attributes:
        width: Channels of the residual stream.
        layers: Transformer blocks.
        accumulate: Micro-batches of one optimizer step, on each rank.
        batch_tokens: Tokens of a micro-batch; about half of them are label tokens.
        steps: Optimizer steps.
    """

    width: int
    layers: int
    accumulate: int
    batch_tokens: int
    steps: int

    def __post_init__(self) -> None:
        for name, multiple in (("width", HEAD_WIDTH), ("batch_tokens", ROW_TOKENS)):
            if getattr(self, name) % multiple:
                raise ValueError(f"{name} must be a multiple of {multiple}, got {getattr(self, name)}.")

    def build_model(self) -> Decoder:
        """Build the model, with the same weights in each call on each rank."""
        torch.manual_seed(0)
        return Decoder(self.width, self.layers)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum: unlike Adam, it does not hide gradients that are wrong by a factor.

        The rate is low because rounding grows with it: at 0.01, 16 steps of the plain loop in float32 end
        1.6e-3 of the way from those in float64.
        """
        return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def build_loader(self, rank: int) -> DataLoader[Batch]:
        """Random rows in which a prompt of random length carries no labels, so that counts differ everywhere."""
        generator = torch.Generator().manual_seed(1 + rank)
        shape = (self.steps * self.accumulate, self.batch_tokens // ROW_TOKENS, ROW_TOKENS)
        tokens = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
        prompt_lengths = torch.randint(4, ROW_TOKENS - 4, (*shape[:2], 1), generator=generator)
        labels = tokens.roll(-1, dims=-1).masked_fill(
            torch.arange(ROW_TOKENS) < prompt_lengths, IGNORE_INDEX
        )
        batches = [
            {"input_ids": ids, "labels": targets} for ids, targets in zip(tokens, labels, strict=True)
        ]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class DecoderModule(pl.LightningModule):
    """The workload as a LightningModule that runs unchanged under any strategy."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.model = workload.build_model()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss, num_label_tokens = mean_loss(self.model, batch)
        return {"loss": loss, "num_label_tokens": num_label_tokens}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.build_optimizer(self)


def whole_weights(parameters: list[Parameter]) -> Tensor:
    """All weights as one plain vector. A collective if they are sharded."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in parameters)
    return torch.cat([tensor.detach().reshape(-1) for tensor in whole])
