"""Saving and loading sharded models and optimizers."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from lightning_automodel import _compat

_SHARDS_ON_CPU = StateDictOptions(full_state_dict=False, cpu_offload=True)


def sharded_model_state(model: nn.Module) -> dict[str, Any]:
    """State dict whose sharded entries are DTensors on the CPU. Every rank must call it."""
    return get_model_state_dict(model, options=_SHARDS_ON_CPU)


def sharded_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name, DTensors on the CPU. Every rank must call it.

    Torch initialises the state of an optimizer that has not stepped yet by stepping it (with zero gradients and
    learning rate), which would count as a step for the next real one; such a state is put back to empty and saved
    empty.
    """
    had_stepped = bool(optimizer.state)
    state = get_optimizer_state_dict(model, optimizer, options=_SHARDS_ON_CPU)
    if not had_stepped:
        optimizer.state.clear()
        state["state"] = {}
    return state


def save_sharded(checkpoint: dict[str, Any], path: Path, is_rank_zero: bool) -> None:
    """Write ``checkpoint`` as a directory: shards of model and optimizers by every rank, the rest by rank 0.

    A collective over the default group; ``path`` must be the same on every rank.
    """
    if path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    shards: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
    for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
        shards[f"optimizer_{index}"] = state
    _compat.distributed_checkpoint_save(shards, path)
    if is_rank_zero:
        torch.save(checkpoint, path / _compat.CHECKPOINT_METADATA_FILENAME)


def load_into(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a directory of shards or a single file into a sharded model and its optimizers.

    A collective over the default group; ``path`` must be the same on every rank.

    An optimizer that had not stepped when it was saved has no state to load; it starts as it is. Gradients are dropped:
    where an earlier fit has left some, torch (2.13) would skip the state of the optimizers without a word.

    Returns:
        What is left of the checkpoint: loops, callbacks, schedulers.
    """
    model.zero_grad()
    targets: dict[str, Any] = {"state_dict": model}
    saved = FileSystemReader(path).read_metadata().state_dict_metadata if path.is_dir() else None
    for index, optimizer in enumerate(optimizers):
        name = f"optimizer_{index}"
        if saved is None or any(key.startswith(f"{name}.state.") for key in saved):
            targets[name] = optimizer
    with _names_without_wrappers(model) if path.is_dir() else nullcontext():
        return _compat.load_checkpoint(
            path=path, state=targets, strict=strict, optimizer_states_from_list=True, weights_only=weights_only
        )


@contextmanager
def _names_without_wrappers(model: nn.Module) -> Iterator[None]:
    """Let ``model`` load what names parameters as if ``torch.compile`` had wrapped no module of it, as shards do."""

    def add_wrapper(_: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}_orig_mod.{name.removeprefix(prefix)}"] = state.pop(name)

    wrappers = [module for module in model.modules() if isinstance(module, _compat.OptimizedModule)]
    handles = [wrapper.register_load_state_dict_pre_hook(add_wrapper) for wrapper in wrappers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_shards(path: Path) -> None:
    """Raise ValueError where a replicated model is to be loaded from a directory of shards."""
    if path.is_dir():
        raise ValueError(
            f"{path} is a directory of shards, which data_parallel='ddp' does not load: consolidate it first with"
            f" `python -m lightning.pytorch.utilities.consolidate_checkpoint {path}`, or use data_parallel='fsdp2'."
        )
