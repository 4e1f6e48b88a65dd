"""Read entry points and releases of installed packages once in this process: each fit asks for them anew otherwise.

That is a tenth of a small one, with the packages of the extra `tests`.
"""

import functools
from importlib import metadata

from lightning.fabric.utilities import registry

registry.entry_points = functools.cache(metadata.entry_points)
metadata.version = functools.cache(metadata.version)
registry.entry_points(group="lightning.pytorch.callbacks_factory")
