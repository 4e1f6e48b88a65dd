"""A user's loaders and batches: what iterates in place of an object is that object to all other code."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.data.batches import Wrapper
from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.gradients.token_loss import count_samples
from lightning_automodel.sharding.tensor_parallel import check_same_batch
from tests.rank_pool import RankPool


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


# --- Tensors of a batch are found in its containers, of which some check what they are built of -----------------------


@dataclass
class Checked:
    """As anomalib's batches: what is no tensor is refused, also where a field is set later."""

    images: Tensor
    names: list[str] = field(default_factory=list)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "images" and not isinstance(value, Tensor):
            raise TypeError(f"images must be a tensor, got {value!r}")
        super().__setattr__(name, value)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_order_and_kinds() -> None:
    """Nested mappings, sequences, named tuples and dataclasses; strings and numbers are passed over."""
    tensors = [torch.tensor(float(number)) for number in range(5)]
    batch = {
        "a": [tensors[0], "text", 3],
        "b": Pair(tensors[1], None),
        "c": Checked(tensors[2]),
        "d": deque(tensors[3:]),
    }
    assert [float(tensor) for tensor in tensors_in(batch)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_samples_of_a_dataclass_that_checks_itself() -> None:
    assert count_samples(Checked(torch.zeros(3, 2), ["a", "b", "c"])) == 3


def check_peers() -> None:
    check_same_batch(Checked(torch.zeros(2)), dist.group.WORLD, "tensor-parallel")


def test_first_batches_of_peers_are_compared(pool2: RankPool) -> None:
    pool2.run(check_peers)
