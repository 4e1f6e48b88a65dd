"""What the strategy asks of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.gradients.grad_sync import GradSync
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding.buffers import SharedBuffers


class Engine(ABC):
    """Distributes the model over the ranks of ``mesh``; ``sync`` says what each micro-batch of a fit communicates."""

    _buffers: SharedBuffers | None = None  # set up by the engine, unless its user wants none to be shared

    def __init__(self, mesh: RunMesh, device: torch.device, options: StrategyOptions) -> None:
        self.mesh = mesh
        self.device = device
        self.options = options
        self.sync = GradSync()

    @abstractmethod
    def setup(self, module: pl.LightningModule, fitting: bool, give_values: Callable[[], None]) -> nn.Module:
        """Distribute the user's module, whose precision and device are set, and return what to call its steps on.

        A collective over the world. ``fitting``: whether gradients will be needed. ``give_values``
        initialises tensors without values, and is called once, after sharding.
        """

    def start_forward(self, batch: Any) -> None:
        """Called before each training step, with its batch."""

    def start_evaluation_loop(self) -> None:
        """Called before an evaluation or prediction begins. May be a collective over the data-parallel group."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Context of a step of evaluation or prediction; after it, a callback may swap weights."""
        return nullcontext()

    def join_evaluation(self) -> None:
        """Take part in the collectives of other ranks' evaluation step, without data. A collective."""

    def synchronize_buffers(self) -> None:
        """Make buffers equal before an evaluation, and where a fit ends. A collective over the data-parallel group."""
        if self._buffers is not None:
            self._buffers.synchronize()

    def close(self) -> None:
        """Remove hooks and patches from the model."""
        self.sync.close()

    def describe(self) -> dict[str, Any]:
        """What the engine has decided, and why."""
        return {}
