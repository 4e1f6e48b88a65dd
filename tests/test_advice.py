"""How what is described is shown to people."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_automodel.advice import shortened


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (["a", "b"], ["a", "b"]),
        ([*"abcdef"], [*"abcdef"]),
        ([*"abcdefg"], "7: a, b, ..., g"),
        ({"reason": "auto"}, {"reason": "auto"}),
        ("abcdefgh", "abcdefgh"),
    ],
)
def test_long_lists_are_shortened(value: Any, shown: Any) -> None:
    assert shortened(value) == shown
