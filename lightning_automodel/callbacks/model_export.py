"""The callback that exports the model when a fit ends."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_automodel.callbacks.running_strategy import below_root
from lightning_automodel.checkpoint.export import check_export, export_hugging_face


class ModelExport(Callback):
    """Exports the model for Hugging Face when a fit ends: calls ``export_hugging_face`` on all ranks.

    It exports the weights that the module has when ``fit`` returns. With ``WeightAveraging``, or once
    ``StochasticWeightAveraging`` has begun to average, these are the averages. A fit that ends with an
    exception exports nothing; with ``fast_dev_run`` the callback only checks that it could export.

    Args:
        path: Directory to write, which must not exist yet. A relative path is below the Trainer's
            ``default_root_dir``.
        dtype: Dtype of the exported floating-point tensors, or its name, such as ``"bfloat16"``; None keeps
            each tensor's own.
        adapter_only: Whether to export only the adapters of a PEFT model.
        prefix: Prefix of the model's names in the LightningModule, such as ``"model."``; None if there is
            only one Hugging Face model.

    Raises:
        CheckpointError: On every rank: when the fit starts, if there is no such model, or the directory
            exists; when the fit ends, if one of the ranks cannot write.

    Examples:
        >>> callbacks = [ModelExport("my-model", dtype="bfloat16")]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype | None = None,
        adapter_only: bool = False,
        prefix: str | None = None,
    ) -> None:
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        self._path = os.fspath(path)
        self._options: dict[str, Any] = {"dtype": dtype, "adapter_only": adapter_only, "prefix": prefix}

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Checked now, not after days of training.
        check_export(pl_module, below_root(trainer, self._path), **self._options)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in on_train_end, where other callbacks may still replace the weights by averages.
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            export_hugging_face(pl_module, below_root(trainer, self._path), **self._options)
