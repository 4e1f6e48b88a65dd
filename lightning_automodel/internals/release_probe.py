"""Checks, before any training, that torch and Lightning have the private names that the package uses.

A write to an attribute that a release no longer reads would silently give wrong results. So a property
without a setter counts as missing if the package writes it.
"""

import importlib.metadata
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TESTED_RELEASES = {"torch": "2.13.0 to 2.15.0", "lightning": "2.6.1 or 2.6.4 to 2.6.6"}
"""The releases that ``.ci/versions`` has run with; ``docs/support.md`` has the table."""

_MISSING = object()


class UnsupportedReleaseError(ImportError):
    """This release of torch or Lightning lacks a private name that the package needs."""

    def __init__(self, library: str, name: str) -> None:
        super().__init__(
            f"lightning_automodel needs {name}, which {library} {importlib.metadata.version(library)} does"
            f" not have. Install {library} {TESTED_RELEASES[library]}, which were tested, or a newer"
            " lightning_automodel."
        )


@contextmanager
def importing_private_names() -> Iterator[None]:
    """Context for the imports of the modules with private names.

    Raises:
        UnsupportedReleaseError: If an import fails; it has the name that torch or Lightning lacks.
    """
    try:
        yield
    except ImportError as error:
        library = (error.name or "").split(".")[0]
        if isinstance(error, UnsupportedReleaseError) or library not in TESTED_RELEASES:
            raise
        raise UnsupportedReleaseError(library, f"an import ({error.msg})") from error


def check(library: str, owner: Any, *names: str, writable: bool = False) -> None:
    """Check that ``owner`` has these attributes.

    Args:
        library: "torch" or "lightning".
        owner: A module, an object or a class. For a class, names that it annotates or ``__init__`` assigns
            count too.
        *names: Names of attributes.
        writable: Whether the package assigns to them.

    Raises:
        UnsupportedReleaseError: For the first missing name.
    """
    for name in names:
        found = inspect.getattr_static(owner, name, _MISSING)
        if found is _MISSING and isinstance(owner, type):
            declared = (
                name in _assigned(base) or name in inspect.get_annotations(base) for base in owner.__mro__
            )
            if any(declared):
                found = None
            else:
                found = _MISSING
        if found is _MISSING or (writable and isinstance(found, property) and found.fset is None):
            described = getattr(owner, "__name__", type(owner).__name__)
            raise UnsupportedReleaseError(library, f"{'a writable ' if writable else ''}{described}.{name}")


def _assigned(cls: type) -> tuple[str, ...]:
    """Names that ``cls.__init__`` uses, including attributes that it assigns."""
    code = getattr(vars(cls).get("__init__"), "__code__", None)
    if code is None:
        return ()
    return code.co_names
