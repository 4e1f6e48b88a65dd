"""Read the entry points of installed packages once in this process: each Trainer asks for them anew otherwise.

That is a twentieth of a small fit, with the packages of the extra `tests`.
"""

import functools
from importlib import metadata

from lightning.fabric.utilities import registry

registry.entry_points = functools.cache(metadata.entry_points)
registry.entry_points(group="lightning.pytorch.callbacks_factory")
