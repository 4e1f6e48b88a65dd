"""Descriptions of the Hugging Face models in a LightningModule, which each checkpoint holds for exports.

Nothing here imports transformers: exporting a checkpoint must not need it.
"""

import json
import sys
from collections.abc import Iterator, Set
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_automodel.internals.torch import uncompiled, without_wrappers

KEY = "hugging_face"
"""Key of the list of descriptions in a checkpoint."""

Description = dict[str, Any]
"""Description of one model, plain data, as :func:`_described` makes it."""


def describe_models(module: nn.Module) -> dict[str, list[Description]]:
    """The entry for a checkpoint of ``module``; empty if it has no Hugging Face model. Not a collective."""
    descriptions: list[Description] = []
    for prefix, model in _models(module):
        try:
            descriptions.append(_described(prefix, model))
        except Exception as error:  # any library may raise here, and a save must not fail because of it
            rank_zero_warn(
                f"Checkpoints do not describe the Hugging Face model {prefix} ({type(error).__name__}:"
                f" {error}): they are complete, but exporting from them needs the prefix of its names, and"
                " config.json from elsewhere."
            )
    if not descriptions:
        return {}
    return {KEY: descriptions}


def _models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost Hugging Face models below ``module``, by prefix."""
    for name, child in module.named_children():
        place = without_wrappers(f"{prefix}{name}.")
        if _is_config(getattr(child, "config", None)) and hasattr(child, "save_pretrained"):
            yield place, uncompiled(child)
        else:
            yield from _models(child, place)


def _is_config(value: Any) -> bool:
    return callable(getattr(value, "to_dict", None))


def _described(prefix: str, model: Any) -> Description:
    with_adapters = bool(getattr(model, "peft_config", None))
    base = model
    if with_adapters and hasattr(model, "get_base_model"):
        base = model.get_base_model()
    # FSDP2 gives each module that it shards a subclass of its class, with this prefix in its name.
    name = type(base).__name__.removeprefix("FSDP")
    described: Description = {
        "prefix": prefix,  # of the model's names in the LightningModule, with a dot at the end
        "class": name,
        "config": {**_plain(base.config), "architectures": [name]},
        "tied": _tied(base),  # names, below the prefix, of parameters that from_pretrained sets from others
    }
    if _is_config(getattr(base, "generation_config", None)):
        described["generation_config"] = _plain(base.generation_config)
    if with_adapters:
        described["peft"] = _adapters(model)
    return described


def _plain(config: Any) -> Any:
    """A configuration as ``save_pretrained`` writes it, without defaults if the class can leave them out."""
    content = getattr(config, "to_diff_dict", config.to_dict)()
    return json.loads(json.dumps(content, default=_to_json))


def _to_json(value: Any) -> Any:
    if isinstance(value, Set):
        return sorted(value)
    return str(value)


def _tied(model: nn.Module) -> list[str]:
    # With tied parameters under each of their names.
    named = model.named_parameters(remove_duplicate=False)
    parameters = {without_wrappers(name): parameter for name, parameter in named}
    return [
        name
        for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if name in parameters and parameters[name] is parameters.get(source)
    ]


def _adapters(model: Any) -> dict[str, Any]:
    """Describe the active adapter: its configuration, and our names of its entries by PEFT's names in files.

    PEFT chooses the entries and names them: it is given our names in place of the tensors.
    """
    prefix = ""
    if hasattr(model, "get_base_model"):
        adapter = model.active_adapter
    else:  # transformers has added the adapter, without PEFT's wrapper
        adapter = model.active_adapters()[0]
        prefix = "base_model.model."
    config = model.peft_config[adapter]
    # Includes buffers, such as VeRA's projections.
    names = {name: name for name in map(without_wrappers, model.state_dict())}
    names_in_file: dict[str, Any] = {}
    if not config.is_prompt_learning:
        # Adapters of embeddings are saved with the embeddings. PEFT would use the network to find that out.
        targets = getattr(config, "target_modules", None) or ()
        names_in_file = sys.modules["peft"].get_peft_model_state_dict(
            model, names, adapter, save_embedding_layers="embed_tokens" in targets or "lm_head" in targets
        )
    return {
        "config": {**_plain(config), "inference_mode": True},
        "names": {f"{prefix}{name}": source for name, source in names_in_file.items()},
    }
