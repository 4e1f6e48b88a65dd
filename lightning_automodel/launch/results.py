"""Results of a run in workers, sent to the launching process: weights, metrics, paths of checkpoints."""

import io
import shutil
import tempfile
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


def collect(trainer: "pl.Trainer", returned: Any, report: Mapping[str, Any]) -> bytes | None:
    """Collect this rank's results for :func:`restore`; None on all but the first rank of each node. A collective.

    After a fit, sharded weights are gathered, one tensor after the other, into the host memory of the first rank of
    each node, which writes them to a temporary file: memory and file both hold the whole weights for a while.
    """
    is_first = trainer.strategy.local_rank == 0  # type: ignore[attr-defined]
    weights = None
    if trainer.state.fn == TrainerFn.FITTING:
        state = checkpoints.whole(checkpoints.model_state(trainer.lightning_module), keep=is_first)
        if is_first:
            # Not with the other results: gigabytes do not belong in a pipe.
            weights = Path(tempfile.mkdtemp(prefix="lightning_automodel-")) / "weights.pt"
            torch.save(state, weights)
    if not is_first:
        return None
    # As bytes: a pipe would pass tensors in shared memory, which is freed when this process ends.
    buffer = io.BytesIO()
    results = {
        "returned": returned,
        "state": trainer.state,
        "weights": weights,
        "metrics": {name: value.cpu() for name, value in trainer.callback_metrics.items()},
        "checkpoint_callbacks": [
            {name: getattr(callback, name) for name in _OF_CHECKPOINT_CALLBACKS if hasattr(callback, name)}
            for callback in trainer.checkpoint_callbacks
        ],
        "report": dict(report),
    }
    torch.save(results, buffer)
    return buffer.getvalue()


def restore(results: bytes, trainer: "pl.Trainer") -> tuple[Any, Mapping[str, Any]]:
    """Put the workers' results into the launching process's Trainer and module.

    Returns the run's value and the strategy's report. If the module lacks trained weights, their file is kept.
    """
    found = torch.load(io.BytesIO(results), map_location="cpu", weights_only=False)
    trainer.state = found["state"]
    trainer.callback_metrics.clear()
    trainer.callback_metrics.update(found["metrics"])
    for callback, attributes in zip(trainer.checkpoint_callbacks, found["checkpoint_callbacks"], strict=False):
        for name, value in attributes.items():
            setattr(callback, name, value)
    if found["weights"] is not None:
        trainer.precision_plugin.convert_module(trainer.lightning_module)
        load_trained_weights(trainer.lightning_module, found["weights"])
        shutil.rmtree(found["weights"].parent)
    return found["returned"], found["report"]


def load_trained_weights(module: "pl.LightningModule", path: Path) -> None:
    """Load whole weights into a module of this process alone. If it lacks layers, ``configure_model`` is called.

    Raises:
        RuntimeError: If weights are still unmatched: otherwise the module would seem trained.
    """
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    reason: Exception | None = None
    if _unmatched(module, state) and is_overridden("configure_model", module):
        try:
            module.configure_model()
        except Exception as error:
            reason = error
    if unmatched := _unmatched(module, state):
        raise RuntimeError(
            f"{type(module).__name__} is trained, but in this process it lacks {len(unmatched)} of the {len(state)}"
            f" trained tensors ({', '.join(unmatched[:3])}{', ...' if len(unmatched) > 3 else ''}): they are in"
            f" {path}, which torch.load reads. Create these layers, in the shapes that they have in training, in"
            " __init__, or in a configure_model that also works without self.device_mesh, or load a checkpoint that"
            " was saved in training."
        ) from reason
    if state:
        set_model_state_dict(module, state, options=StateDictOptions(strict=False))


def _unmatched(module: "pl.LightningModule", state: Mapping[str, Any]) -> list[str]:
    """Names in ``state`` that ``module`` lacks, or has on the meta device or in another shape."""
    known = checkpoints.model_state(module) if module.state_dict() else {}

    def can_hold(place: Any, value: Any) -> bool:
        both_are_tensors = isinstance(place, torch.Tensor) and isinstance(value, torch.Tensor)
        return not both_are_tensors or (not place.is_meta and place.shape == value.shape)

    return [name for name, value in state.items() if name not in known or not can_hold(known[name], value)]
