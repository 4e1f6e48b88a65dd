"""The module that the search trains, and its optimizers: plain torch, the same on ranks and in one process.

Shapes: b rows, s positions, d width, v vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.search import user_code
from tests.search.block import Block, plain
from tests.search.cases import Case
from tests.search.data import VOCABULARY, WIDTH


class Net(nn.Module):
    """Embedding, four blocks in a container, head, and parts that a case asks for.

    Parts: "tied" head; a "scalar" and a "vector" of the root itself; a "gate" with one output, of which most
    ranks have an empty shard; an "unused" layer, one that is used "sometimes", depending on the data of a
    rank; an "empty" parameter; a frozen "teacher" whose forward runs without gradients.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.writes = True  # one process writes once for all ranks
        max_norm = 0.8 if "max_norm" in case.writes else None
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=max_norm)
        clamps = "clamp@block" in case.writes
        made = [Block(case.output, case.counter, clamps, mixes=case.experts > 0) for _ in range(4)]
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
            self.blocks = nn.ModuleDict(
                {"first": nn.Sequential(*made[:2]), "second": nn.Sequential(*made[2:])}
            )
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
        user_code.attach(case, self)
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

    def forward(self, ids: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[b, s, v] logits, or [b, v] of rows, and the [b, s, d] hidden states.

        A [b, s, d] shift is added to the embeddings.
        """
        case = self.case
        parts = self.case.parts
        if self.training and self.writes:
            user_code.write(case, "forward", self)
        hidden: Any = self.embedding(ids)
        if shift is not None:
            hidden = hidden + shift
        if "vector" in parts:
            hidden = hidden * (1 + self.vector)
        hidden = plain(self._through_blocks(hidden))
        hidden = user_code.altered(case, self, hidden)
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
    return nn.ModuleList(
        [net.head, *(getattr(net, name) for name in ("unused", "sometimes") if hasattr(net, name))]
    )


def trains(case: Case, epoch: int, index: int) -> bool:
    """Whether `part_to_thaw` is trained in this batch."""
    if case.thaw == "epoch":
        return epoch % 2 == 1
    accumulate = case.accumulates(epoch)
    if case.thaw == "window":
        return (index // accumulate) % 2 == 1
    return index % accumulate == 0 if accumulate > 1 else index % 2 == 0
