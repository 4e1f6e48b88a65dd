"""The releases of torch and Lightning that the package was tested with, and what is said of others.

Reading a private name that a release lacks raises by itself, and so does writing it through
:mod:`lightning_automodel.internals.patching`.
"""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from packaging.version import Version

TESTED_RELEASES = {"torch": "2.13.0 to 2.15.0", "lightning": "2.6.1 and 2.6.6"}
"""The releases that ``.ci/versions`` has run with, the newest one last; ``docs/support.md`` has the table."""


class UnsupportedReleaseError(ImportError):
    """This release of torch or Lightning lacks something that the package needs."""

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


def warn_untested() -> None:
    """Warn of a torch or Lightning that is newer than all that were tested: a private name may mean something else."""
    for library, tested in TESTED_RELEASES.items():
        release = importlib.metadata.version(library)
        newest = tested.rpartition(" ")[2]
        if Version(release).release > Version(newest).release:
            command = f"bash .ci/versions {release}"
            if library == "lightning":
                command = f"LIGHTNING={release} bash .ci/versions {importlib.metadata.version('torch')}"
            rank_zero_warn(
                f"lightning_automodel was tested with {library} {tested}, and this is {library} {release}."
                f" What it uses of the library may have changed without an error. To test it, run `{command}` in a"
                " clone of the repository (CONTRIBUTING.md, Support for a new torch). ExactnessCheck compares your"
                " own training with one process, but not a resumed run with one that never stopped."
            )
