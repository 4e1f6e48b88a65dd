"""Windows of ragged micro-batches in a plain PyTorch loop: on the ranks with the public functions, and in one process.

`counts[w][r][m]` is the number of label tokens of micro-batch m on rank r in window w. Everything is
float64, and a mean over no token is NaN, as it is for users.

Shapes: t tokens of a micro-batch, d features, c classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_automodel import clip_gradients, get_sync_ctx, reduce_loss, rescale_gradients
from tests.trainer.exactness import TOLERANCE as TOLERANCE
from tests.trainer.exactness import full, weight_error

error = weight_error
WIDTH = 5
CLASSES = 3
LEARNING_RATE = 0.3
MOMENTUM = 0.9

Counts = list[list[list[int]]]
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Blocks, a gate with a single output (so that all ranks but the first hold an empty shard of it) and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = torch.tanh(block(features))
        return self.head(features * self.gate(features))  # [t, c]


@dataclass(frozen=True)
class Outcome:
    """What a loop left behind: norms before clipping, and summed losses with their denominators, by window."""

    weights: dict[str, Tensor]
    norms: list[float]
    losses: list[tuple[float, int]]


def one_root(net: Net) -> nn.Module:
    """The whole net is one FSDP2 unit."""
    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def nested(net: Net) -> nn.Module:
    """Blocks are units below the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def several_roots(net: Net) -> nn.Module:
    """The net itself is a plain container of FSDP2 roots."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for root in (*net.blocks, net.gate, net.head):
        fully_shard(root, mesh=mesh)
    return net


def hybrid(net: Net) -> nn.Module:
    """Two replicas of a net with nested units."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def ddp(net: Net) -> nn.Module:
    """A copy on every rank."""
    return DistributedDataParallel(net)


LAYOUTS: dict[str, Callable[[Net], nn.Module]] = {
    layout.__name__: layout for layout in (one_root, nested, several_roots, hybrid, ddp)
}


class Holder(nn.Module):
    """A plain module above whatever is distributed, as a LightningModule is."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"net": LAYOUTS[layout](Net())})

    def forward(self, features: Tensor) -> Tensor:
        return self.inner["net"](features)


def micro_batch(window: int, rank: int, step: int, count: int) -> Batch:
    """`count` labelled tokens among ignored ones: features [t, d] and labels [t]."""
    generator = torch.Generator().manual_seed(10_000 * window + 100 * rank + step)
    num_tokens = count + 1 + step
    features = torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (num_tokens,), generator=generator)
    labels[count:] = -100
    return features, labels


def train_on_ranks(layout: str, counts: Counts, clip_norm: float, defer: bool | str) -> Outcome:
    """Runs on every rank."""
    model = Holder(layout)
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    norms = []
    losses = []
    for window, by_rank in enumerate(counts):
        store: list[Tensor] = []
        for step, count in enumerate(by_rank[rank]):
            features, labels = micro_batch(window, rank, step, count)
            with get_sync_ctx(model, step == len(by_rank[rank]) - 1, defer):
                loss = F.cross_entropy(model(features), labels)
                (loss * count).backward()
            store.append(torch.where(torch.tensor(count > 0), loss.detach() * count, 0.0))
        rescale_gradients(model, torch.tensor(sum(by_rank[rank])), dist.group.WORLD)
        norms.append(clip_gradients(model, clip_norm).item())
        loss_sum, denominator = reduce_loss(store, sum(by_rank[rank]), dp_group=dist.group.WORLD)
        losses.append((loss_sum.item(), denominator.item()))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(full_weights(model), norms, losses)


def train_plainly(counts: Counts, clip_norm: float) -> Outcome:
    """The same windows in one process: all tokens of a window are one batch."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    norms = []
    losses = []
    for window, by_rank in enumerate(counts):
        batches = [
            micro_batch(window, r, m, n) for r, steps in enumerate(by_rank) for m, n in enumerate(steps)
        ]
        num_label_tokens = sum(map(sum, by_rank))
        features, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = F.cross_entropy(net(features), labels, reduction="sum")
        (loss / max(num_label_tokens, 1)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip_norm).item())
        losses.append((loss.item(), num_label_tokens))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(full_weights(net), norms, losses)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights by their names in `Net`; a collective where they are sharded."""
    return {
        name.removeprefix("inner.net.").removeprefix("module."): full(parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }
