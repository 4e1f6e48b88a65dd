"""Interface of the FSDP2 and DDP engines, and what both keep of an accumulation window."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.options import StrategyOptions


class GradSync:
    """What each micro-batch communicates, and gradients outside of ``.grad``. As it is, it communicates nothing.

    FSDP2 and DDP give a zero gradient to some parameters that no rank has used, where one process has none. So the
    parameters are tracked that a window has really used.
    """

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._tracked: set[nn.Parameter] = set()
        self._used: set[nn.Parameter] = set()
        self._counts = True

    def track(self, parameter: nn.Parameter, leaf: nn.Parameter) -> None:
        """Note whether backwards use ``parameter``, whose gradient autograd accumulates in ``leaf``."""
        if parameter.requires_grad and parameter not in self._tracked:
            self._tracked.add(parameter)
            hook = partial(self._mark_used, parameter)
            self._hooks.append(leaf.register_post_accumulate_grad_hook(hook))

    def _mark_used(self, parameter: nn.Parameter, _: Tensor) -> None:
        if self._counts:
            self._used.add(parameter)

    def tracked(self, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, bool]]:
        """Those of ``parameters`` that get a zero gradient if unused, and whether this rank has used them."""
        return [(parameter, parameter in self._used) for parameter in parameters if parameter in self._tracked]

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context for the forward and backward of one micro-batch; ``is_last``: its window ends with it."""
        return nullcontext()

    def backward(self, loss: Tensor, trained: Set[nn.Parameter], counts: bool = True) -> AbstractContextManager[None]:
        """Context of the backward of ``loss``; after it, gradients that were to be reduced are.

        ``trained`` has what earlier backwards of the open windows have trained, the same on all ranks. ``counts``:
        whether the parameters in it count as used (not with padding batches).
        """
        return nullcontext()

    def complete_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average what backward has left of parameters that a window has trained. May be a collective."""

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget the window, and gradients that are held outside of ``.grad``, for these (or all) parameters."""
        self._used.difference_update(self._tracked if parameters is None else parameters)

    def recover(self) -> None:
        """Drop the state of an interrupted micro-batch."""

    def close(self) -> None:
        """Remove hooks from the model."""
        for hook in self._hooks:
            hook.remove()


class Engine(ABC):
    """Distributes the model over the ranks of ``mesh``; ``sync`` says what each micro-batch of a fit communicates."""

    def __init__(self, mesh: RunMesh, device: torch.device, options: StrategyOptions) -> None:
        self.mesh, self.device, self.options = mesh, device, options
        self.sync = GradSync()

    @abstractmethod
    def setup(self, module: pl.LightningModule, fitting: bool, give_values: Callable[[], None]) -> nn.Module:
        """Distribute the user's module, whose precision and device are set, and return what to call its steps on.

        A collective over the world. ``fitting``: whether gradients will be needed. ``give_values`` initialises tensors
        without values, and is called once, after sharding.
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

    def release(self) -> None:
        """Free gathered parameters, since weights may be written next."""

    def synchronize_buffers(self) -> None:
        """Make buffers equal before an evaluation or a save. May be a collective over the data-parallel group."""

    def close(self) -> None:
        """Remove hooks and patches from the model."""
        self.sync.close()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the engine has decided, and why."""
