"""Checkpoints that always resume: saved whole or not at all, checked before they load, of any shape into any other."""

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.run import RunCheckpoints
from lightning_automodel.checkpoint.state import model_state, optimizer_state, whole

__all__ = ["CheckpointError", "RunCheckpoints", "model_state", "optimizer_state", "whole"]
