"""Hugging Face models in a LightningModule: described in each checkpoint, and exported from it or from a run.

Nothing here imports transformers: exporting a checkpoint must not need it. torch's ``HuggingFaceStorageWriter`` (2.13
to 2.15) is not used: merging shards, it turns tensors without dimensions into zeros and leaves out the format that
``from_pretrained`` looks for.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import CheckpointError, on_every_rank, on_this_rank
from lightning_automodel.checkpoint.reading import open_checkpoint
from lightning_automodel.checkpoint.state_dict import model_state
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank
from lightning_automodel.torch_internals import uncompiled, without_wrappers

KEY = "hugging_face"
"""Key of the list of descriptions in a checkpoint."""

Description = dict[str, Any]
"""Description of one model, plain data, as :func:`_described` makes it."""

_PATIENCE = timedelta(minutes=30)  # the default of torch's process groups


def describe_models(module: nn.Module) -> dict[str, list[Description]]:
    """What to add to a checkpoint of ``module``; empty if it has no Hugging Face model. Not a collective."""
    found: list[Description] = []
    for prefix, model in _models(module):
        try:
            found.append(_described(prefix, model))
        except Exception as error:  # of any library; a save must not fail for it
            rank_zero_warn(
                f"Checkpoints do not describe the Hugging Face model {prefix} ({type(error).__name__}: {error}): they"
                " are complete, but exporting from them needs the prefix of its names, and config.json from elsewhere."
            )
    return {KEY: found} if found else {}


def _models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost Hugging Face models below ``module``, by prefix."""
    for name, child in module.named_children():
        place = without_wrappers(f"{prefix}{name}.")
        if callable(getattr(getattr(child, "config", None), "to_dict", None)) and hasattr(child, "save_pretrained"):
            yield place, uncompiled(child)
        else:
            yield from _models(child, place)


def _described(prefix: str, model: Any) -> Description:
    with_adapters = bool(getattr(model, "peft_config", None))
    base = model.get_base_model() if with_adapters and hasattr(model, "get_base_model") else model
    # FSDP2 gives each module that it shards a subclass of its class, with this prefix in its name.
    name = type(base).__name__.removeprefix("FSDP")
    described: Description = {
        "prefix": prefix,  # of its names in the LightningModule, with a dot at the end
        "class": name,
        "config": {**_plain(base.config), "architectures": [name]},
        "tied": _tied(base),  # names below the prefix of parameters that from_pretrained sets from others
    }
    if callable(getattr(getattr(base, "generation_config", None), "to_dict", None)):
        described["generation_config"] = _plain(base.generation_config)
    if with_adapters:
        described["peft"] = _adapters(model)
    return described


def _plain(config: Any) -> Any:
    """A configuration as ``save_pretrained`` writes it, without defaults where it can leave them out."""
    content = getattr(config, "to_diff_dict", config.to_dict)()
    text = json.dumps(content, default=lambda value: sorted(value) if isinstance(value, Set) else str(value))
    return json.loads(text)


def _parameters(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Parameters by their names in checkpoints; tied ones under each of their names."""
    return {without_wrappers(name): value for name, value in model.named_parameters(remove_duplicate=False)}


def _tied(model: nn.Module) -> list[str]:
    parameters = _parameters(model)
    return [
        name
        for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if name in parameters and parameters[name] is parameters.get(source)
    ]


def _adapters(model: Any) -> dict[str, Any]:
    """Describe the active adapter. PEFT itself says its entries, and their names in a file, which lead to ours."""
    from_transformers = not hasattr(model, "get_base_model")
    adapter = model.active_adapters()[0] if from_transformers else model.active_adapter
    config = model.peft_config[adapter]
    # Buffers too: VeRA's projections.
    names = {name: name for name in map(without_wrappers, model.state_dict())}
    own: dict[str, Any] = {}
    if not config.is_prompt_learning:
        # Adapters of embeddings are saved with the embeddings; to find out by itself, PEFT would use the network.
        targets = getattr(config, "target_modules", None) or ()
        own = sys.modules["peft"].get_peft_model_state_dict(
            model, names, adapter, save_embedding_layers="embed_tokens" in targets or "lm_head" in targets
        )
    prefix = "base_model.model." if from_transformers else ""
    return {
        "config": {**_plain(config), "inference_mode": True},
        "names": {f"{prefix}{name}": source for name, source in own.items()},
    }


# --- Exporting -----------------------------------------------------------------------------------------------------


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
    optimizer steps (in a callback's hook, or after ``fit``, ``validate`` or ``test``). Tensors are gathered one by one
    and written by rank 0, which holds the whole model in host memory. If it fails to write, all raise and nothing is
    left.

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
    what, is_writer = f"Cannot export to {path}", group_rank() == 0
    state = {name: value.detach() for name, value in model_state(module).items() if isinstance(value, Tensor)}
    with on_every_rank(what):
        sources, texts = _planned(state, describe_models(module).get(KEY, []), adapter_only, prefix)
        if is_writer:
            paths.new_local_target(path)
    tensors: dict[str, Tensor] = {}
    for name, source in sources.items():
        tensor = _cast(state[source], dtype)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_writer:
            tensors[name] = whole.to("cpu", copy=True)  # of two that share memory, only one would be written
    with on_every_rank(what):
        if is_writer:
            _write(path, tensors, texts, max_shard_size)


def export_checkpoint(
    path: str,
    out: str,
    weights_only: bool | None,
    max_shard_size: str | int,
    dtype: torch.dtype | None,
    adapter_only: bool,
    prefix: str | None,
) -> None:
    """Export from a checkpoint of any form, in one process that holds the whole model.

    See :func:`export_hugging_face`. Runs code that the checkpoint may hold if ``weights_only`` is False.
    """
    saved, what = open_checkpoint(path, weights_only), f"Cannot export to {out}"
    with on_this_rank(what):
        entries = {name: entry for name, entry in saved.model.items() if entry is not None}
        sources, texts = _planned(entries, saved.rest.get(KEY, []), adapter_only, prefix)
        paths.new_local_target(out)
    found = saved.read_model(sources.values())
    with on_this_rank(what):
        tensors = {name: _cast(found[source], dtype) for name, source in sources.items()}
        _write(out, tensors, texts, max_shard_size)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _write(
    path: str | Path, tensors: dict[str, Tensor], texts: dict[str, dict[str, Any]], max_shard_size: str | int
) -> None:
    try:
        from huggingface_hub import save_torch_state_dict
    except ModuleNotFoundError as error:
        raise CheckpointError(f"exporting needs {error.name}: pip install 'lightning-automodel[export]'") from error
    is_adapter = "adapter_config.json" in texts
    if "config.json" in texts and (dtypes := [each.dtype for each in tensors.values() if each.is_floating_point()]):
        config = texts["config.json"]
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(Counter(dtypes).most_common(1)[0][0]).removeprefix("torch.")
    target = paths.new_local_target(path)
    folder = target.with_name(paths.temporary_name())
    folder.mkdir()
    try:
        save_torch_state_dict(
            tensors,
            folder,
            filename_pattern=f"{'adapter_model' if is_adapter else 'model'}{{suffix}}.safetensors",
            max_shard_size=sys.maxsize if is_adapter else max_shard_size,  # PEFT reads one file
        )
        for name, content in texts.items():
            (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        for file in folder.iterdir():
            paths.sync(file)
        paths.replace(folder, target)
    except BaseException:
        paths.discard(folder)
        raise


def _planned(
    tensors: Mapping[str, Tensor], models: list[Description], adapter_only: bool, prefix: str | None
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """What to write of a module's state: its names in ``tensors`` by exported name, and the content of JSON files."""
    model, prefix = _chosen(tensors, models, prefix)
    adapters: dict[str, Any] = {} if model is None else model.get("peft", {})
    if adapter_only:
        if not adapters.get("names"):
            raise CheckpointError(f"{prefix} has no PEFT adapters: export it without adapter_only")
        sources = {name: f"{prefix}{source}" for name, source in adapters["names"].items()}
        return sources, {"adapter_config.json": adapters["config"]}
    if model is not None and adapters:
        raise CheckpointError(
            f"{prefix} is a {model['class']} with PEFT adapters, which from_pretrained would not read as one model:"
            " export the adapters (adapter_only), and merge them with PEFT's merge_and_unload if you want one model"
        )
    sources = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    if not sources:
        raise CheckpointError(
            f"no tensor's name begins with {prefix!r}; there are, for example, {', '.join(list(tensors)[:3])}"
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
