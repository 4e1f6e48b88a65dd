"""For other programs: one file of a directory, and models for Hugging Face.

The ranks gather a model on rank 0, where its own ``save_pretrained`` writes it. Tensors are mapped to temporary files
beside the target, so that the system may evict what was read or written from memory.

torch's ``HuggingFaceStorageWriter`` (2.13 to 2.15) is not used: it writes zero-dimensional tensors as zeros,
and fails on integers and on tied weights.
"""

import json
import os
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.shard_directory import open_checkpoint
from lightning_automodel.checkpoint.single_file import save_file
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.internals.torch import without_wrappers
from lightning_automodel.sharding.units import is_a, outermost

MAX_SHARD_SIZE = "5GB"
_PATIENCE = timedelta(minutes=30)  # the default of torch's process groups


def consolidate(path: str, out: str, weights_only: bool | None) -> None:
    """Write a directory of shards as one file, like Lightning's other strategies. Not a collective.

    torch's ``dcp_to_torch_save`` holds the whole checkpoint, runs code that it may contain, and
    drops everything but the shards. Optimizer states keep parameter names as ids; torch's optimizers match
    ids by order.
    """
    target = paths.new_local_target(out)
    _, shards = open_checkpoint(path, weights_only)
    if shards is None:
        raise CheckpointError(f"{path} is not a directory of shards: there is nothing to consolidate")
    save_file(shards.read_all(shards.tree, partial(_new_tensor, target.parent)), str(target))


def _new_tensor(folder: Path, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor mapped to a new file in ``folder``, whose name goes at once, and whose content with the tensor."""
    if size.numel() == 0:
        return torch.empty(size, dtype=dtype)
    # The mapping keeps it alive.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=paths.TEMPORARY) as file:
        if hasattr(os, "posix_fallocate"):  # a full disk raises here, not as SIGBUS later
            os.posix_fallocate(file.fileno(), 0, size.numel() * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=size.numel(), dtype=dtype).view(size)


def export_hugging_face(
    module: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    adapter_only: bool = False,
    prefix: str | None = None,
) -> None:
    """Write a run's model as it is now, by the ``save_pretrained`` of transformers or PEFT.

    A collective over the default group, if there is one: every rank must call it with the same
    arguments, between two optimizer steps (in a callback's hook, or after ``fit``, ``validate`` or
    ``test``). Tensors are gathered one by one, so a rank holds one whole tensor beside its part of the
    model. Rank 0 keeps them in temporary files beside ``path``, which need the model's size on that
    disk, and then writes the export. If that fails, all ranks raise and no files remain. The callback
    ``ModelExport`` calls this when a fit ends.

    Args:
        module: The LightningModule, or any module that is or has a Hugging Face model, sharded or not.
        path: A local directory that does not exist yet; it appears when all of it is on disk.
        dtype: Dtype of the exported floating-point tensors; None keeps each tensor's own.
        adapter_only: Export the adapters of a model, for ``PeftModel.from_pretrained``.
        prefix: Prefix of the model's names in ``module``, such as ``"model."``; None if ``module`` has only
            one Hugging Face model.

    Raises:
        CheckpointError: On every rank, if there is no such model, or rank 0 cannot write it.
        RuntimeError: If not every rank calls it; rank 0 names the missing ranks.
    """
    collectives.named_barrier("export_hugging_face", _PATIENCE)
    model, target = check_export(module, path, adapter_only, prefix)
    what = f"Cannot export to {path}"
    state = _gather(model, dtype, target, what)
    with on_every_rank(what):
        if target is not None:
            with tempfile.TemporaryDirectory(prefix=paths.TEMPORARY, dir=target.parent) as temporary:
                folder = Path(temporary) / "export"
                _write(model, state, folder, dtype)
                paths.replace(folder, paths.new_local_target(path))


def check_export(
    module: nn.Module, path: str | Path, adapter_only: bool, prefix: str | None, **_: Any
) -> tuple[Any, Path | None]:
    """The model that :func:`export_hugging_face` would export, and where to, on rank 0. A collective.

    Raises :class:`CheckpointError` on every rank, if it would refuse to begin.
    """
    target: Path | None = None
    with on_every_rank(f"Cannot export to {path}"):
        model = _chosen(module, prefix)
        _check(model, adapter_only)
        if group_rank() == 0:
            target = paths.new_local_target(path)
    return model, target


def _chosen(module: nn.Module, prefix: str | None) -> Any:
    """The model to export; CheckpointError if there is none, or no prefix that chooses one of several."""
    found = outermost([module], lambda child: is_a(child, "PreTrainedModel", "PeftModel"))
    names = {child: without_wrappers(name) for name, child in module.named_modules()}
    models = [(names[model], model) for model in found]
    chosen = [model for name, model in models if prefix in (None, name, f"{name}.")]
    if len(chosen) == 1:
        return chosen[0]
    known = ", ".join(f"{name}. ({type(model).__name__})" for name, model in models)
    raise CheckpointError(
        f"the models of transformers and PEFT in {type(module).__name__} are: {known or 'none'}. Choose one by its"
        " prefix (--key on the command line, prefix= in Python). from_pretrained reads no other; for torch.load,"
        " save a checkpoint and run `python -m lightning_automodel.checkpoint consolidate CHECKPOINT FILE`"
    )


def _check(model: Any, adapter_only: bool) -> None:
    """Refuse what ``save_pretrained`` would not write as asked, or only refuse after a long training."""
    name = type(model).__name__
    adapters = getattr(model, "peft_config", None) or {}
    if adapter_only != bool(adapters):
        raise CheckpointError(
            f"{name} has {list(adapters) or 'no'} PEFT adapters: export adapters alone, with --adapter-only on the"
            " command line or adapter_only=True in Python, and a whole model without, into which PEFT's"
            " merge_and_unload has merged them"
        )
    # The next two would compute with tensors of the model itself, so that rank 0 would wait for ever.
    if any(config.is_prompt_learning for config in adapters.values()):
        raise CheckpointError(
            "PEFT computes the parameters of prompt tuning when it saves them, on one rank: use"
            " data_parallel='ddp', and call the model's save_pretrained on rank 0"
        )
    if is_a(model, "PeftModel"):
        return
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "distributed_config", None):
        raise CheckpointError(
            f"{name} has a quantization_config or a distributed_config, with which transformers saves the"
            " tensors of the model and not those that are gathered: load it without, or train adapters that"
            " get_peft_model has added, and export those"
        )
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.validate(strict=True)


def _gather(
    model: nn.Module, dtype: torch.dtype | None, target: Path | None, what: str
) -> dict[str, Tensor]:
    """The model's whole tensors, mapped to files beside ``target``; none on ranks without one. A collective.

    A tensor with several names is gathered once, on all ranks alike, and stays one: ``save_pretrained``
    knows ties by that.
    """
    state = {
        without_wrappers(name): value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    gathered: dict[Tensor, Tensor] = {}
    for value in dict.fromkeys(state.values()):
        whole = collectives.full(value).detach()
        with on_every_rank(what):
            if target is not None:
                new_dtype = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
                gathered[value] = _new_tensor(target.parent, whole.shape, new_dtype).copy_(whole)
    return {name: gathered[value] for name, value in state.items() if value in gathered}


def _write(model: Any, state: dict[str, Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    """Write the model to ``folder``. Not a collective."""
    # A file is copied in memory before it is written; PEFT writes one.
    model.save_pretrained(folder, state_dict=state, max_shard_size=MAX_SHARD_SIZE)
    if dtype is not None and (path := folder / "config.json").exists():
        # from_pretrained goes by this dtype, which is that of the model in memory.
        content = json.loads(path.read_text())
        content["dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(content, indent=2) + "\n")
