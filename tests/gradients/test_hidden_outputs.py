"""A loss on something else than the tensors that a unit returns, as FSDP2 sees them, is right too.

FSDP2 gathers a freed unit again when a gradient reaches what its forward has returned. It does not see features that a
forward hook has kept, tensors inside of a distribution or another object, nor a view that was changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import LEARNING_RATE, Outcome, full_weights, weight_error
from tests.trainer.runs import TOLERANCE, by_default, make_trainer

WIDTH = 6
NUM_BATCHES = 4


def rows(rank: int, index: int) -> Tensor:
    """[b, d], b differs by rank and index."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(2 + 3 * rank + index % 2, WIDTH, generator=generator, dtype=torch.float64)


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Perceptual(nn.Module):
    """Compares what the blocks of a frozen network make of two inputs, as hooks have seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = block()
        self.frozen = nn.Sequential(block(), block(), block())
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def features(self, inputs: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        hooks = [b[1].register_forward_hook(lambda module, args, output: found.append(output)) for b in self.frozen]
        self.frozen(inputs)
        for hook in hooks:
            hook.remove()
        return found

    def losses(self, inputs: Tensor) -> Tensor:
        made = self.features(self.net(inputs))
        with torch.no_grad():
            wanted = self.features(inputs)
        return torch.stack([(a - b).square().sum(1) for a, b in zip(made, wanted, strict=True)]).sum(0)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mean(hidden), F.softplus(self.scale(hidden)))


class Distribution(nn.Module):
    """A policy returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policies = nn.Sequential(block()), nn.ModuleList([Policy()])

    def losses(self, inputs: Tensor) -> Tensor:
        return -self.policies[0](self.body(inputs)).log_prob(inputs).sum(1)


class Box:
    """No container that torch looks into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, box: Box) -> Box:
        return Box(torch.tanh(self.linear(box.value)))


class Boxes(nn.Module):
    """Blocks pass objects on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Boxed(), Boxed()])

    def losses(self, inputs: Tensor) -> Tensor:
        box = Box(inputs)
        for each in self.blocks:
            box = each(box)
        return box.value.square().sum(1)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)[:, :WIDTH]


class Views(nn.Module):
    """Blocks return views, which are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Half(), Half(), Half()])

    def losses(self, inputs: Tensor) -> Tensor:
        for each in self.blocks:
            inputs = each(inputs)
            inputs += 1.0
        return inputs.square().sum(1)


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        self.stored = torch.tanh(self.linear(hidden))
        return self.linear(self.stored)


class Stored(nn.Module):
    """The loss is on a tensor that the last block has stored, not on what it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Storing(), Storing()])

    def losses(self, inputs: Tensor) -> Tensor:
        for each in self.blocks:
            inputs = each(inputs)
        return self.blocks[-1].stored.square().sum(1)


class Watched(nn.Module):
    """A logger on rank 0 looks at what layers return; the others gather the same units, whatever it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])
        if dist.is_initialized() and dist.get_rank() == 0:
            for each in self.blocks:
                each[1].register_forward_hook(lambda module, args, output: None)

    def losses(self, inputs: Tensor) -> Tensor:
        for each in self.blocks:
            inputs = each(inputs)
        return inputs.square().sum(1)


MODELS = {model.__name__: model for model in (Perceptual, Distribution, Boxes, Views, Stored, Watched)}


def made(name: str) -> nn.Module:
    model = MODELS[name]()
    fill(model)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


class Module(LightningModule):
    """Steps after two batches."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = made(name)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model.losses(batch).mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader([rows(dist.get_rank(), index) for index in range(NUM_BATCHES)], batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.model)


class ByHand(Module):
    """The same under manual optimization, with forwards that no backward follows."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer, is_last = self.optimizers(), batch_idx % 2 == 1
        loss = self.model.losses(batch).mean()
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(loss)
        self.model.losses(batch)  # leaves parameters gathered, which the step makes stale
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


LAYOUTS: dict[str, tuple[Callable[[str], Module], dict[str, Any]]] = {
    "kept": (Module, {"reshard_during_accumulation": False}),
    "resharded": (Module, {"reshard_during_accumulation": True}),
    "checkpointed": (Module, {"reshard_during_accumulation": True, "activation_checkpointing": True}),
    "kept, checkpointed": (Module, {"reshard_during_accumulation": False, "activation_checkpointing": True}),
    "by hand": (ByHand, {}),
    "by hand, kept": (ByHand, {"reshard_during_accumulation": False}),
    "ddp": (Module, {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}),
}


def _fit(name: str, layout: str) -> dict[str, Tensor] | str:
    make, options = LAYOUTS[layout]
    module = make(name)
    accumulate = 2 if module.automatic_optimization else 1
    try:
        make_trainer(AutomodelStrategy(count="samples", **options), accumulate_grad_batches=accumulate).fit(module)
    except RuntimeError as error:
        return str(error)
    return full_weights(module.model)


CASES = {f"{name}, {layout}": (name, layout) for name in MODELS for layout in LAYOUTS}
for _layout in ("checkpointed", "kept, checkpointed"):
    del CASES[f"Stored, {_layout}"]  # the second forward stores another tensor
DEFAULT = (
    "Perceptual, resharded",
    "Perceptual, by hand",
    "Distribution, by hand",
    "Boxes, resharded",
    "Views, by hand",
    "Watched, resharded",
    "Watched, by hand",
    "Stored, by hand, kept",
    "Stored, resharded",
)


@pytest.mark.every_case
@pytest.mark.parametrize("case", by_default(CASES, *DEFAULT))
def test_loss_on_what_fsdp2_does_not_see(pool2: RankPool, case: tuple[str, str]) -> None:
    """Stored tensors alone are not found; the option that keeps them gathered, which the error names, is exact."""
    name, layout = case
    model = made(name)
    optimizer = sgd(model)
    for window in ((0, 1), (2, 3)):
        batches = [rows(rank, index) for rank in range(2) for index in window]
        optimizer.zero_grad()
        (torch.stack([model.losses(b).sum() for b in batches]).sum() / sum(map(len, batches))).backward()
        optimizer.step()
    expected = Outcome(full_weights(model), None)
    for found in pool2.run(_fit, name, layout):
        if name == "Stored" and layout in ("resharded", "by hand"):
            assert isinstance(found, str)
            assert "A backward needed parameters that FSDP2 had freed" in found
            assert "reshard_during_accumulation=False" in found
        elif name != "Watched" and layout == "checkpointed":  # it would recompute with shards
            assert isinstance(found, str)
            assert "Under activation_checkpointing, pass reshard_during_accumulation=False" in found
        else:
            assert not isinstance(found, str), found
            assert weight_error(Outcome(found, None), expected) <= TOLERANCE
