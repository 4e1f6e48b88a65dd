"""Exports for Hugging Face, tensor by tensor: by the ranks of a run, or by one process from a checkpoint.

torch's ``HuggingFaceStorageWriter`` (2.13 to 2.15) is not used: when it merges shards, it turns
zero-dimensional tensors into zeros and omits the format that ``from_pretrained`` looks for.
"""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.hugging_face import KEY, Description, describe_models
from lightning_automodel.checkpoint.reading import open_checkpoint
from lightning_automodel.checkpoint.safetensors_files import (
    SafetensorsFile,
    index_of,
    num_bytes_of,
    owners_of,
    plan_files,
)
from lightning_automodel.checkpoint.state_dict import model_state
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank

_PATIENCE = timedelta(minutes=30)  # the default of torch's process groups


@dataclass(frozen=True)
class _Plan:
    """The content of an export.

    Attributes:
        sources: Names in the module's state, by exported name.
        files: The files of tensors.
        texts: Content of the JSON files, by file name.
    """

    sources: Mapping[str, str]
    files: list[SafetensorsFile]
    texts: Mapping[str, Any]


def export_hugging_face(
    module: nn.Module,
    path: str | Path,
    *,
    max_shard_size: str | int = "5GB",
    dtype: torch.dtype | None = None,
    adapter_only: bool = False,
    prefix: str | None = None,
) -> None:
    """Write a run's model as it is now: safetensors, and the other files that ``from_pretrained`` needs.

    A collective over the default group, if there is one: every rank must call it with the same arguments,
    between two optimizer steps (in a callback's hook, or after ``fit``, ``validate`` or ``test``). It
    gathers the tensors of a sharded model one by one, so a rank holds one whole tensor beside its part of
    the model. Each rank that sees rank 0's folder writes a share of the files; rank 0 writes a replicated
    model. If any rank fails to write, all ranks raise and no files remain. The callback ``ModelExport``
    calls this when a fit ends.

    Args:
        module: The LightningModule, or any module with Hugging Face models in it, sharded or not.
        path: A local directory that does not exist yet; it appears when all of it is on disk.
        max_shard_size: Largest size of a file, such as ``"5GB"``, or in bytes; a larger tensor gets its own
            file.
        dtype: Dtype of the exported floating-point tensors; None keeps each tensor's own.
        adapter_only: Export the adapters of a PEFT model, for ``PeftModel.from_pretrained``.
        prefix: Prefix of the model's names in ``module``, such as ``"model."``; None if ``module`` has only
            one Hugging Face model.

    Raises:
        CheckpointError: On every rank, if there is no such model, or one of the ranks cannot write.
        RuntimeError: If not every rank calls it; rank 0 names the missing ranks.
    """
    collectives.named_barrier("export_hugging_face", _PATIENCE)
    what = f"Cannot export to {path}"
    is_first = group_rank() == 0
    folder = Path()
    try:
        with on_every_rank(what):
            state = _tensors_of(module)
            plan = _planned(state, _descriptions(module), max_shard_size, dtype, adapter_only, prefix)
            if is_first:
                target = paths.new_local_target(path)
                folder = target.with_name(paths.temporary_name())
                paths.mark(str(folder), plan.files[0].name)
        folder_of_all = collectives.broadcast_object(folder, 0)
        owners = _owners(plan, state, folder_of_all)
        failure = _write_share(plan, owners, state, folder_of_all)
        with on_every_rank(what):
            if failure is not None:
                raise failure
            for file, owner in zip(plan.files, owners, strict=True):
                if owner == group_rank():
                    file.sync(folder_of_all)
        with on_every_rank(what):
            if is_first:
                _finish(plan, folder, target)
    except BaseException:
        if is_first and folder.name:
            paths.discard(folder)
        raise


def check_export(module: nn.Module, path: str | Path, **options: Any) -> None:
    """Raise :class:`CheckpointError` if :func:`export_hugging_face` would refuse to begin. A collective."""
    with on_every_rank(f"Cannot export to {path}"):
        _planned(_tensors_of(module), _descriptions(module), **options)
        if group_rank() == 0:
            paths.new_local_target(path)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model_state(module).items() if isinstance(value, Tensor)}


def _descriptions(module: nn.Module) -> list[Description]:
    return describe_models(module).get(KEY, [])


def _owners(plan: _Plan, state: Mapping[str, Tensor], folder: Path) -> list[int]:
    """The rank that writes each file, alike on all ranks. A collective."""
    if not any(isinstance(state[source], DTensor) for source in plan.sources.values()):
        return [0] * len(plan.files)  # rank 0 has all of it, and its buffers are those that are exported
    # What a rank wrote on another node's disk would be lost.
    sees_folder = group_rank() == 0
    if not sees_folder:
        with contextlib.suppress(OSError):
            sees_folder = paths.is_seen(str(folder), plan.files[0].name)
    ranks = [rank for rank, sees in enumerate(collectives.gather_objects(sees_folder)) if sees]
    return owners_of(plan.files, ranks)


def _write_share(
    plan: _Plan,
    owners: list[int],
    state: Mapping[str, Tensor],
    folder: Path,
) -> Exception | None:
    """Write this rank's files, and gather all tensors with the others. A collective.

    Returns:
        The error of this rank's first failed write. The rank goes on gathering: the others wait for it
        there.
    """
    failure: Exception | None = None
    for file, owner in zip(plan.files, owners, strict=True):
        for name, planned in file.tensors.items():
            whole = _whole(state[plan.sources[name]], planned.dtype, owner)
            if owner == group_rank() and failure is None:
                try:
                    file.append(folder, name, whole)
                except Exception as error:
                    failure = error
            del whole  # before the next one is gathered
    return failure


def _whole(tensor: Tensor, dtype: torch.dtype, owner: int) -> Tensor:
    """The whole of a sharded tensor, on ``owner``; rank 0's value of any other tensor. A collective."""
    if isinstance(tensor, DTensor):
        return collectives.gather_to(cast(DTensor, tensor.to(dtype)), owner)
    if owner == 0:
        return tensor
    # Buffers may differ between the ranks.
    return collectives.broadcast_value(tensor, 0, _PATIENCE)


def export_checkpoint(path: str, out: str, weights_only: bool | None, **options: Any) -> None:
    """Export a checkpoint of either form, in one process that holds one tensor at a time. Not a collective.

    See :func:`export_hugging_face` for what is written, and for ``options``. A file is mapped, so the system
    can evict the parts that were read. If ``weights_only`` is False, this runs code that the checkpoint may
    hold.
    """
    saved = open_checkpoint(path, weights_only)
    what = f"Cannot export to {out}"
    with on_this_rank(what):
        entries = {name: entry for name, entry in saved.model.items() if entry is not None}
        plan = _planned(entries, saved.rest.get(KEY, []), **options)
        target = paths.new_local_target(out)
        folder = target.with_name(paths.temporary_name())
        folder.mkdir()
    try:
        for file in plan.files:
            for name in file.tensors:
                tensor = saved.read_model_alone(plan.sources[name])
                with on_this_rank(what):
                    file.append(folder, name, tensor)
                del tensor  # before the next one is read
        with on_this_rank(what):
            for file in plan.files:
                file.sync(folder)
            _finish(plan, folder, target)
    except BaseException:
        paths.discard(folder)
        raise


def _finish(plan: _Plan, folder: Path, target: Path) -> None:
    """Write the JSON files, then move the ``folder``, whose tensors are on disk already, to ``target``."""
    for name, content in plan.texts.items():
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (folder / name).write_text(text)
        paths.sync(folder / name)
    paths.new_local_target(target)
    paths.replace(folder, target)


def _planned(
    tensors: Mapping[str, Tensor],
    models: list[Description],
    max_shard_size: str | int,
    dtype: torch.dtype | None,
    adapter_only: bool,
    prefix: str | None,
) -> _Plan:
    """Decide what to write of a module's state ``tensors``."""
    sources, texts = _contents(tensors, models, adapter_only, prefix)
    planned = {name: _cast(tensors[source], dtype) for name, source in sources.items()}
    stem = "model"
    max_bytes = num_bytes_of(max_shard_size)
    if adapter_only:
        stem = "adapter_model"
        max_bytes = sys.maxsize  # PEFT reads one file
    files = plan_files(planned, stem, max_bytes)
    dtypes = Counter(tensor.dtype for tensor in planned.values() if tensor.is_floating_point())
    if "config.json" in texts and dtypes:
        config = texts["config.json"]
        if "torch_dtype" in config:
            key = "torch_dtype"
        else:
            key = "dtype"
        config[key] = str(dtypes.most_common(1)[0][0]).removeprefix("torch.")
    if len(files) > 1:
        texts = {**texts, f"{stem}.safetensors.index.json": index_of(files)}
    return _Plan(sources, files, texts)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A meta tensor of the size and dtype that ``tensor`` is exported with."""
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    return torch.empty(tensor.size(), dtype=dtype, device="meta")


def _contents(
    tensors: Mapping[str, Tensor], models: list[Description], adapter_only: bool, prefix: str | None
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The names in ``tensors`` of what to write, by exported name, and the content of the JSON files."""
    model, prefix = _chosen(tensors, models, prefix)
    adapters: dict[str, Any] = (model or {}).get("peft", {})
    if adapter_only:
        if not adapters.get("names"):
            raise CheckpointError(
                f"{prefix} has no PEFT adapters: export it without --adapter-only (adapter_only)"
            )
        sources = {name: f"{prefix}{source}" for name, source in adapters["names"].items()}
        return sources, {"adapter_config.json": adapters["config"]}
    if model is not None and adapters:
        raise CheckpointError(
            f"{prefix} is a {model['class']} with PEFT adapters, which from_pretrained would not read as one"
            " model: export the adapters (--adapter-only on the command line, adapter_only=True in Python),"
            " and merge them with PEFT's merge_and_unload if you want one model"
        )
    sources = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    if not sources:
        raise CheckpointError(
            f"no tensor's name begins with {prefix!r}; there are, for example,"
            f" {', '.join(list(tensors)[:3])}"
        )
    if model is None:
        return sources, {}
    texts = {"config.json": dict(model["config"])}
    if "generation_config" in model:
        texts["generation_config.json"] = model["generation_config"]
    return {name: source for name, source in sources.items() if name not in model["tied"]}, texts


def _chosen(
    tensors: Mapping[str, Tensor], models: list[Description], prefix: str | None
) -> tuple[Description | None, str]:
    """The prefix of the model to export, and the model's description if there is one."""
    if prefix is not None:
        if prefix and not prefix.endswith("."):
            prefix = f"{prefix}."
        return next((model for model in models if model["prefix"] == prefix), None), prefix
    if len(models) == 1:
        return models[0], models[0]["prefix"]
    if models:
        known = ", ".join(f"{model['prefix']} ({model['class']})" for model in models)
        raise CheckpointError(
            f"there are {len(models)} Hugging Face models: choose one by its prefix ({known})"
        )
    first = sorted({f"{name.partition('.')[0]}." for name in tensors if "." in name})
    raise CheckpointError(
        "it does not describe a Hugging Face model (AutomodelStrategy saves that with one). Give the prefix"
        f" of what to export, such as {', '.join(first[:5]) or 'an empty one'}, and add config.json yourself"
    )
