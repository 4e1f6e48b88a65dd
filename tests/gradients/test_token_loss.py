"""Counting label tokens, weighing losses by them, and what a window adds up; no process group."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel import reduce_loss
from lightning_automodel.gradients.rescale_clip import gradient_factor
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples, sums_of

LABELS = torch.tensor([[3, -100, 5, 1], [-100, -100, -100, 2]])
BATCH = {"labels": LABELS, "targets": torch.tensor([[7, 0, 0]])}


@pytest.mark.parametrize(
    ("options", "output", "count"),
    [
        ({}, torch.tensor(0.5), 4),
        ({"label_shift": 1}, None, 3),
        ({"label_shift": 9}, None, 0),
        ({"ignore_index": 5}, None, 7),
        ({"label_key": "targets", "ignore_index": 0}, None, 1),
        ({"label_key": "targets", "ignore_index": 0, "label_shift": 1}, None, 0),
        ({"count_label_tokens": lambda batch: batch["labels"].numel()}, None, 8),
        ({"count_label_tokens": lambda batch: torch.tensor([[6]]), "label_key": "none"}, None, 6),
        ({}, {"num_label_tokens": 2}, 2),
        ({}, {"num_label_tokens": torch.ones(1, requires_grad=True) * 3}, 3),
        ({"count_label_tokens": lambda batch: 8}, {"num_label_tokens": torch.tensor(9)}, 9),
        ({"per_token_loss": False}, {"num_label_tokens": 2}, 1),
        ({"per_token_loss": False, "count_label_tokens": lambda batch: 8}, None, 1),
    ],
)
def test_ways_of_counting(options: dict[str, Any], output: Any, count: int) -> None:
    """What is returned comes before the function of the batch, and that before the labels; autograd follows none."""
    found = torch.as_tensor(TokenWeighting(**options).count(BATCH, output))
    assert (found.item(), found.shape, found.requires_grad) == (count, (), False)


def test_labels_that_are_no_tensor() -> None:
    with pytest.raises(
        TypeError, match=r"batch\['labels'\] must be a tensor to count label tokens, got list;"
    ):
        TokenWeighting().count({"labels": [1, 2, -100]})


@dataclass
class Molecules:
    """As chemprop batches graphs: atoms and bonds of all molecules, one target for each molecule."""

    atoms: Tensor
    targets: Tensor


IMAGES = torch.ones(4, 3, 8, 8)
ROWS = torch.ones(4, dtype=torch.long)
SAMPLES: dict[str, tuple[Any, int]] = {
    "a pair": ([IMAGES, ROWS], 4),
    "a dictionary": ({"input_ids": IMAGES[:, 0, 0], "labels": ROWS}, 4),
    "a BatchEncoding": (UserDict({"input_ids": IMAGES[:, 0, 0], "labels": ROWS}), 4),
    "a dataclass": (Molecules(IMAGES, ROWS), 4),
    "a scalar first": ((torch.tensor(7), IMAGES, ROWS), 4),
    "a broadcast tensor first": ((torch.ones(1, 8, 8), IMAGES, ROWS), 4),
    "one tensor": (IMAGES, 4),
    "batch size 1": ((IMAGES[:1], ROWS[:1], torch.tensor(7)), 1),
    "nothing but a broadcast tensor": ((torch.ones(1, 8), torch.tensor(7)), 1),
    "an empty batch": ((IMAGES[:0], ROWS[:0]), 0),
}


@pytest.mark.parametrize(("batch", "count"), SAMPLES.values(), ids=SAMPLES)
def test_samples(batch: Any, count: int) -> None:
    assert count_samples(batch) == count


NOT_SAMPLES: dict[str, tuple[Any, str]] = {
    "graphs": (Molecules(torch.ones(9, 5), ROWS), "(a Molecules) has first dimensions of 4, 9"),
    "lengths beside one sequence of all": (
        (torch.ones(9), torch.ones(2), torch.ones(2)),
        "first dimensions of 2, 9",
    ),
    "one image of several labels": ((IMAGES[:1], ROWS), "first dimensions of 1, 4"),
    "one row beside more": ((torch.ones(1), IMAGES), "first dimensions of 1, 4"),
    "no tensors": (["a text", "another"], "(a list) has no tensors"),
}


@pytest.mark.parametrize(("batch", "shown"), NOT_SAMPLES.values(), ids=NOT_SAMPLES)
def test_tensors_that_disagree_about_samples(batch: Any, shown: str) -> None:
    with pytest.raises(ValueError, match="count='samples' counts the rows that all tensors") as raised:
        count_samples(batch)
    assert shown in str(raised.value)
    assert "pass count_label_tokens=<function of the batch> instead, or return" in str(raised.value)


SOURCES = ["the num_label_tokens that training_step returned", "what count_label_tokens(batch) returned"]


def _count_told(source: str, count: Any) -> Any:
    if source == SOURCES[0]:
        return TokenWeighting().count(BATCH, {"num_label_tokens": count})
    return TokenWeighting(count_label_tokens=lambda batch: count).count(BATCH)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (True, "True"),
        ("3", "'3'"),
        (None, "None"),
        (torch.tensor([1, 2]), "tensor([1, 2])"),
        (torch.tensor(True), "tensor(True)"),
        (torch.tensor(3, dtype=torch.bfloat16), "tensor(3., dtype=torch.bfloat16)"),
    ],
)
def test_counts_of_a_wrong_type(source: str, count: Any, shown: str) -> None:
    """A mask in the place of its sum is refused; the message says who told it."""
    with pytest.raises(TypeError, match="must be") as raised:
        _count_told(source, count)
    assert str(raised.value).startswith(f"{source} must be a")
    assert str(raised.value).endswith(f" (mask.sum(dtype=torch.float32)), got {shown}.")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("in_tensor", [False, True])
@pytest.mark.parametrize("count", [-1, -2.5, math.inf, math.nan])
def test_counts_out_of_range(source: str, count: float, in_tensor: bool) -> None:
    """The message says the value and who told it; of a tensor too, unless the host would have to wait for it."""
    with pytest.raises(ValueError, match="negative") as raised:
        _count_told(source, torch.tensor(count) if in_tensor else count)
    assert str(raised.value) == f"{source} must be finite and not negative, got {count}."
    with pytest.raises(ValueError, match="must be finite and not negative"):
        TokenWeighting(count_label_tokens=lambda batch: torch.tensor(count)).count_on_host(BATCH)


@pytest.mark.parametrize("count", [1001, torch.tensor(1001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_does_not_round_the_count(dtype: torch.dtype, count: int | Tensor) -> None:
    """1001 tokens weigh 1001, where a bfloat16 product would make them 1000."""
    loss = torch.ones((), dtype=dtype, requires_grad=True)
    objective = TokenWeighting().objective(loss, count)
    assert objective.dtype == torch.promote_types(dtype, torch.float32)
    assert objective.item() == 1001
    objective.backward()
    assert loss.grad is not None


def _window(additions: list[tuple[float, Any]]) -> Tensor:
    return sum((sums_of(torch.tensor(objective), count) for objective, count in additions), torch.zeros(2))


@pytest.mark.parametrize(
    ("additions", "totals"),
    [
        ([(2.0, torch.tensor(4)), (3.0, torch.tensor(1, dtype=torch.int32))], [5, 5]),
        ([(2.0, 4), (3.0, torch.tensor(1)), (1.0, 2), (5.0, torch.tensor(7.0))], [14, 11]),
        ([(math.nan, 0), (3.0, 1)], [1, 3]),
        ([(math.nan, torch.tensor(0)), (3.0, 1)], [1, 3]),
        ([(math.nan, 0), (math.nan, torch.tensor(0))], [0, 0]),
        ([(1.0, torch.tensor(-0.0)), (1.0, 5)], [5, 1]),  # a sum of class weights that are all zero
        ([(math.nan, 3), (1.0, torch.tensor(1))], [4, math.nan]),  # which is not hidden
    ],
)
def test_window_adds_up(additions: list[tuple[float, Any]], totals: list[float]) -> None:
    """Counts told as numbers and as tensors mix; a mean over nothing, NaN, adds nothing."""
    assert _window(additions).tolist() == pytest.approx(totals, rel=0, nan_ok=True)


@pytest.mark.parametrize("count", [-1, -0.5, math.nan, -math.inf])
def test_a_wrong_count_that_nobody_has_read_is_not_lost_in_a_sum(count: float) -> None:
    """On an accelerator; whatever else its window counts."""
    totals = _window([(1.0, torch.tensor(count)), (1.0, 5)])
    assert totals[0].isnan()
    assert gradient_factor(totals[0], 2).isnan()
    assert gradient_factor(torch.tensor(count), 2).isnan()


@pytest.mark.parametrize(
    ("dtype", "counts"),
    [
        (torch.uint8, [200, 100]),
        (torch.int8, [100, 100]),
        (torch.int32, [2**31 - 1, 2]),
        (torch.bfloat16, [255, 254]),
        (torch.float16, [2047, 2046]),
        (torch.float32, [2**24, 1]),
    ],
)
def test_narrow_counts_add_up_exactly(dtype: torch.dtype, counts: list[int]) -> None:
    """Counts that their own dtype holds exactly neither overflow nor round when a window sums them."""
    window = _window([(1.0, torch.tensor(count, dtype=dtype)) for count in counts])
    assert window[0].item() == sum(counts)


@pytest.mark.parametrize("count", [3, torch.tensor(3), torch.tensor([3], dtype=torch.int32)])
@pytest.mark.parametrize(("per_token_loss", "denominator"), [(True, 3), (False, 2)])
def test_reduce_loss_alone(count: int | Tensor, per_token_loss: bool, denominator: int) -> None:
    """Without a group nothing is communicated, and the inputs stay as they are."""
    store = [torch.tensor([1.5], requires_grad=True), torch.tensor(2.0)]
    loss, total = reduce_loss(store, count, per_token_loss)
    assert (loss.item(), loss.shape, loss.dtype, loss.requires_grad) == (3.5, (), torch.float32, False)
    assert (total.item(), total.shape, total.dtype) == (denominator, (), torch.int64)
    assert [entry.item() for entry in store] == [1.5, 2.0]
    assert torch.equal(torch.as_tensor(count).reshape(()).long(), torch.tensor(3))


@pytest.mark.parametrize("shape", [(5,), ()])
def test_labels_without_rows_cannot_be_shifted(shape: tuple[int, ...]) -> None:
    """One label for each sample is no row: dropping the first would count one too few, or nothing at all."""
    labels = torch.ones(shape, dtype=torch.long)
    assert TokenWeighting().count({"labels": labels}) == labels.numel()
    with pytest.raises(
        ValueError, match=r"label_shift=1 drops the first label positions of each row"
    ) as raised:
        TokenWeighting(label_shift=1).count({"labels": labels})
    assert f"batch['labels'] has the shape {list(shape)} without rows: leave label_shift at 0" in str(
        raised.value
    )


def test_a_count_on_the_device_is_read_where_the_host_may_wait() -> None:
    output = {"loss": torch.tensor(1.0), "num_label_tokens": torch.empty((), device="meta")}
    TokenWeighting().check_counted_ahead(None, output, 3, reads_device=False)
    with pytest.raises(RuntimeError, match="meta"):  # it reads
        TokenWeighting().check_counted_ahead(None, output, 3, reads_device=True)
    returned = {**output, "num_label_tokens": torch.tensor(4)}
    with pytest.raises(ValueError, match=r"has counted 3 label tokens .*, and training_step has 4"):
        TokenWeighting().check_counted_ahead(None, returned, 3, reads_device=False)
