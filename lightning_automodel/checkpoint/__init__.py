"""Checkpoints: saved whole or not at all, checked before they load, and loaded on any number of ranks."""

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.export import check_export, export_hugging_face
from lightning_automodel.checkpoint.loading import CheckpointLoader
from lightning_automodel.checkpoint.optimizers import NamedOptimizer
from lightning_automodel.checkpoint.saving import CheckpointSaver

__all__ = [
    "CheckpointError",
    "CheckpointLoader",
    "CheckpointSaver",
    "NamedOptimizer",
    "check_export",
    "export_hugging_face",
]
