"""What the launching process gets of a run that its children did: weights, metrics, paths of checkpoints."""

import io
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from lightning_automodel import checkpoint as checkpoints

_OF_CHECKPOINT_CALLBACKS = ("best_model_path", "best_model_score", "last_model_path")


@dataclass(frozen=True)
class RunResults:
    """Results of a run, small but for a file. They travel through a pipe, so tensors are bytes.

    Attributes:
        returned: What the Trainer's function returned on rank 0.
        state: The Trainer's.
        weights: File with the whole trained weights, on this machine; None where nothing was trained.
        tensors: The callback metrics, the attributes of checkpoint callbacks and the strategy's own report.
    """

    returned: Any
    state: TrainerState
    weights: Path | None
    tensors: bytes


def collect(trainer: "pl.Trainer", returned: Any, report: Mapping[str, Any]) -> RunResults | None:
    """Collect the results of this rank's run. A collective: every rank must call it, the model still being sharded.

    After a fit, sharded weights are gathered, one tensor after the other, into the host memory of the first rank of
    each node, which writes them to a file in the folder for temporary files: both hold the whole weights for a while.

    Args:
        trainer: This rank's Trainer, after its run.
        returned: What the run returned.
        report: What the strategy wants to find in the launching process.

    Returns:
        The results; None on all ranks but the first of each node.
    """
    is_first = trainer.strategy.local_rank == 0  # type: ignore[attr-defined]
    weights = None
    if trainer.state.fn == TrainerFn.FITTING:
        state = checkpoints.whole(checkpoints.model_state(trainer.lightning_module), keep=is_first)
        if is_first:
            weights = write_weights(state)
    if not is_first:
        return None
    metrics = {name: value.cpu() for name, value in trainer.callback_metrics.items()}
    callbacks = [
        {name: getattr(callback, name) for name in _OF_CHECKPOINT_CALLBACKS if hasattr(callback, name)}
        for callback in trainer.checkpoint_callbacks
    ]
    buffer = io.BytesIO()
    torch.save({"metrics": metrics, "checkpoint_callbacks": callbacks, "report": dict(report)}, buffer)
    return RunResults(returned, trainer.state, weights, buffer.getvalue())


def write_weights(state: dict[str, Any]) -> Path:
    """Write whole weights to a file of their own, in the folder for temporary files.

    Raises:
        RuntimeError: If there is no space for it; nothing is left behind then.
    """
    folder = Path(tempfile.mkdtemp(prefix="lightning_automodel-"))
    try:
        torch.save(state, folder / "weights.pt")
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(
            f"The trained weights could not be written to {folder.parent}, from where the launching process reads them:"
            " set TMPDIR to a folder with space for the whole model, and save checkpoints in training."
        ) from error
    return folder / "weights.pt"


def hand_over(results: RunResults, trainer: "pl.Trainer") -> dict[str, Any]:
    """Give the launching process's Trainer and module what its children did. Not a collective.

    Returns:
        The strategy's own report.

    Raises:
        RuntimeError: If trained weights have no place in the module; their file is then kept and named.
    """
    tensors = torch.load(io.BytesIO(results.tensors), map_location="cpu", weights_only=False)
    trainer.state = results.state
    trainer.callback_metrics.clear()
    trainer.callback_metrics.update(tensors["metrics"])
    for callback, attributes in zip(trainer.checkpoint_callbacks, tensors["checkpoint_callbacks"], strict=False):
        for name, value in attributes.items():
            setattr(callback, name, value)
    if results.weights is not None:
        trainer.precision_plugin.convert_module(trainer.lightning_module)
        load_trained_weights(trainer.lightning_module, results.weights)
        shutil.rmtree(results.weights.parent)
    return tensors["report"]


def load_trained_weights(module: "pl.LightningModule", path: Path) -> None:
    """Load whole weights into a module that lives in this process alone, made by ``configure_model`` where need be.

    Args:
        module: Module that was handed to the ranks, as it was before they trained theirs.
        path: File with the whole state of theirs.

    Raises:
        RuntimeError: If the module has no place for some of them: it would otherwise seem trained.
    """
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    reason: Exception | None = None
    if _without_place(module, state) and is_overridden("configure_model", module):
        try:
            module.configure_model()
        except Exception as error:
            reason = error
    homeless = _without_place(module, state)
    if homeless:
        raise RuntimeError(
            f"{type(module).__name__} is trained, but in this process it has no place for {len(homeless)} of the"
            f" {len(state)} trained tensors ({', '.join(homeless[:3])}{', ...' if len(homeless) > 3 else ''}): they are"
            f" in {path}, which torch.load reads. Create these layers, in the shapes that they have in training, in"
            " __init__, or in a configure_model that also works without self.device_mesh, or load a checkpoint that was"
            " saved in training."
        ) from reason
    if state:
        set_model_state_dict(module, state, options=StateDictOptions(strict=False))


def _without_place(module: "pl.LightningModule", state: Mapping[str, Any]) -> list[str]:
    """Names in ``state`` that ``module`` has not, or has on the meta device, or in another shape."""
    known = checkpoints.whole(checkpoints.model_state(module), keep=True) if module.state_dict() else {}
    return [name for name, value in state.items() if name not in known or not _can_hold(known[name], value)]


def _can_hold(place: Any, value: Any) -> bool:
    if not (isinstance(place, torch.Tensor) and isinstance(value, torch.Tensor)):
        return True
    return not place.is_meta and place.shape == value.shape
