"""The module that the search trains, its data and its losses: plain torch, alike on ranks and in one process.

Shapes: b rows, s positions, d width, v vocabulary.
"""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.search.cases import Case

VOCABULARY, WIDTH = 7, 5  # odd, so that shards on two ranks are uneven
IGNORED = -100


class Block(nn.Module):
    """A residual block that mixes each position with the mean of those before it; counts its forwards."""

    def __init__(self, output: str, counter: str | None) -> None:
        super().__init__()
        self.output, self.counts = output, counter is not None
        self.linear = nn.Linear(WIDTH, WIDTH)
        if counter is not None:
            self.register_buffer("num_forwards", torch.zeros(()), persistent=counter == "persistent")

    def forward(self, hidden: Any) -> Any:
        if not isinstance(hidden, Tensor):
            hidden = hidden["hidden"] if isinstance(hidden, dict) else hidden[0]
        positions = torch.arange(1, hidden.shape[1] + 1).view(1, -1, 1)
        new = hidden + torch.tanh(self.linear(hidden + hidden.cumsum(dim=1) / positions))  # [b, s, d]
        if self.counts:
            new = new * (1 + 0.05 * self.num_forwards)
            if self.training:
                self.num_forwards += 1
        return {"tensor": new, "tuple": (new, None), "dict": {"hidden": new, "name": "block"}}[self.output]


def plain(hidden: Any) -> Tensor:
    """The tensor that a block has returned."""
    if isinstance(hidden, Tensor):
        return hidden
    return hidden["hidden"] if isinstance(hidden, dict) else hidden[0]


class Net(nn.Module):
    """Embedding, four blocks in a container, head, and parts that a case asks for.

    Parts: "tied" head; a "scalar" and a "vector" of the root itself; a "gate" with one output, of which most ranks have
    an empty shard; an "unused" layer, one that is used "sometimes", depending on the data of a rank; an "empty"
    parameter; a frozen "teacher" whose forward runs without gradients.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        made = [Block(case.output, case.counter) for _ in range(4)]
        container = case.container
        if container == "list":
            self.blocks: Any = nn.ModuleList(made[:2])
        elif container == "sequential":
            self.blocks = nn.Sequential(*made[:2])
        elif container in ("groups", "iterated", "indexed"):
            self.blocks = nn.ModuleList([nn.Sequential(*made[:2]), nn.Sequential(*made[2:])])
        elif container == "dict":
            self.blocks = nn.ModuleDict({"first": made[0], "second": made[1]})
        elif container == "dict_of_groups":
            self.blocks = nn.ModuleDict({"first": nn.Sequential(*made[:2]), "second": nn.Sequential(*made[2:])})
        elif container == "nested":
            self.blocks = nn.Sequential(nn.Sequential(*made[:2]), nn.Sequential(nn.Sequential(*made[2:])))
        elif container == "reused":
            self.blocks = nn.ModuleList([made[0], made[1], made[0]])
        else:
            self.first, self.second = made[:2]
        self.norm = {None: nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[case.norm](WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        parts = case.parts
        if "scalar" in parts:
            self.scalar = nn.Parameter(torch.ones(()))
        if "vector" in parts:
            self.vector = nn.Parameter(torch.ones(WIDTH))
        if "gate" in parts:
            self.gate = nn.Linear(WIDTH, 1)
        if "unused" in parts:
            self.unused = nn.Linear(WIDTH, WIDTH)
        if "sometimes" in parts:
            self.sometimes = nn.Linear(WIDTH, WIDTH)
        if "empty" in parts:
            self.empty = nn.Parameter(torch.ones(0, WIDTH))
        generator = torch.Generator().manual_seed(case.seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        if "tied" in parts:
            self.head.weight = self.embedding.weight
        if "teacher" in parts:
            self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        if case.frozen == "embedding":
            self.embedding.requires_grad_(False)
        elif case.frozen == "block":
            made[0].requires_grad_(False)
        elif case.frozen == "biases":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and not name.endswith("bias"))
        self.double()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[b, s, v] logits, or [b, v] of rows, and the [b, s, d] hidden states."""
        case, parts = self.case, self.case.parts
        hidden: Any = self.embedding(ids)
        if "vector" in parts:
            hidden = hidden * (1 + self.vector)
        hidden = plain(self._through_blocks(hidden))
        if "sometimes" in parts and int(ids.sum()) % 2:
            hidden = hidden + 0.3 * self.sometimes(hidden)
        if "gate" in parts:
            hidden = hidden * torch.sigmoid(self.gate(hidden))
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        logits = self.head(hidden)
        if "teacher" in parts:
            with torch.no_grad():
                target = self.teacher(hidden)
            logits = logits + 0.1 * target
        if "scalar" in parts:
            logits = logits * (1 + 0.1 * self.scalar)
        return (logits.mean(dim=1) if case.task == "rows" else logits), hidden

    def _through_blocks(self, hidden: Any) -> Any:
        container = self.case.container
        if container in ("sequential", "nested"):
            return self.blocks(hidden)
        if container == "direct":
            return self.second(self.first(hidden))
        if container == "iterated":
            for group in self.blocks:
                for block in group:
                    hidden = block(hidden)
            return hidden
        if container == "indexed":
            for index in range(2):
                hidden = self.blocks[index][1](self.blocks[index][0](hidden))
            return hidden
        if container in ("dict", "dict_of_groups"):
            return self.blocks["second"](self.blocks["first"](hidden))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Critic(nn.Module):
    """The second player of a GAN."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden).squeeze(-1)  # [b, s]


CLASS_WEIGHTS = torch.linspace(0.3, 2.0, VOCABULARY, dtype=torch.float64)


# --- Data -------------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A batch that is an object."""

    ids: Tensor
    labels: Tensor


@functools.lru_cache(maxsize=4)
def data(case: Case) -> list[list[tuple[Tensor, Tensor]]]:
    """[b, s] ids and [b, s] or [b] labels of an epoch, by rank and then by batch."""
    rng = random.Random(case.seed)
    empty_rank, empty_window = rng.randrange(case.num_ranks), rng.randrange(2)
    made = []
    for rank in range(case.num_ranks):
        made.append([])
        for index in range(case.num_batches_of(rank)):
            generator = torch.Generator().manual_seed(rng.randrange(2**31))
            # Ranks must call backward equally often: each batch has two chunks.
            shape = (rng.randint(2 if case.manual == "chunks" else 1, 3), rng.randint(2, 5))
            ids = torch.randint(VOCABULARY, shape, generator=generator)
            labels = torch.randint(VOCABULARY, shape if case.task == "tokens" else shape[:1], generator=generator)
            if case.task == "tokens":
                ignored = torch.rand(shape, generator=generator) < rng.random()
                ignored[0, -1] = False
                labels[ignored] = IGNORED
            if (
                (case.gap == "rank" and rank == empty_rank)
                or (case.gap == "window" and index // case.accumulates(0) == empty_window)
                or (case.gap == "micro_batches" and rng.random() < 0.4)
            ):
                labels[:] = IGNORED
            made[-1].append((ids, labels))
    return made


def packed(case: Case, ids: Tensor, labels: Tensor) -> Any:
    """The batch as the case wants it."""
    key = "targets" if case.tell == "key" else "labels"
    return {
        "dict": lambda: {"ids": ids, key: labels},
        "tuple": lambda: (ids, labels),
        "list": lambda: [ids, labels],
        "nested": lambda: {"inputs": {"ids": ids}, "outputs": [labels]},
        "beside": lambda: {"weight": torch.tensor(2.0), "ids": ids, key: labels, "name": "x", "index": 3},
        "object": lambda: Pair(ids, labels),
    }[case.batch]()


def unpacked(case: Case, batch: Any) -> tuple[Tensor, Tensor]:
    """Ids and labels of a batch."""
    if case.batch in ("tuple", "list"):
        return batch[0], batch[1]
    if case.batch == "nested":
        return batch["inputs"]["ids"], batch["outputs"][0]
    if case.batch == "object":
        return batch.ids, batch.labels
    return batch["ids"], batch["targets" if case.tell == "key" else "labels"]


# --- Losses -----------------------------------------------------------------------------------------------------------


def used(case: Case, labels: Tensor) -> Tensor:
    """The labels at positions that the loss looks at."""
    return labels[:, case.label_shift :] if case.task == "tokens" else labels


def count(case: Case, labels: Tensor) -> Any:
    """What the loss sums over: label tokens, or the class weights of these."""
    labels = used(case, labels)
    if case.weighted:
        return CLASS_WEIGHTS[labels[labels != IGNORED]].sum()
    return (labels != IGNORED).sum()


def cross_entropy(case: Case, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Sum or mean of the token losses."""
    labels = used(case, labels)
    if case.task == "tokens":
        logits = logits[:, : logits.shape[1] - case.label_shift]
    weight = CLASS_WEIGHTS if case.weighted else None
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), weight=weight, reduction=reduction)


def token_loss(case: Case, net: Any, ids: Tensor, labels: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """[] the loss of a batch, and [b, s, d] the hidden states behind it."""
    logits, hidden = net(ids)
    if case.forwards == 2:
        logits = logits - 0.5 * net(ids.flip(1))[0]
    return cross_entropy(case, logits, labels, reduction), hidden


def aux_loss(hidden: Tensor) -> Tensor:
    """A loss that is no mean over label tokens."""
    return 0.1 * hidden.square().mean()


# --- What a user's hooks do -------------------------------------------------------------------------------------------


def with_gradients(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that have a gradient, by name."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.grad is not None]


def weight_penalty(parameter: Tensor) -> Tensor:
    """[] a penalty on a weight."""
    return 0.05 * (parameter**4).sum()


def edit_before_step(hooks: tuple[str, ...], module: nn.Module) -> None:
    """What `on_before_optimizer_step` does to gradients."""
    with torch.no_grad():
        for _, parameter in with_gradients(module):
            if "scale_before_step" in hooks:
                parameter.grad.mul_(0.5)
            if "decay_before_step" in hooks:
                parameter.grad = parameter.grad + 0.1 * parameter
            if "clamp_before_step" in hooks:
                parameter.grad.clamp_(-0.02, 0.02)
            if "penalty_before_step" in hooks and parameter.requires_grad:
                with torch.enable_grad():
                    added = torch.autograd.grad(weight_penalty(parameter), parameter)[0]
                if isinstance(added, DTensor):  # a shard of one element comes back replicated
                    added = added.redistribute(placements=parameter.placements)
                parameter.grad += added


def edit_after_backward(hooks: tuple[str, ...], module: nn.Module) -> None:
    """What `on_after_backward` does to gradients, which are there after a window's last backward alone."""
    with torch.no_grad():
        for name, parameter in with_gradients(module):
            if "double_after_backward" in hooks:
                parameter.grad.mul_(2)
            if "drop_after_backward" in hooks and name.endswith("head.bias"):
                parameter.grad = None


def make_optimizers(case: Case, net: nn.Module, critic: nn.Module | None) -> list[torch.optim.Optimizer]:
    """One optimizer, or one for each player."""
    if case.manual == "two_optimizers":
        head = set(net.head.parameters())
        groups = [[p for p in net.parameters() if p not in head], list(head)]
    else:
        groups = [list(module.parameters()) for module in (net, critic) if module is not None]
    return [_make_optimizer(case, [p for p in group if p.requires_grad or case.thaw]) for group in groups]


def _make_optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        # A large epsilon: with a small one, rounding of tiny gradients would become large steps.
        return torch.optim.Adam(parameters, lr=0.02, eps=1e-2, weight_decay=0.01)
    groups: Any = parameters
    if case.optimizer == "groups" and len(parameters) > 1:
        groups = [{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2], "weight_decay": 0.1}]
    nesterov = case.optimizer == "nesterov"
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=nesterov)


def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that changes at each step of it."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def part_to_thaw(net: Any) -> nn.Module:
    """The part of the module whose training is switched on and off: the head, and layers that ranks may not use."""
    return nn.ModuleList([net.head, *(getattr(net, name) for name in ("unused", "sometimes") if hasattr(net, name))])


def trains(case: Case, epoch: int, index: int) -> bool:
    """Whether `part_to_thaw` is trained in this batch."""
    if case.thaw == "epoch":
        return epoch % 2 == 1
    accumulate = case.accumulates(epoch)
    if case.thaw == "window":
        return (index // accumulate) % 2 == 1
    return index % accumulate == 0 if accumulate > 1 else index % 2 == 0
