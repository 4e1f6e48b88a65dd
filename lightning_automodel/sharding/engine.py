"""Interface of the FSDP2 and DDP engines."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.gradients.windows import GradientEngine


class Engine(GradientEngine, ABC):
    """Distributes the model, and decides what each micro-batch communicates.

    Args:
        mesh: The run's device mesh.
        device: This rank's device.
    """

    def __init__(self, mesh: RunMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device

    @abstractmethod
    def setup(self, module: pl.LightningModule, fitting: bool, give_values: Callable[[], None]) -> nn.Module:
        """Distribute ``module``, whose precision and device are set already. A collective over the world.

        Args:
            module: The user's LightningModule.
            fitting: Whether gradients will be needed.
            give_values: Initialises tensors without values; the engine calls it once, after sharding if it shards.

        Returns:
            The module to call the steps on.
        """

    @abstractmethod
    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context for the forward and backward of one micro-batch; ``is_last``: the optimizer steps after it."""

    def start_forward(self, batch: Any) -> None:
        """Called before each training step, with its batch."""

    def start_evaluation_loop(self) -> None:
        """Called before an evaluation or prediction begins."""

    def start_evaluation(self) -> None:
        """Called before each step of evaluation or prediction."""

    def end_evaluation(self) -> None:
        """Called after each step of evaluation or prediction: a callback may be about to swap weights."""

    def join_evaluation(self) -> None:
        """Take part in the collectives of other ranks' evaluation step, without data. A collective."""

    def start_backward(self, loss: Tensor, counts: bool = True) -> None:
        """Called before each backward; ``counts``: whether its parameters count as used (not with filler data)."""

    def end_backward(self) -> None:
        """Called after each backward, before any hook sees the gradients."""

    def release(self) -> None:
        """Free gathered parameters, since weights may be written next."""

    def synchronize_buffers(self) -> None:
        """Make buffers equal before an evaluation or a save. May be a collective over the data-parallel group."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs so that its next micro-batch communicates in the same way."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""

    def close(self) -> None:
        """Remove hooks and patches from the model."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the engine has decided, and why."""
