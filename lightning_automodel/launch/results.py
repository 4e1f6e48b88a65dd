"""Results of a run in workers, sent to the launching process: weights, metrics, paths of checkpoints."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from lightning_automodel import checkpoint as checkpoints

_OF_CHECKPOINT_CALLBACKS = ("best_model_path", "best_model_score", "last_model_path")


def collect(trainer: "pl.Trainer", returned: Any, path: Path) -> None:
    """Write this run's results and whole weights for :func:`restore`, once on each node. A collective."""
    is_first = trainer.strategy.local_rank == 0  # type: ignore[attr-defined]
    weights = None
    if trainer.state.fn == TrainerFn.FITTING:
        weights = checkpoints.whole(checkpoints.model_state(trainer.lightning_module), keep=is_first)
    if not is_first:
        return
    results = {
        "returned": returned,
        "state": trainer.state,
        "metrics": dict(trainer.callback_metrics),
        "checkpoint_callbacks": [
            {name: getattr(callback, name) for name in _OF_CHECKPOINT_CALLBACKS if hasattr(callback, name)}
            for callback in trainer.checkpoint_callbacks
        ],
        "weights": weights,
    }
    torch.save(results, path)


def restore(trainer: "pl.Trainer", path: Path) -> Any:
    """Put the workers' results into the launching process's Trainer and module.

    Returns:
        What the Trainer's function returned.
    """
    results = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    trainer.state = results["state"]
    trainer.callback_metrics.clear()
    trainer.callback_metrics.update(results["metrics"])
    saved = results["checkpoint_callbacks"]
    for callback, attributes in zip(trainer.checkpoint_callbacks, saved, strict=False):
        for name, value in attributes.items():
            setattr(callback, name, value)
    if results["weights"] is not None:
        trainer.precision_plugin.convert_module(trainer.lightning_module)
        load_trained_weights(trainer.lightning_module, results["weights"], path)
    return results["returned"]


def load_trained_weights(module: "pl.LightningModule", weights: dict[str, Any], path: Path) -> None:
    """Load whole weights into a module of this process alone; call ``configure_model`` if it lacks layers.

    RuntimeError that names their ``path`` if it still lacks some: otherwise the module would seem trained.
    """
    try:
        if not weights.keys() <= module.state_dict().keys():
            module.configure_model()
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise ValueError("some of its tensors are on the meta device")
        if weights:
            set_model_state_dict(module, weights)
    except Exception as error:
        raise RuntimeError(
            f"{type(module).__name__} is trained, but the module in this process cannot hold the trained"
            f" weights ({error}): they are in {path}, as torch.load(path, weights_only=False)['weights']."
            " Create its layers, as they are in training, in __init__ or in a configure_model that works"
            " without self.device_mesh, or load a checkpoint."
        ) from error
