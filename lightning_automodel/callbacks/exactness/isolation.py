"""Runs user code as if this process were alone, and refuses access to other ranks and to the run's module."""

import threading
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_automodel.callbacks.exactness.module_copy import ReplayError
from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.resume.rng import global_states, set_global_states


@contextmanager
def alone(trainer: pl.Trainer, run: nn.Module) -> Iterator[None]:
    """Context in which user code sees no other ranks. ReplayError if it reaches them or the run's module."""
    own_thread = threading.get_ident()
    is_initialized = dist.is_initialized
    loggers = trainer.loggers
    modules = set(run.modules())

    def is_initialized_elsewhere() -> bool:
        # Other threads, such as those that send heartbeats, continue.
        return threading.get_ident() != own_thread and is_initialized()

    with PatchStack() as patches, warnings.catch_warnings(), _Isolation(run):
        warnings.simplefilter("ignore")
        patches.set(dist, "is_initialized", is_initialized_elsewhere)
        patches.set(dist.distributed_c10d, "is_initialized", is_initialized_elsewhere)  # for barriers
        patches.callback(setattr, trainer, "loggers", loggers)
        trainer.loggers = [DummyLogger() for _ in loggers]
        hook = register_module_forward_pre_hook(lambda called, _: _refuse_module(called, modules))
        patches.callback(hook.remove)
        yield


@contextmanager
def random_states_kept(device: torch.device) -> Generator[None, None, None]:
    """Context that restores random states at its end, so that the run draws the same numbers as without it."""
    states = global_states(device)
    try:
        yield
    finally:
        set_global_states(states, device)


def refuse_to_gather(*_: Any, **__: Any) -> Any:
    """Take the place of a module's ``all_gather``."""
    raise ReplayError("training_step communicates with other ranks (all_gather)")


class _Isolation(TorchFunctionMode):
    """Refuses collectives, in which other ranks would never join, and operations on the run's weights.

    A dispatch mode would see more, but under it tensors cannot be converted to a subclass.
    """

    def __init__(self, run: nn.Module) -> None:
        super().__init__()
        parameters = list(run.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._of_run = {_address(tensor.detach()) for tensor in (*parameters, *gradients)} - {0}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in (getattr(func, "__module__", None) or ""):
            raise ReplayError(f"training_step communicates with other ranks ({func.__name__})")
        is_read = func.__name__ in ("__get__", "size", "numel", "dim")
        if not is_read and any(_address(tensor) in self._of_run for tensor in tensors_in((args, kwargs))):
            raise ReplayError(
                "training_step uses weights past the attributes of its module, as by a global variable"
            )
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    """Memory address of this rank's part; 0 if the tensor has no memory."""
    try:
        return torch_internals.local_tensor(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # a sparse tensor, or a wrapper such as torch.func's
        return 0


def _refuse_module(module: nn.Module, of_run: set[nn.Module]) -> None:
    if module in of_run:
        raise ReplayError(
            f"training_step calls the {type(module).__name__} of the run past the attributes of its module,"
            " as by a global variable"
        )
