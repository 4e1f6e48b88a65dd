"""Hyper-parameters that are parts of a sharded model are left out of checkpoints, which hold the model."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpoint.tree import leaves


def without_shards(checkpoint: dict[str, Any], module: Any) -> None:
    """Leave out of ``checkpoint`` the hyper-parameters of ``module`` that are parts of a sharded model.

    As :func:`note_on_hyper_parameters` has told. Not a collective.
    """
    key = module.CHECKPOINT_HYPER_PARAMS_KEY
    saved = checkpoint.get(key)
    if isinstance(saved, dict) and (held := _parts_of_models(saved)):
        checkpoint[key] = {name: value for name, value in saved.items() if name not in held}


def note_on_hyper_parameters(module: Any) -> str | None:
    """A note for the user if hyper-parameters of a LightningModule are parts of a sharded model."""
    held = _parts_of_models(dict(module.hparams))
    if not held:
        return None
    arguments = ", ".join(f"{name}={name}" for name in held)
    return (
        f"The hyper-parameters {', '.join(held)} are parts of the model, which is sharded:"
        " checkpoints leave them out, and hold the model alone. Pass them to"
        f" load_from_checkpoint(path, {arguments}). Without this note:"
        f" self.save_hyperparameters(ignore={held})."
    )


def _parts_of_models(hyper_parameters: dict[str, Any]) -> list[str]:
    held: list[str] = []
    for name, value in hyper_parameters.items():
        modules = [leaf for _, leaf in leaves(value) if isinstance(leaf, nn.Module)]
        if any(isinstance(parameter, DTensor) for part in modules for parameter in part.parameters()):
            held.append(name)
    return held
