"""Where trained weights go in the launching process. Without any process."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_automodel.launch.forks import load_trained_weights


class Late(pl.LightningModule):
    """Makes its layer in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(2, 2)


class LateOnMesh(Late):
    def configure_model(self) -> None:
        raise ValueError("needs the ranks")


WEIGHTS = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.full((2,), 3.0)}
PATH = Path("somewhere/results.pt")


def test_weights_of_configure_model() -> None:
    """The layers are made where they are needed to hold the weights."""
    module = Late()
    load_trained_weights(module, WEIGHTS, PATH)
    for name, tensor in module.state_dict().items():
        assert tensor.equal(WEIGHTS[name])


def test_weights_without_a_place() -> None:
    """An error that names their file: the module would seem trained."""
    expected = rf"(?s)LateOnMesh is trained, but the module in this process cannot hold the trained .*{PATH}"
    with pytest.raises(RuntimeError, match=expected) as raised:
        load_trained_weights(LateOnMesh(), WEIGHTS, PATH)
    assert raised.value.__cause__ is not None
    with torch.device("meta"):
        module = Late()
        module.configure_model()
    with pytest.raises(RuntimeError, match="some of its tensors are on the meta device"):
        load_trained_weights(module, WEIGHTS, PATH)


def test_weights_of_another_shape() -> None:
    """Such as those of an embedding that `setup` has enlarged."""
    module = Late()
    module.layer = nn.Linear(2, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        load_trained_weights(module, WEIGHTS, PATH)
