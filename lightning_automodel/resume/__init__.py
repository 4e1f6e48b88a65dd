"""A stopped fit goes on as if it had never stopped: random states, loaders, running metrics, how far the loops are."""

from lightning_automodel.resume.fit import CHECKPOINT_KEY, Resume

__all__ = ["CHECKPOINT_KEY", "Resume"]
