"""What users write under manual optimization, each run by the strategy on ranks and by one plain process.

A recipe's `training_step` is the same code in both. `run_plainly` calls it without a Trainer: its batch
holds what all ranks hold, `manual_backward` is what the contract says (sums over a window, divided by the
window's label tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.trainer.cases import Case
from tests.trainer.exactness import LEARNING_RATE, MOMENTUM, Batch, TinyDecoder, full_weights, micro_batches

NUM_BATCHES = 4
RADIUS = 0.05


def case(num_ranks: int) -> Case:
    """Ragged data; some micro-batches hold no label token."""
    return Case(seed=21, telling="labels", num_batches=NUM_BATCHES, gap="micro_batches", num_ranks=num_ranks)


def count(batches: list[Batch]) -> int:
    """Label tokens of some batches."""
    return sum(int((batch["labels"] != -100).sum()) for batch in batches)


class Recipe(LightningModule):
    """Two decoders whose logits meet; subclasses train them."""

    two_optimizers = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.left = TinyDecoder(1).double()
        self.right = TinyDecoder(2).double()

    def losses(self, batches: list[Batch], sign: float) -> list[Tensor]:
        """Sum of token losses of each batch."""
        found = []
        for batch in batches:
            logits = self.left(batch["input_ids"]) + sign * self.right(batch["input_ids"])
            labels = batch["labels"].flatten()
            found.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
        return found

    def loss(self, batches: list[Batch], sign: float = 1.0) -> Tensor:
        """Mean over the label tokens of the batches that this process has."""
        return torch.stack(self.losses(batches, sign)).sum() / max(count(batches), 1)

    def backward_on(
        self, batches: list[Batch], sign: float = 1.0, scale: float = 1.0, **kwargs: Any
    ) -> None:
        """The usual call."""
        self.manual_backward(self.loss(batches, sign) * scale, num_label_tokens=count(batches), **kwargs)

    def configure_optimizers(self) -> Any:
        """SGD with momentum over everything, or one for each decoder."""
        groups = [self.left, self.right] if self.two_optimizers else [self]
        made = [
            torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM) for module in groups
        ]
        return made if self.two_optimizers else made[0]


class EndedUntoggled(Recipe):
    """A window that a backward outside of any toggle ends."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            with optimizer.toggle_model(sync_grad=False):
                self.backward_on(batch)
            return
        self.backward_on(batch)
        optimizer.step()
        optimizer.zero_grad()


class NamedOptimizers(Recipe):
    """One loss, one backward, two optimizers, named or not: Muon beside AdamW, a body and a head."""

    two_optimizers = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        named = ({}, {"optimizer": optimizers}, {"optimizer": optimizers[0]})[batch_idx % 3]
        self.backward_on(batch, **named)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class SharpnessAware(Recipe):
    """SAM by hand: climb along the gradient, take the gradient there, come back, step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_on(batch)
        climb = []
        with torch.no_grad():
            for parameter in self.parameters():
                climb.append(RADIUS * parameter.grad)
                parameter.add_(climb[-1])
        optimizer.zero_grad()
        self.backward_on(batch)
        with torch.no_grad():
            for parameter, step in zip(self.parameters(), climb, strict=True):
                parameter.sub_(step)
        optimizer.step()


class NeverZeroed(Recipe):
    """What stands in `.grad` is neither scaled nor averaged; windows add to it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.backward_on(batch)
        self.optimizers().step()


class AddedInBetween(Recipe):
    """What a user puts into `.grad` between two backwards of a window is added at the end, unscaled."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.backward_on(batch)
        if last:
            optimizer.step()
            optimizer.zero_grad()
            return
        assert all(parameter.grad is None for parameter in self.parameters())
        for parameter in self.parameters():
            parameter.grad = 0.01 * parameter.detach()


class ZeroedInMidWindow(Recipe):
    """`module.zero_grad()` gives the first half of each window up."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.backward_on(batch)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        else:
            self.zero_grad()


class Adversarial(Recipe):
    """A GAN whose players accumulate interleaved; their windows end in different training steps."""

    two_optimizers = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for player, (optimizer, sign) in enumerate(zip(self.optimizers(), (1.0, -1.0), strict=True)):
            last = (batch_idx + player) % 2 == 1
            with optimizer.toggle_model(sync_grad=last):
                self.backward_on(batch, sign)
            if last:
                optimizer.step()
                optimizer.zero_grad()


class AdversarialEachTime(Recipe):
    """A GAN that toggles by hand and steps after each backward."""

    two_optimizers = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            self.toggle_optimizer(optimizer)
            self.backward_on(batch, sign)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        EndedUntoggled,
        NamedOptimizers,
        SharpnessAware,
        NeverZeroed,
        AddedInBetween,
        ZeroedInMidWindow,
        Adversarial,
        AdversarialEachTime,
    )
}


class _PlainOptimizer:
    """The part of Lightning's wrapper that recipes use."""

    def __init__(self, module: Recipe, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.optimizer = optimizer
        self.window = []
        self.step = optimizer.step
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.window.clear()
        self.optimizer.zero_grad()

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        self.module.plain_toggled = self
        self.module.plain_sync = sync_grad
        yield
        self.module.plain_toggled = None
        self.module.plain_sync = True


def run_plainly(recipe: type[Recipe], num_ranks: int) -> dict[str, Tensor]:
    """Weights of one process that has every rank's data."""

    class Plain(recipe):  # type: ignore[valid-type,misc]
        plain_toggled: _PlainOptimizer | None = None
        plain_sync = True

        def optimizers(self, use_pl_optimizer: bool = True) -> Any:
            return self.plain_optimizers if self.two_optimizers else self.plain_optimizers[0]

        def toggle_optimizer(self, optimizer: Any) -> None:
            self.plain_toggled = optimizer

        def untoggle_optimizer(self, optimizer: Any) -> None:
            self.plain_toggled = None

        def manual_backward(self, loss: Tensor, num_label_tokens: int, **_: Any) -> None:
            every = self.plain_optimizers
            own = self.plain_toggled or next((o for o in every if o.window), every[0])
            own.window.append((loss * num_label_tokens, num_label_tokens))
            if not self.plain_sync:
                return
            total = sum(tokens for _, tokens in own.window)
            mean = torch.stack([summed for summed, _ in own.window]).sum() / max(total, 1)
            own.window.clear()
            parameters = list(self.parameters()) if self.plain_toggled is None else own.parameters
            mean.backward(inputs=parameters)

        def zero_grad(self, *_: Any) -> None:
            for optimizer in self.plain_optimizers:
                optimizer.zero_grad()

    module = Plain()
    made = module.configure_optimizers()
    module.plain_optimizers = [
        _PlainOptimizer(module, o) for o in (made if recipe.two_optimizers else [made])
    ]
    for index, batches in enumerate(zip(*micro_batches(case(num_ranks)), strict=True)):
        module.training_step(list(batches), index)
    return full_weights(module)
