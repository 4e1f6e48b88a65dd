"""Checkpoints: saved whole or not at all, checked before they load, and loaded on any number of ranks."""

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.export import export_hugging_face

__all__ = ["CheckpointError", "export_hugging_face"]
