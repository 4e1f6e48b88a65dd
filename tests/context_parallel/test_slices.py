"""Which positions each rank of a context-parallel group gets, without ranks: the slices of all of them side by side."""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel.context_parallel.slices import SHIFTED_LABELS, SequenceSlices
from lightning_automodel.options import StrategyOptions

IGNORED = -100
OTHERS = ("name", "weights")  # entries that are no sequences


def slices_of(batch: Any, size: int, **options: Any) -> list[Any]:
    """The slice of every rank."""
    adds_mask = options.pop("adds_mask", False)
    of_run = StrategyOptions(context_parallel_size=size, ignore_index=IGNORED, **options)
    return [SequenceSlices(rank, of_run, adds_mask).slice(batch) for rank in range(size)]


def whole(slices: list[Any], key: str, length: int) -> Tensor:
    """The sequences that the slices were cut from: of 2 W chunks, rank r has chunks r and 2 W - 1 - r."""
    pairs = [each[key].chunk(2, dim=-1) for each in slices]
    return torch.cat([*(pair[0] for pair in pairs), *(pair[1] for pair in reversed(pairs))], dim=-1)[
        ..., :length
    ]


def a_batch(length: int) -> dict[str, Any]:
    ids = torch.arange(2 * length).reshape(2, length) + 1
    labels = torch.where(ids % 3 == 0, IGNORED, ids)
    return {"input_ids": ids, "labels": labels, "types": ids % 2, "name": "a", "weights": torch.ones(2)}


@pytest.mark.parametrize("length", [1, 4, 7, 8, 13])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_position_is_in_one_slice(size: int, length: int) -> None:
    batch = a_batch(length)
    slices = slices_of(batch, size)
    for key in ("input_ids", "labels", "types"):
        assert torch.equal(whole(slices, key, length), batch[key])
    assert torch.equal(whole(slices, "position_ids", length), torch.arange(length).expand(2, length))
    assert {each["input_ids"].shape for each in slices} == {(2, 2 * -(-length // (2 * size)))}
    # Padding has no label: the tokens that count are those of the whole batch.
    counted = sum(int((each["labels"] != IGNORED).sum()) for each in slices)
    assert counted == int((batch["labels"] != IGNORED).sum())
    assert all(each["name"] == "a" and each["weights"] is batch["weights"] for each in slices)


def test_padding() -> None:
    """Of two ranks' four chunks of two, the last lies behind the five positions, and is rank 0's."""
    batch = a_batch(5) | {"attention_mask": torch.ones(2, 5), "types": torch.ones(2, 5)}
    first, _ = slices_of(batch, 2)
    padding = {
        key: first[key][:, 2:].unique().tolist() for key in (*batch, "position_ids") if key not in OTHERS
    }
    of_zeros = ("input_ids", "types", "attention_mask", "position_ids")
    assert padding == {"labels": [IGNORED]} | {key: [0] for key in of_zeros}


def test_entries_of_another_shape_are_unchanged() -> None:
    """Also where their last dimension is as long as the sequences."""
    batch = a_batch(8) | {"lengths": torch.arange(8), "images": torch.ones(2, 3, 8)}
    assert all(each[key] is batch[key] for each in slices_of(batch, 2) for key in ("lengths", "images"))


@pytest.mark.parametrize("shift", [1, 2, 20])
def test_labels_are_shifted_before_they_are_cut(shift: int) -> None:
    batch = a_batch(9)
    slices = slices_of(batch, 2, label_shift=shift)
    expected = torch.full_like(batch["labels"], IGNORED)
    expected[:, : max(9 - shift, 0)] = batch["labels"][:, shift:]
    assert torch.equal(whole(slices, SHIFTED_LABELS, 9), expected)
    with pytest.raises(AttributeError, match="take batch\\['shift_labels'\\]"):
        torch.nn.functional.cross_entropy(torch.zeros(2, 3), slices[0]["labels"])
    with pytest.raises(AttributeError, match="take batch\\['shift_labels'\\]"):
        slices[0]["labels"][..., 1:]
    assert isinstance(batch["labels"], Tensor), "the batch of the user is unchanged"


def test_labels_that_are_shifted_already_stay() -> None:
    batch = a_batch(8)
    batch[SHIFTED_LABELS] = batch["labels"].roll(-1, dims=-1)
    slices = slices_of(batch, 2, label_shift=1)
    assert torch.equal(whole(slices, SHIFTED_LABELS, 8), batch[SHIFTED_LABELS])


def test_a_mask_is_added_where_asked_for_and_padded_with_zeros() -> None:
    masks = [each["attention_mask"] for each in slices_of(MappingProxyType(a_batch(5)), 2, adds_mask=True)]
    assert sum(int(mask.sum()) for mask in masks) == 2 * 5
    assert sum(mask.numel() for mask in masks) == 2 * 8
    assert "attention_mask" not in slices_of(a_batch(5), 2)[0]


def test_documents_begin_where_positions_do_not_go_up_by_one() -> None:
    slices = SequenceSlices(0, StrategyOptions(context_parallel_size=2, ignore_index=IGNORED))
    batch = {"input_ids": torch.zeros(1, 6), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])}
    documents = slices.describe(batch, None).documents
    assert documents is not None
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, -1, -1]]
    assert slices.describe({**batch, "attention_mask": torch.ones(1, 6)}, None).documents is None
    assert slices.describe({"input_ids": torch.zeros(1, 6)}, None).documents is None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(2, 4)], "got list"),
        ({"tokens": torch.zeros(2, 4)}, "got \\['tokens'\\]"),
        ({"input_ids": torch.zeros(2, 4), "labels": torch.zeros(2)}, "input_ids have 4 positions"),
        ({"input_ids": torch.zeros(2, 4), "labels": torch.tensor(1)}, "has the shape \\[\\]"),
        (
            {"input_ids": torch.zeros(2, 4), "attention_mask": torch.zeros(2, 1, 4, 4)},
            "\\[2, 1, 4, 4\\]",
        ),
    ],
)
def test_what_cannot_be_sliced_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slices_of(batch, 2)
