"""What an export consists of: which tensors under which names in which files, and what else is written beside them."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.hugging_face import Description
from lightning_automodel.checkpoint.reading import TensorInfo
from lightning_automodel.checkpoint.splitting import in_portions, number_of_bytes


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and how.

    Attributes:
        max_shard_size: Bytes of a file at most, such as ``"5GB"``; a tensor larger than that has a file of its own.
        dtype: Of the floating-point tensors; None leaves each as it is.
        adapter_only: Export the adapters of a PEFT model, which are one file.
        prefix: Of the model's names in the LightningModule (``"model."``). None: that of its only Hugging Face model.
    """

    max_shard_size: str | int = "5GB"
    dtype: torch.dtype | None = None
    adapter_only: bool = False
    prefix: str | None = None


@dataclass(frozen=True)
class Plan:
    """What is written where.

    Attributes:
        sources: Names in the LightningModule by exported name.
        tensors: As they will be, by exported name.
        files: Exported names by file.
        texts: Content of JSON files by name.
    """

    sources: dict[str, str]
    tensors: dict[str, TensorInfo]
    files: dict[str, list[str]]
    texts: dict[str, Any]

    def num_bytes(self, file: str) -> int:
        """Of all tensors in a file."""
        return sum(self.tensors[name].num_bytes for name in self.files[file])


def make_plan(tensors: Mapping[str, TensorInfo], models: list[Description], options: ExportOptions) -> Plan:
    """Decide what is written where.

    Args:
        tensors: Of the LightningModule's state, by name.
        models: Its Hugging Face models.
        options: What to export.

    Raises:
        CheckpointError: If there is nothing to export, or more than one thing.
    """
    model, prefix = _chosen(tensors, models, options.prefix)
    if options.adapter_only:
        sources = _adapter_sources(tensors, model, prefix)
    else:
        sources = _model_sources(tensors, model, prefix)
    planned = {name: _cast_info(tensors[source], options.dtype) for name, source in sources.items()}
    sizes = {name: info.num_bytes for name, info in planned.items()}
    if options.adapter_only:
        files = {"adapter_model.safetensors": list(sizes)}
        return Plan(sources, planned, files, {"adapter_config.json": model["peft"]["config"]} if model else {})
    files = _named(in_portions(sizes, number_of_bytes(options.max_shard_size)))
    return Plan(sources, planned, files, {**_configs(model, planned), **_index(files, sizes)})


def _chosen(
    tensors: Mapping[str, TensorInfo], models: list[Description], prefix: str | None
) -> tuple[Description | None, str]:
    """The model that is meant, if it is described, and its prefix."""
    if prefix is not None:
        prefix = prefix if prefix == "" or prefix.endswith(".") else f"{prefix}."
        return next((model for model in models if model["prefix"] == prefix), None), prefix
    if len(models) == 1:
        return models[0], models[0]["prefix"]
    if models:
        known = ", ".join(f"{model['prefix']} ({model['class']})" for model in models)
        raise CheckpointError(f"there are {len(models)} Hugging Face models: choose one by its prefix, of {known}")
    first = sorted({f"{name.partition('.')[0]}." for name in tensors if "." in name})
    raise CheckpointError(
        "there is no description of a Hugging Face model, which this strategy saves where the LightningModule has one:"
        f" give the prefix of what to export, such as {', '.join(first[:5]) or 'an empty one'}; config.json is then"
        " yours to add"
    )


def _model_sources(tensors: Mapping[str, TensorInfo], model: Description | None, prefix: str) -> dict[str, str]:
    if model is not None and "peft" in model:
        raise CheckpointError(
            f"{prefix} is a {model['class']} with PEFT adapters, which from_pretrained would not read as one model:"
            " export the adapters (adapter_only), and merge them with PEFT's merge_and_unload where you want one"
        )
    tied = set(model["tied"]) if model is not None else set()
    sources = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    sources = {name: source for name, source in sources.items() if name not in tied}
    if not sources:
        raise CheckpointError(f"there are no tensors under {prefix!r}, only such as {', '.join(list(tensors)[:3])}")
    return sources


def _adapter_sources(tensors: Mapping[str, TensorInfo], model: Description | None, prefix: str) -> dict[str, str]:
    names = model["peft"]["names"] if model is not None and "peft" in model else {}
    sources = {name: f"{prefix}{source}" for name, source in names.items()}
    if not sources:
        raise CheckpointError(f"{prefix} has no adapters of PEFT that are kept by name: export the model without them")
    if missing := [source for source in sources.values() if source not in tensors]:
        raise CheckpointError(f"the adapters lack {missing[0]}, and {len(missing)} entries in all")
    return sources


def _configs(model: Description | None, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    if model is None:
        return {}
    floating = [info.dtype for info in tensors.values() if info.dtype.is_floating_point]
    config = dict(model["config"])
    if floating:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(Counter(floating).most_common(1)[0][0]).removeprefix("torch.")
    generation = {"generation_config.json": model["generation_config"]} if "generation_config" in model else {}
    return {"config.json": config, **generation}


def _named(portions: list[list[str]]) -> dict[str, list[str]]:
    if len(portions) == 1:
        return {"model.safetensors": portions[0]}
    count = len(portions)
    return {f"model-{index:05d}-of-{count:05d}.safetensors": names for index, names in enumerate(portions, 1)}


def _index(files: dict[str, list[str]], sizes: dict[str, int]) -> dict[str, Any]:
    if len(files) == 1:
        return {}
    places_of = {name: file for file, names in files.items() for name in names}
    return {
        "model.safetensors.index.json": {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places_of},
    }


def _cast_info(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return dataclasses.replace(info, dtype=dtype) if dtype is not None and info.dtype.is_floating_point else info
