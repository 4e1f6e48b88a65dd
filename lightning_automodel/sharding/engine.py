"""What a strategy asks of an engine: how the model is held, and what each micro-batch communicates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_automodel.distributed.mesh import RunMesh


class Engine(ABC):
    """How the model is held, and what each micro-batch communicates.

    Args:
        mesh: Mesh of the run.
        device: This rank's device.
    """

    def __init__(self, mesh: RunMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device

    @abstractmethod
    def setup(self, module: pl.LightningModule, fitting: bool, give_values: Callable[[], None]) -> nn.Module:
        """Distribute ``module``, converted and on the device. A collective over the world.

        Args:
            module: The user's LightningModule.
            fitting: Whether gradients will be needed.
            give_values: Gives values to what has none yet; to be called once, with shards where there are to be some.

        Returns:
            What the steps are to be called on.
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
        """Take part in what an evaluation step of other ranks communicates, without data. A collective."""

    def start_backward(self, loss: Tensor, counts: bool = True) -> None:
        """Called before each backward; ``counts``: parameters that it uses get a gradient."""

    def end_backward(self) -> None:
        """Called after each backward, before anybody else sees the gradients."""

    def complete_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average what the engine itself does not, once a window. May be a collective over the data-parallel group."""

    def followed(self, parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, bool]]:
        """Those that get a zero gradient where their window did not use them, and whether it did, on this rank."""
        return []

    def release(self) -> None:
        """Free gathered parameters: somebody may be about to write weights."""

    def synchronize_buffers(self) -> None:
        """Make buffers equal before somebody evaluates or saves. May be a collective over the data-parallel group."""

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Drop gradients that the engine holds outside of ``.grad`` for these (or all) parameters."""

    def state(self) -> dict[str, Any]:
        """What decides how the next micro-batch communicates, and is not settled by it."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` returned."""

    def recover(self) -> None:
        """Forget an interrupted micro-batch."""

    def close(self) -> None:
        """Leave the model to itself."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What was decided, and why."""
