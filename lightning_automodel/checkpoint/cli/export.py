"""Exporting a model as consolidated safetensors in the layout that Hugging Face's ``from_pretrained`` reads.

torch's ``HuggingFaceStorageWriter`` (2.13 to 2.15) is not used. From shards, it writes all of them first and then one
rank merges them, which turns tensors without dimensions into zeros and leaves out the format that ``from_pretrained``
looks for. From whole tensors, it needs the whole model in the memory of one process.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from lightning_automodel.checkpoint import atomic, paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank
from lightning_automodel.checkpoint.hugging_face import KEY, Description, describe_models
from lightning_automodel.checkpoint.reading import open_checkpoint
from lightning_automodel.checkpoint.state_dict import model_state
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank

_PATIENCE = timedelta(minutes=30)  # the default of torch's process groups


def export_hugging_face(
    module: nn.Module,
    path: str | Path,
    *,
    max_shard_size: str | int = "5GB",
    dtype: torch.dtype | None = None,
    adapter_only: bool = False,
    prefix: str | None = None,
) -> None:
    """Write a run's model in its present state: safetensors, and what ``from_pretrained`` needs besides.

    A collective over the default group, if there is one: every rank must call it, with the same arguments, between two
    optimizer steps (in a callback's hook, or after ``fit``, ``validate`` or ``test``). Files are gathered tensor by
    tensor and written by rank 0, which holds at most one of them in host memory, and one tensor on its device. If it
    fails to write, all raise and nothing is left. A tokenizer that is an attribute of ``module`` is written too.

    Args:
        module: The LightningModule, or any module with Hugging Face models in it, sharded or not.
        path: A local directory that does not exist yet; it appears when all of it is on disk.
        max_shard_size: Largest size of a file, such as ``"5GB"``, or bytes; a larger tensor has a file of its own.
        dtype: Dtype of the exported floating-point tensors; None keeps each tensor's own.
        adapter_only: Export the adapters of a PEFT model, for ``PeftModel.from_pretrained``.
        prefix: Prefix of the model's names in ``module``, such as ``"model."``; None for its only Hugging Face model.

    Raises:
        CheckpointError: On every rank, if there is no such model, or one of them cannot write.
        RuntimeError: If not every rank calls it; rank 0 names the missing ranks.
    """
    collectives.named_barrier("export_hugging_face", _PATIENCE)
    state = model_state(module)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    tokenizers = [
        each for each in vars(module).values() if hasattr(each, "save_pretrained") and hasattr(each, "decode")
    ]

    def plan() -> Plan:
        models = describe_models(module).get(KEY, [])
        return make_plan(tensors, models, max_shard_size, dtype, adapter_only, prefix)

    def gathered(names: list[str], keep: bool) -> dict[str, Tensor]:
        found = {}
        for name in names:
            tensor = _cast(state[name].detach(), dtype)
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if keep:
                found[name] = whole.cpu()
        return found

    _export(path, plan, gathered, tokenizers)


def export_checkpoint(path: str, out: str, weights_only: bool | None, **options: Any) -> None:
    """Export from a checkpoint of any form, in one process that holds one file of the result at a time.

    ``options`` are those of :func:`export_hugging_face`. Runs code that the checkpoint may hold if ``weights_only`` is
    False.
    """
    saved = open_checkpoint(path, weights_only)
    tensors = {name: entry for name, entry in saved.model.items() if entry is not None}

    def plan() -> Plan:
        try:
            return make_plan(tensors, saved.rest.get(KEY, []), **options)
        except (AttributeError, KeyError, RecursionError, TypeError) as error:
            raise CheckpointError(
                f"its {KEY!r}, which describes Hugging Face models, is not in the form that this release reads"
            ) from error

    def read(names: list[str], keep: bool) -> dict[str, Tensor]:
        return {name: _cast(tensor, options["dtype"]) for name, tensor in saved.read_model(names).items()}

    _export(out, plan, read, [])


def _export(
    path: str | Path,
    make: Callable[[], "Plan"],
    gather: Callable[[list[str], bool], dict[str, Tensor]],
    tokenizers: list[Any],
) -> None:
    """Write the planned files on rank 0, one at a time.

    ``gather(names, keep)`` is a collective that returns the tensors on ranks with ``keep``.
    """
    what = f"Cannot export to {path}"
    rank = group_rank()
    folder = None
    with on_every_rank(what):
        plan, (_, save) = make(), _libraries()
        if rank == 0:
            folder = paths.new_local_target(path).with_name(atomic.temporary_name())
            folder.mkdir()
    folder = collectives.broadcast_object(folder, 0)
    try:
        for file, sources in tqdm(plan.files.items(), "exporting", disable=None if rank == 0 else True):
            tensors = gather(list(sources.values()), rank == 0)
            with on_every_rank(what):
                if rank == 0:
                    _write(save, folder / file, {name: tensors.pop(source) for name, source in sources.items()})
        with on_every_rank(what):
            if rank == 0:
                for name, content in plan.texts.items():
                    (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
                    atomic.sync(folder / name)
                for tokenizer in tokenizers:
                    tokenizer.save_pretrained(folder)
                atomic.replace(folder, Path(paths.normalize(path)))
    except BaseException:
        if rank == 0:
            atomic.discard(folder)
        raise


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _libraries() -> tuple[Callable[..., Any], Callable[..., None]]:
    """What splits a model into files, and what writes one."""
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise CheckpointError(f"exporting needs {error.name}: pip install 'lightning-automodel[export]'") from error
    return split_state_dict_into_shards_factory, save_file


def _write(save: Callable[..., None], path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file. safetensors refuses tensors that share memory, as ties do that the configuration does not list."""
    apart: dict[str, Tensor] = {}
    known: set[int] = set()
    for name, tensor in tensors.items():
        is_shared = tensor.untyped_storage().data_ptr() in known
        apart[name] = tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()
        known.add(apart[name].untyped_storage().data_ptr())
    save(apart, path, metadata={"format": "pt"})
    atomic.sync(path)


# --- What is written where --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What to write: for each file, names in the LightningModule by exported name, and for JSON files their content."""

    files: dict[str, dict[str, str]]
    texts: dict[str, Any]


def make_plan(
    tensors: Mapping[str, Tensor],
    models: list[Description],
    max_shard_size: str | int,
    dtype: torch.dtype | None,
    adapter_only: bool,
    prefix: str | None,
) -> Plan:
    """Plan the files for ``tensors``, the state (perhaps without values) of a module with these ``models``."""
    model, prefix = _chosen(tensors, models, prefix)
    if adapter_only:
        sources, config = _adapters(tensors, model, prefix)
        return Plan({"adapter_model.safetensors": sources}, {"adapter_config.json": config})
    sources = _model_sources(tensors, model, prefix)
    dtypes = {name: _cast(tensors[source].to("meta"), dtype).dtype for name, source in sources.items()}
    sizes = {name: tensors[source].numel() * dtypes[name].itemsize for name, source in sources.items()}
    split = _libraries()[0](
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    files = {file: {name: sources[name] for name in names} for file, names in split.filename_to_tensors.items()}
    texts: dict[str, Any] = {}
    if split.is_sharded:
        texts["model.safetensors.index.json"] = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    if model is not None:
        config = dict(model["config"])
        if floating := [each for each in dtypes.values() if each.is_floating_point]:
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config[key] = str(Counter(floating).most_common(1)[0][0]).removeprefix("torch.")
        texts["config.json"] = config
        if "generation_config" in model:
            texts["generation_config.json"] = model["generation_config"]
    return Plan(files, texts)


def _chosen(
    tensors: Mapping[str, Tensor], models: list[Description], prefix: str | None
) -> tuple[Description | None, str]:
    """The model to export, if it is described, and its prefix."""
    if prefix is not None:
        prefix = prefix if prefix == "" or prefix.endswith(".") else f"{prefix}."
        return next((model for model in models if model["prefix"] == prefix), None), prefix
    if len(models) == 1:
        return models[0], models[0]["prefix"]
    if models:
        known = ", ".join(f"{model['prefix']} ({model['class']})" for model in models)
        raise CheckpointError(f"there are {len(models)} Hugging Face models: choose one by its prefix ({known})")
    first = sorted({f"{name.partition('.')[0]}." for name in tensors if "." in name})
    raise CheckpointError(
        "it does not describe a Hugging Face model (AutomodelStrategy saves that with one). Give the prefix of what to"
        f" export, such as {', '.join(first[:5]) or 'an empty one'}, and add config.json yourself"
    )


def _model_sources(tensors: Mapping[str, Tensor], model: Description | None, prefix: str) -> dict[str, str]:
    if model is not None and "peft" in model:
        raise CheckpointError(
            f"{prefix} is a {model['class']} with PEFT adapters, which from_pretrained would not read as one model:"
            " export the adapters (adapter_only), and merge them with PEFT's merge_and_unload if you want one model"
        )
    tied = set(model["tied"]) if model is not None else set()
    sources = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    sources = {name: source for name, source in sources.items() if name not in tied}
    if not sources:
        raise CheckpointError(
            f"no tensor's name begins with {prefix!r}; there are, for example, {', '.join(list(tensors)[:3])}"
        )
    return sources


def _adapters(
    tensors: Mapping[str, Tensor], model: Description | None, prefix: str
) -> tuple[dict[str, str], dict[str, Any]]:
    if model is None or not model.get("peft", {}).get("names"):
        raise CheckpointError(f"{prefix} has no PEFT adapters: export it without adapter_only")
    sources = {name: f"{prefix}{source}" for name, source in model["peft"]["names"].items()}
    if missing := [source for source in sources.values() if source not in tensors]:
        raise CheckpointError(f"the adapters lack {len(missing)} entries, such as {missing[0]}")
    return sources, model["peft"]["config"]
