"""A loss on what FSDP2 does not see is right, or refused with a way which is exact.

FSDP2 gathers a freed unit again when a gradient reaches what its forward has returned. It does not see
features that a forward hook or the module has kept, nor a view that was changed in place. Where parameters
stay gathered, that does not matter; else the error names the option.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.rank_pool import RankPool
from tests.trainer.exactness import weight_error
from tests.trainer.row_losses import WIDTH, RowModule, RowModuleByHand, fit_rows, train_rows_plainly
from tests.trainer.runs import TOLERANCE, by_default


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
        hooks = [
            b[1].register_forward_hook(lambda module, args, output: found.append(output))
            for b in self.frozen
        ]
        self.frozen(inputs)
        for hook in hooks:
            hook.remove()
        return found

    def losses(self, inputs: Tensor) -> Tensor:
        made = self.features(self.net(inputs))
        with torch.no_grad():
            wanted = self.features(inputs)
        return torch.stack([(a - b).square().sum(1) for a, b in zip(made, wanted, strict=True)]).sum(0)


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


MODELS: dict[str, type[nn.Module]] = {
    model.__name__: model for model in (Perceptual, Views, Stored, Watched)
}


class ForwardByHand(RowModuleByHand):
    """Does forwards that no backward follows, which leave parameters gathered that the step makes stale."""

    def after_backward(self, batch: Any) -> None:
        self.net.losses(batch[0])


LAYOUTS: dict[str, tuple[type[RowModule], dict[str, Any]]] = {
    "kept": (RowModule, {"reshard_during_accumulation": False}),
    "resharded": (RowModule, {"reshard_during_accumulation": True}),
    "checkpointed": (RowModule, {"reshard_during_accumulation": True, "activation_checkpointing": True}),
    "kept, checkpointed": (
        RowModule,
        {"reshard_during_accumulation": False, "activation_checkpointing": True},
    ),
    "by hand": (ForwardByHand, {}),
    "by hand, kept": (ForwardByHand, {"reshard_during_accumulation": False}),
    "ddp": (RowModule, {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}),
}


def _fit(name: str, layout: str) -> dict[str, Tensor] | str:
    make, options = LAYOUTS[layout]
    return fit_rows(make(MODELS[name]), options)


CASES = {f"{name}, {layout}": (name, layout) for name in MODELS for layout in LAYOUTS}
for _layout in ("checkpointed", "kept, checkpointed"):
    del CASES[f"Stored, {_layout}"]  # the second forward stores another tensor
DEFAULT = (
    "Perceptual, resharded",
    "Perceptual, by hand",
    "Views, by hand",
    "Watched, resharded",
    "Stored, by hand, kept",
)


@pytest.mark.every_case
@pytest.mark.parametrize("case", by_default(CASES, *DEFAULT))
def test_loss_on_what_fsdp2_does_not_see(pool2: RankPool, case: tuple[str, str]) -> None:
    """Refused where FSDP2 has freed parameters; the option that the error names, and recomputed blocks, are exact."""
    name, layout = case
    expected = train_rows_plainly(MODELS[name]())
    for found in pool2.run(_fit, name, layout):
        if name != "Watched" and layout in ("resharded", "by hand"):
            assert isinstance(found, str)
            assert "A backward needed parameters that FSDP2 had freed" in found
            assert "or pass reshard_during_accumulation=False" in found
        else:
            assert not isinstance(found, str), found
            assert weight_error(found, expected) <= TOLERANCE
