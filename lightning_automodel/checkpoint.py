"""Saving and loading sharded models and optimizers."""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel import _compat
from lightning_automodel.sharding import shard_like

log = logging.getLogger(__name__)

_SHARDS_ON_CPU = StateDictOptions(full_state_dict=False, cpu_offload=True)


def sharded_model_state(model: nn.Module) -> dict[str, Any]:
    """State dict whose sharded entries are DTensors on the CPU. Every rank must call it."""
    return get_model_state_dict(model, options=_SHARDS_ON_CPU)


def model_state(model: nn.Module) -> dict[str, Any]:
    """State dict of a sharded model's very own tensors, which change as it trains. Every rank must call it."""
    return get_model_state_dict(model)


def whole_model_state(model: nn.Module, keep: bool) -> dict[str, Any]:
    """State dict of whole tensors on the CPU. Every rank must call it where ``model`` is sharded.

    Gathers one tensor at a time: beside the shards, a rank holds one whole tensor on its device, and one that keeps
    them the whole model in host memory.

    Args:
        model: Sharded or not; wrappers leave no trace in the names.
        keep: Whether this rank wants them; the others get an empty dict.
    """
    whole = {}
    for name, value in get_model_state_dict(model).items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            whole[name] = tensor.cpu() if isinstance(tensor, torch.Tensor) and not tensor.is_meta else tensor
    return whole


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

    Shards are also what callbacks keep of the model's state, such as averages of its weights.

    A collective over the default group; ``path`` must be the same on every rank.
    """
    if path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    shards: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
    for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
        shards[f"optimizer_{index}"] = state
    rest, others = _split(checkpoint, shards["state_dict"].keys())
    shards.update(others)
    _compat.distributed_checkpoint_save(shards, path)
    if is_rank_zero:
        torch.save(rest, path / _compat.CHECKPOINT_METADATA_FILENAME)


def refuse_storage_options(storage_options: Any | None) -> None:
    """Raise TypeError where options are given that a directory of shards, written without a CheckpointIO, ignores."""
    if storage_options is not None:
        raise TypeError(
            "Sharded checkpoints are written without a CheckpointIO, so storage_options"
            f" ({storage_options!r}) would have no effect; leave it out."
        )


@contextmanager
def given_up_after_failure(path: _PATH) -> Iterator[None]:
    """After a failure of the run, log that no checkpoint could be written, rather than hide the failure by an error."""
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        log.error(
            "No checkpoint at %s: a sharded model is saved by all ranks together, and after a failure they were not"
            " (%s). Save regularly, with ModelCheckpoint.",
            path,
            str(error).splitlines()[0],
        )


def load_into(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a directory of shards or a single file into a sharded model and its optimizers.

    A collective over the default group; ``path`` must be the same on every rank.

    An optimizer that had not stepped when it was saved has no state to load; it starts anew. Gradients are dropped:
    where an earlier fit has left some, torch (2.13) would skip the state of the optimizers without a word.

    Returns:
        What is left of the checkpoint: loops, callbacks, schedulers. States of the model among it are sharded as the
        model is.
    """
    model.zero_grad()
    targets: dict[str, Any] = {"state_dict": model}
    saved = FileSystemReader(path).read_metadata().state_dict_metadata if path.is_dir() else None
    for index, optimizer in enumerate(optimizers):
        name = f"optimizer_{index}"
        if saved is None or any(key.startswith(f"{name}.state.") for key in saved):
            targets[name] = optimizer
        else:
            _start_anew(optimizer, name, path, saved)
    with _names_without_wrappers(model) if path.is_dir() else nullcontext():
        checkpoint = _compat.load_checkpoint(
            path=path, state=targets, strict=strict, optimizer_states_from_list=True, weights_only=weights_only
        )
    _restore_states(checkpoint, model_state(model), path, saved)
    return checkpoint


def _start_anew(optimizer: Optimizer, name: str, path: Path, saved: Collection[str]) -> None:
    """Empty the state of ``optimizer``, and load its learning rates and other settings. A collective."""
    optimizer.state.clear()
    settings = [
        {key: value for key, value in group.items() if key != "params" and f"{name}.param_groups.{i}.{key}" in saved}
        for i, group in enumerate(optimizer.param_groups)
    ]
    _compat.distributed_checkpoint_load({name: {"param_groups": settings}}, path)
    for group, loaded in zip(optimizer.param_groups, settings, strict=True):
        group.update(loaded)


def _split(tree: dict[str, Any], names: Collection[str], place: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate ``tree``, left as it is, into what is whole on every rank and sharded states of the model, by place.

    Raises:
        ValueError: If there are shards under other ``names`` than those of the model's state.
    """
    rest, shards = dict(tree), {}
    for key, value in tree.items():
        if not isinstance(value, dict):
            continue
        if not any(isinstance(leaf, DTensor) for leaf in value.values()):
            below, found = _split(value, names, f"{place}{key}/")
            rest[key] = below if found else value
            shards.update(found)
            continue
        if unknown := [name for name in value if name not in names]:
            raise ValueError(
                f"The checkpoint's {place}{key} holds shards beside {unknown[0]!r}, which is no entry of the model's"
                " state dict, so that they could not be loaded again: save shards under the names of the parameters"
                " that they belong to, or tensor.full_tensor(), called on every rank."
            )
        rest[key], shards[f"{place}{key}"] = {}, value
    return rest, shards


def _restore_states(
    tree: dict[str, Any], model_state: dict[str, Any], path: Path, saved: Collection[str] | None, place: str = ""
) -> None:
    """Replace states of the model within ``tree`` by shards, from the directory if its entries ``saved`` are given.

    A collective over the default group where it reads shards.
    """
    for key, value in tree.items():
        if not isinstance(value, dict):
            continue
        names = [name for name in model_state if saved is not None and f"{place}{key}.{name}" in saved]
        if names:
            shards = {f"{place}{key}": {name: torch.empty_like(model_state[name]) for name in names}}
            _compat.distributed_checkpoint_load(shards, path)
            tree[key] = shards[f"{place}{key}"]
        elif saved is None and value.keys() == model_state.keys():
            tree[key] = {name: shard_like(model_state[name], full) for name, full in value.items()}
        else:
            _restore_states(value, model_state, path, saved, f"{place}{key}/")


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
