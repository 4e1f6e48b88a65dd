"""The callback that exports the model when a fit ends."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_automodel.checkpoint import check_export, export_hugging_face


class ModelExport(Callback):
    """Exports the model for Hugging Face when a fit ends, by ``export_hugging_face``, which is called on all ranks.

    The weights are those that the module has when ``fit`` returns: with ``WeightAveraging``, or
    ``StochasticWeightAveraging`` that has begun to average, the averages. A fit that ends by an exception exports
    nothing, and one with ``fast_dev_run`` only checks whether it could.

    Args:
        path: Directory to write, which must not exist yet. A relative one is taken from the Trainer's
            ``default_root_dir``.
        max_shard_size: Largest size of a file, such as ``"5GB"``, or bytes.
        dtype: Dtype of the exported floating-point tensors, also by its name, such as ``"bfloat16"``; None keeps each
            tensor's own.
        adapter_only: Export the adapters of a PEFT model.
        prefix: Prefix of the model's names in the LightningModule, such as ``"model."``; None for its only Hugging Face
            model.

    Raises:
        CheckpointError: On every rank: when the fit starts, if there is no such model, or the directory exists; when it
            ends, if one of them cannot write.

    Examples:
        >>> callbacks = [ModelExport("my-model", dtype="bfloat16")]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_size: str | int = "5GB",
        dtype: str | torch.dtype | None = None,
        adapter_only: bool = False,
        prefix: str | None = None,
    ) -> None:
        chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not isinstance(chosen, torch.dtype):
            raise ValueError(f"dtype must be a dtype of torch or its name, such as 'bfloat16', not {dtype!r}.")
        self._path = os.fspath(path)
        self._options: dict[str, Any] = {
            "max_shard_size": max_shard_size,
            "dtype": chosen,
            "adapter_only": adapter_only,
            "prefix": prefix,
        }

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_export(pl_module, self._place(trainer), **self._options)  # now, not after days of training

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in on_train_end, where other callbacks may still put averages in the weights' place.
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            export_hugging_face(pl_module, self._place(trainer), **self._options)

    def _place(self, trainer: pl.Trainer) -> str | Path:
        return self._path if "://" in self._path else Path(trainer.default_root_dir) / self._path
