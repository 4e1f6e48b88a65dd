"""A small decoder-only transformer on bytes, and the LightningModule that trains it to write docstrings.

Shapes: b = examples in a micro-batch, s = sequence length, d = model width, h = heads, e = d / h, v =
vocabulary.
"""

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from docstrings import IGNORE_INDEX, VOCABULARY_SIZE
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from one_cycle import adamw_one_cycle
from torch import Tensor, nn
from torchmetrics import MeanMetric


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding: turns each pair of channels by an angle that grows with the position.

    Args:
        x: Queries or keys, [b, h, s, e].
    """
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies  # [s, e / 2]
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Block(nn.Module):
    """Pre-norm causal attention and feed-forward layer, [b, s, d] -> [b, s, d]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.RMSNorm(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))  # [b, s, 3, h, e]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [b, h, s, e]
        # Padding is at the end, where a causal mask already hides it from every real position.
        attended = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(x)


class ByteTransformer(nn.Module):
    """Decoder-only transformer, token ids [b, s] -> logits of the next token [b, s, v]."""

    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY_SIZE, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)  # [b, s, d]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class DocstringWriter(L.LightningModule):
    """Trains only on the docstring bytes, and runs unchanged under any strategy.

    Args:
        width: Channels of the residual stream.
        num_layers: Transformer blocks; each becomes one FSDP unit.
        num_heads: Attention heads; must divide `width`.
        learning_rate: Peak of the schedule, reached after a tenth of the optimizer steps.
    """

    def __init__(
        self, width: int = 128, num_layers: int = 4, num_heads: int = 4, learning_rate: float = 5e-3
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = ByteTransformer(width, num_layers, num_heads)
        self.val_loss = MeanMetric()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)

    def token_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the mean loss over the label tokens, and their number."""
        logits = self(batch["input_ids"])  # [b, s, v]
        labels = batch["labels"]  # [b, s]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        return loss, (labels != IGNORE_INDEX).sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss, num_label_tokens = self.token_loss(batch)
        return {"loss": loss, "num_label_tokens": num_label_tokens}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, num_label_tokens = self.token_loss(batch)
        self.val_loss.update(loss, weight=num_label_tokens)
        self.log("val/loss", self.val_loss, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return adamw_one_cycle(self, self.learning_rate)
