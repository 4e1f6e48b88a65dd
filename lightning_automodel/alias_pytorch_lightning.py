"""Importing this module lets ``pytorch_lightning`` and ``lightning_fabric`` name the modules of ``lightning``.

For libraries that import those packages, whose Trainers refuse a strategy of ``lightning``. Import it before
them.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _AliasFinder(MetaPathFinder, Loader):
    """Finds a module of ``lightning`` under its name in either package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in _ALIASES and find_spec(_aliased(name)):
            return ModuleSpec(name, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        # Replaced, not renamed: each module is there once, and its classes are the same under both names.
        sys.modules[module.__name__] = import_module(_aliased(module.__name__))


def _aliased(name: str) -> str:
    root, dot, rest = name.partition(".")
    return _ALIASES[root] + dot + rest


_imported = [name for name in _ALIASES if name in sys.modules]
if _imported:
    raise ImportError(
        f"{_imported[0]} is already imported: import lightning_automodel.alias_pytorch_lightning before it,"
        " and before every library that imports it."
    )
sys.meta_path.insert(0, _AliasFinder())
