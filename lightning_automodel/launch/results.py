"""Results of a run in workers, sent to the launching process: weights, metrics, paths of checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from lightning_automodel import checkpoint as checkpoints

_OF_CHECKPOINT_CALLBACKS = ("best_model_path", "best_model_score", "last_model_path")
_WEIGHTS = "weights.pt"


def collect(trainer: "pl.Trainer", returned: Any, folder: Path) -> dict[str, Any] | None:
    """Collect this rank's results for :func:`restore`; None on all but the first rank of each node. A collective.

    After a fit, sharded weights are gathered, one tensor after the other, into the host memory of the first rank of
    each node, which writes them to ``folder``: memory and file both hold the whole weights for a while.
    """
    strategy: Any = trainer.strategy
    is_first = strategy.local_rank == 0
    if trainer.state.fn == TrainerFn.FITTING:
        state = checkpoints.whole(checkpoints.model_state(trainer.lightning_module), keep=is_first)
        if is_first:
            torch.save(state, folder / _WEIGHTS)
    if not is_first:
        return None
    return {
        "returned": returned,
        "state": trainer.state,
        "metrics": {name: value.cpu() for name, value in trainer.callback_metrics.items()},
        "checkpoint_callbacks": [
            {name: getattr(callback, name) for name in _OF_CHECKPOINT_CALLBACKS if hasattr(callback, name)}
            for callback in trainer.checkpoint_callbacks
        ],
        "report": {
            "last_step": strategy.last_step,
            "description": {name: value for name, value in strategy.describe().items() if name != "options"},
        },
    }


def restore(results: Mapping[str, Any], trainer: "pl.Trainer", folder: Path) -> None:
    """Put the workers' results into the launching process's Trainer and module."""
    trainer.state, trainer.strategy.reported_by_workers = results["state"], results["report"]  # type: ignore[attr-defined]
    trainer.callback_metrics.clear()
    trainer.callback_metrics.update(results["metrics"])
    for callback, attributes in zip(trainer.checkpoint_callbacks, results["checkpoint_callbacks"], strict=False):
        for name, value in attributes.items():
            setattr(callback, name, value)
    if (folder / _WEIGHTS).exists():
        trainer.precision_plugin.convert_module(trainer.lightning_module)
        load_trained_weights(trainer.lightning_module, folder / _WEIGHTS)


def load_trained_weights(module: "pl.LightningModule", path: Path) -> None:
    """Load whole weights into a module of this process alone. If it lacks layers, ``configure_model`` is called.

    Raises:
        RuntimeError: If weights are still unmatched: otherwise the module would seem trained.
    """
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=False)

    def unmatched() -> list[str]:
        """Names of values that the module lacks, or has on the meta device or in another shape."""
        known = checkpoints.model_state(module) if module.state_dict() else {}
        return [
            name
            for name, value in state.items()
            if name not in known
            or (isinstance(value, torch.Tensor) and (known[name].is_meta or known[name].shape != value.shape))
        ]

    reason: Exception | None = None
    if unmatched() and is_overridden("configure_model", module):
        try:
            module.configure_model()
        except Exception as error:
            reason = error
    if names := unmatched():
        raise RuntimeError(
            f"{type(module).__name__} is trained, but in this process it lacks {len(names)} of the {len(state)}"
            f" trained tensors ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): they are in"
            f" {path}, which torch.load reads. Create these layers, in the shapes that they have in training, in"
            " __init__, or in a configure_model that also works without self.device_mesh, or load a checkpoint that"
            " was saved in training."
        ) from reason
    if state:
        set_model_state_dict(module, state, options=StateDictOptions(strict=False))
