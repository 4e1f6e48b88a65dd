"""This rank's parts of parameters and gradients, in host memory, and what a training step's loss is."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access

Parts = dict[str, Tensor]
"""This rank's parts of weights or gradients by parameter; those of parameters without a gradient are missing."""


def gradients_of(parameters: dict[str, nn.Parameter]) -> Parts:
    """What ``.grad`` holds of those that require gradients."""
    with plain_access():
        graded = {name: p.grad for name, p in parameters.items() if p.requires_grad and p.grad is not None}
        return {name: local_part(gradient).to("cpu", copy=True) for name, gradient in graded.items()}


def weights_of(parameters: dict[str, nn.Parameter]) -> Parts:
    """Copies of the parameters."""
    return {name: local_part(p).to("cpu", copy=True) for name, p in parameters.items()}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, dense, sharing memory if it is."""
    with plain_access():
        local = torch_internals.local_tensor(tensor.detach())
    if local.is_sparse:
        return local.to_dense()
    return local


def loss_of(output: Any) -> Tensor:
    """[] the loss in what ``training_step`` has returned."""
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def loss_scale(trainer: pl.Trainer) -> float:
    """What a gradient scaler multiplies losses by at the moment."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.get_scale())
