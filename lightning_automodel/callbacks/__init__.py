"""Callbacks for users. They work under any strategy, and report more under ``AutomodelStrategy``."""

from lightning_automodel.callbacks.evaluation_loss import EvaluationLoss
from lightning_automodel.callbacks.exactness_check import ExactnessCheck
from lightning_automodel.callbacks.model_export import ModelExport
from lightning_automodel.callbacks.step_monitor import StepMonitor
from lightning_automodel.callbacks.training_report import TrainingReport

__all__ = ["EvaluationLoss", "ExactnessCheck", "ModelExport", "StepMonitor", "TrainingReport"]
