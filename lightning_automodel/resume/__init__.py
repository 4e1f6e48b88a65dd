"""A stopped fit resumes as if it had never stopped: random states, loaders, running metrics, loops."""

from lightning_automodel.resume.fit import CHECKPOINT_KEY, Resume

__all__ = ["CHECKPOINT_KEY", "Resume"]
