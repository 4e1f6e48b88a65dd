"""What iterates in place of a user's object is that object to all other code."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from lightning_automodel.data.wrapper import Wrapper


class Rows:
    """A user's loader, with attributes that a wrapper might call its own."""

    def __init__(self) -> None:
        self.loader = [1, 2]
        self.count = 2
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self.loader)


class Doubled(Wrapper):
    """Yields each row twice, and counts them."""

    num_rows: int

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, num_rows=0)

    def __iter__(self) -> Iterator[int]:
        for row in self._inner:
            self.num_rows += 1
            yield from (row, row)


def test_attributes_are_those_of_the_users_object() -> None:
    rows = Rows()
    wrapper = Doubled(rows)
    assert list(wrapper) == [1, 1, 2, 2]
    assert wrapper.num_rows == 2
    assert not hasattr(rows, "num_rows")
    assert (wrapper.loader, wrapper.count, wrapper.number) == ([1, 2], 2, 0)
    wrapper.count = 5
    wrapper.collate = max
    assert rows.count == 5
    assert rows.collate is max
    assert isinstance(wrapper, Rows)
    assert not hasattr(wrapper, "absent")


def test_copy() -> None:
    wrapper = Doubled(Rows())
    wrapped_copy = copy.copy(wrapper)
    wrapped_copy.num_rows = 3
    assert wrapper.num_rows == 0
    assert list(copy.deepcopy(wrapper)) == [1, 1, 2, 2]
    with pytest.raises(AttributeError, match="absent"):
        _ = wrapped_copy.absent
