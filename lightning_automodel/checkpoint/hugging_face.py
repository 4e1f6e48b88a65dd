"""What a checkpoint tells of the Hugging Face models in a LightningModule, so that they can be exported without it.

Nothing here imports transformers: whoever trains such a model has it, and whoever exports a checkpoint need not.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import nn

from lightning_automodel.sharding.param_names import without_wrappers

KEY = "hugging_face"
"""Where in a checkpoint the descriptions are, a list."""

Description = dict[str, Any]
"""Of one model, plain data.

- ``prefix``: of its names in the LightningModule, with a dot at the end
- ``class``: name of its class
- ``config``, and ``generation_config`` where it has one: content of the JSON files
- ``tied``: names below ``prefix`` of parameters that ``from_pretrained`` sets from others
- ``peft``, where it has adapters: ``config``, and ``names``: those below ``prefix`` by name in an adapter file
"""


def describe_models(module: nn.Module) -> dict[str, list[Description]]:
    """What to add to a checkpoint of ``module``; empty where it has no Hugging Face model. Not a collective."""
    found = [_described(prefix, model) for prefix, model in _models(module)]
    return {KEY: found} if found else {}


def _models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost Hugging Face models below ``module``, by prefix."""
    for name, child in module.named_children():
        place = without_wrappers(f"{prefix}{name}.")
        if callable(getattr(getattr(child, "config", None), "to_dict", None)) and hasattr(child, "save_pretrained"):
            yield place, getattr(child, "_orig_mod", child)
        else:
            yield from _models(child, place)


def _described(prefix: str, model: Any) -> Description:
    with_adapters = bool(getattr(model, "peft_config", None))
    base = model.get_base_model() if with_adapters and hasattr(model, "get_base_model") else model
    # FSDP2 gives each module that it shards a subclass of its class, called so.
    name = type(base).__name__.removeprefix("FSDP")
    described: Description = {
        "prefix": prefix,
        "class": name,
        "config": {**_plain(base.config), "architectures": [name]},
        "tied": _tied(base),
    }
    if callable(getattr(getattr(base, "generation_config", None), "to_dict", None)):
        described["generation_config"] = _plain(base.generation_config)
    if with_adapters:
        described["peft"] = _adapters(model)
    return described


def _plain(config: Any) -> Any:
    """A configuration as it comes out of a JSON file."""
    return json.loads(
        json.dumps(config.to_dict(), default=lambda value: sorted(value) if isinstance(value, Set) else str(value))
    )


def _parameters(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """By name as checkpoints have it; tied ones under each of their names."""
    return {without_wrappers(name): value for name, value in model.named_parameters(remove_duplicate=False)}


def _tied(model: nn.Module) -> list[str]:
    parameters = _parameters(model)
    return [
        name
        for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if name in parameters and parameters[name] is parameters.get(source)
    ]


def _adapters(model: Any) -> dict[str, Any]:
    """Of the active adapter. PEFT itself says which entries are its own, and what they are called in a file."""
    from_transformers = not hasattr(model, "get_base_model")
    adapter = model.active_adapters()[0] if from_transformers else model.active_adapter
    config = model.peft_config[adapter]
    names = {name: name for name in _parameters(model)}
    own: dict[str, Any] = {}
    if not config.is_prompt_learning:
        # Adapters that sit on embeddings bring those along; to find out by itself, PEFT would ask the network.
        targets = getattr(config, "target_modules", None) or ()
        own = sys.modules["peft"].get_peft_model_state_dict(
            model, names, adapter, save_embedding_layers="embed_tokens" in targets or "lm_head" in targets
        )
    prefix = "base_model.model." if from_transformers else ""
    return {
        "config": {**_plain(config), "inference_mode": True},
        "names": {f"{prefix}{name}": source for name, source in own.items()},
    }
