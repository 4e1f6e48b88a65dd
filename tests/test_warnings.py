"""Warnings of our own code are errors in the tests, so that a name that torch or Lightning deprecates is seen here."""

from __future__ import annotations

import warnings

import pytest


def test_warnings_of_our_own_code_are_errors() -> None:
    """What a library warns of a call of ours; `filterwarnings` in pyproject.toml."""
    with pytest.raises(FutureWarning, match="renamed"):
        warnings.warn_explicit(
            "renamed", FutureWarning, "units.py", 1, module="lightning_automodel.sharding.units"
        )


def test_other_warnings_are_not() -> None:
    """Of a user's code, or of a library about itself."""
    with pytest.warns(FutureWarning, match="renamed"):
        warnings.warn_explicit("renamed", FutureWarning, "script.py", 1, module="script")
