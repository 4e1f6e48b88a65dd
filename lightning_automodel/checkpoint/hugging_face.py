"""Hugging Face models in a LightningModule, as each checkpoint describes them for exports.

Nothing here imports transformers: exporting a checkpoint must not need it.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Set
from datetime import timedelta
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_automodel.internals.torch import uncompiled, without_wrappers

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
