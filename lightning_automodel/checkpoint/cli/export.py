"""Exporting a model as consolidated safetensors in the layout that Hugging Face's ``from_pretrained`` reads.

torch's ``HuggingFaceStorageWriter`` (2.13) is not used: it wants the whole state on one rank, or writes all shards, to
read them back into one file a tensor at a time; neither sizes files, casts, nor knows tied weights or adapters.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint import atomic, paths
from lightning_automodel.checkpoint.cli.export_plan import ExportOptions, Plan, make_plan
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.hugging_face import KEY, describe_models
from lightning_automodel.checkpoint.reading import TensorInfo, open_model
from lightning_automodel.checkpoint.state_dict import model_state
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank as get_rank_safe
from lightning_automodel.distributed.process_group import group_size as get_world_size_safe


def export_hugging_face(
    module: nn.Module,
    path: str | Path,
    *,
    max_shard_size: str | int = "5GB",
    dtype: torch.dtype | None = None,
    adapter_only: bool = False,
    prefix: str | None = None,
) -> None:
    """Write the model of a run as it stands: safetensors, and what ``from_pretrained`` needs beside them.

    A collective over the default group, if there is one: every rank must call it, with the same arguments, between two
    optimizer steps (in a callback's hook, or after ``fit`` while the strategy is set up). Files are gathered tensor by
    tensor and written by the ranks in turn, to a file system that all of them share: beside its own state a rank holds
    at most one file in host memory, and one tensor on its device. If one rank fails to write, all raise and nothing
    is left; a rank that dies is the strategy's to notice. A tokenizer that is an attribute of ``module`` is written
    too.

    Args:
        module: The LightningModule, or any module with Hugging Face models in it, sharded or not.
        path: A local directory that is not there yet; it appears when all of it is on disk.
        max_shard_size: Bytes of a file at most, such as ``"5GB"``; a tensor larger than that has a file of its own.
        dtype: Of the floating-point tensors; None leaves each as it is.
        adapter_only: Export the adapters of a PEFT model, for ``PeftModel.from_pretrained``.
        prefix: Of the model's names in ``module`` (``"model."``). None: that of its only Hugging Face model.

    Raises:
        CheckpointError: On every rank, if there is no such model, or one of them cannot write.
    """
    what = f"Cannot export to {path}"
    options = ExportOptions(max_shard_size, dtype, adapter_only, prefix)
    rank, state = get_rank_safe(), model_state(module)
    staging = None
    with on_every_rank(what):
        tensors = {name: TensorInfo.of(value) for name, value in state.items() if isinstance(value, Tensor)}
        plan = make_plan(tensors, describe_models(module).get(KEY, []), options)
        save = _safetensors()
        if rank == 0:
            staging = _new_directory(path)
    staging = collectives.broadcast_object(staging, 0)
    try:
        for files in _rounds(list(plan.files), get_world_size_safe()):
            mine = _gathered(plan, state, files, options.dtype)
            with on_every_rank(what):
                if mine:
                    _write(save, staging / files[rank], mine)
            mine.clear()
        with on_every_rank(what):
            if rank == 0:
                _write_texts(staging, plan.texts)
                _save_tokenizers(module, staging)
                atomic.publish(staging, Path(paths.normal(path)))
    except BaseException:
        if rank == 0:
            atomic.discard(staging)
        raise


def export_checkpoint(
    path: str, out: str, options: ExportOptions, weights_only: bool | None, progress: Callable[[int, int], None]
) -> Plan:
    """The same from a checkpoint of any form, in one process that holds one file of the result at a time.

    Not a collective.

    Args:
        path: A checkpoint.
        out: A local directory that is not there yet.
        options: What to export.
        weights_only: False runs code that the checkpoint may hold.
        progress: Called with the bytes written so far, and of all, after each file.

    Returns:
        What was written.

    Raises:
        CheckpointError: If the checkpoint is damaged, or holds nothing to export.
    """
    save = _safetensors()
    saved = open_model(path, weights_only)
    plan = make_plan(saved.tensors, saved.rest.get(KEY, []), options)
    total, written = sum(map(plan.num_bytes, plan.files)), 0
    staging = _new_directory(out)
    try:
        for file, names in plan.files.items():
            read = saved.read([plan.sources[name] for name in names])
            tensors = {name: _cast(read.pop(plan.sources[name]), options.dtype) for name in names}
            _write(save, staging / file, tensors)
            del tensors
            written += plan.num_bytes(file)
            progress(written, total)
        _write_texts(staging, plan.texts)
        atomic.publish(staging, Path(paths.normal(out)))
    except BaseException:
        atomic.discard(staging)
        raise
    return plan


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _rounds(files: list[str], world_size: int) -> Iterator[list[str]]:
    """Files in groups of as many as there are ranks."""
    for start in range(0, len(files), world_size):
        yield files[start : start + world_size]


def _gathered(plan: Plan, state: dict[str, Any], files: list[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of this rank's one of ``files``, in host memory; empty where it has none. A collective."""
    mine: dict[str, Tensor] = {}
    for owner, file in enumerate(files):
        for name in plan.files[file]:
            tensor = _cast(state[plan.sources[name]].detach(), dtype)
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if owner == get_rank_safe():
                mine[name] = whole.cpu()
    return mine


def _safetensors() -> Callable[..., None]:
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "exporting needs the package safetensors: pip install 'lightning-automodel[export]'"
        ) from error
    return save_file


def _new_directory(path: str | Path) -> Path:
    """Make a directory to write in, beside what it is to become."""
    if not paths.is_local(str(path)):
        raise CheckpointError(f"{path} is not local: export to a local directory, and upload that")
    target = Path(paths.normal(path))
    if target.exists():
        raise CheckpointError(f"{target} exists: remove it, or choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(atomic.unfinished_name())
    staging.mkdir()
    return staging


def _write(save: Callable[..., None], path: Path, tensors: dict[str, Tensor]) -> None:
    save(_apart(tensors), path, metadata={"format": "pt"})
    _sync(path)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` such that no two share memory, which safetensors refuses: ties that no configuration tells of."""
    apart: dict[str, Tensor] = {}
    known: set[int] = set()
    for name, tensor in tensors.items():
        is_shared = tensor.untyped_storage().data_ptr() in known
        apart[name] = tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()
        known.add(apart[name].untyped_storage().data_ptr())
    return apart


def _write_texts(folder: Path, texts: dict[str, Any]) -> None:
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        _sync(folder / name)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _save_tokenizers(module: nn.Module, folder: Path) -> None:
    for value in vars(module).values():
        if hasattr(value, "save_pretrained") and hasattr(value, "decode"):
            value.save_pretrained(folder)
