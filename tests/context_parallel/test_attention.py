"""Attention and slices outside of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel import context_parallel_attention
from lightning_automodel.context_parallel import attention
from lightning_automodel.context_parallel.slices import SHIFTED_LABELS, SequenceSlices
from lightning_automodel.options import StrategyOptions
from tests.rank_pool import RankPool


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("is_masked", [True, False])
def test_attention_without_slices(is_causal: bool, is_masked: bool) -> None:
    """Without a run it is the softmax of the textbook, with heads of a group repeated."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, 5, 4, generator=generator).double() for heads in (4, 2, 2))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) / 2
    allowed = torch.ones(5, 5).tril().bool() if is_causal else torch.ones(5, 5).bool()
    if is_masked:
        allowed = (allowed & mask[:, None, None].bool()) | torch.eye(5).bool()
    expected = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value.repeat_interleave(2, dim=1)
    attended = context_parallel_attention(
        query, key, value, is_causal=is_causal, attention_mask=mask if is_masked else None
    )
    torch.testing.assert_close(attended, expected, rtol=1e-12, atol=1e-12)


def differentiate_twice() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    slices = attention.Slices(
        dist.group.WORLD, chunks=(rank, 2 * ranks - 1 - rank), chunk=1, length=2 * ranks
    )
    part = torch.ones(1, 2, 2, requires_grad=True)
    loss = attention.whole(part, slices).pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, part, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_second_derivatives_are_refused(pool2: RankPool) -> None:
    """On every rank; a gradient penalty would take what the other ranks send for a constant."""
    pool2.run(differentiate_twice)


# --- Which positions of a batch each rank of a group gets -------------------------------------------------------------


def slices_of(batch: Any) -> list[Any]:
    """The slices of two ranks."""
    options = StrategyOptions(context_parallel_size=2, ignore_index=-100, label_shift=1)
    return [SequenceSlices(rank, options).slice(batch) for rank in range(2)]


def test_what_is_sliced() -> None:
    """Of four chunks, rank 0 gets the first and the last: so ranks have the same amount to compute.

    Labels that are shifted already stay, and so do entries of another shape, as long as they are, and the user's batch.
    """
    ids = torch.arange(16).view(2, 8)
    batch = {
        "input_ids": ids,
        "labels": ids,
        SHIFTED_LABELS: ids.roll(-1, dims=-1),
        "lengths": torch.arange(8),
    }
    slices = slices_of(batch)
    assert batch["labels"] is ids
    for key in ("input_ids", SHIFTED_LABELS):
        (first, last), (second, third) = (each[key].chunk(2, dim=-1) for each in slices)
        assert torch.equal(torch.cat([first, second, third, last], dim=-1), batch[key])
    assert all(each["lengths"] is batch["lengths"] for each in slices)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(2, 4)], "got a list"),
        ({"tokens": torch.zeros(2, 4)}, "got a dict with the keys \\['tokens'\\]"),
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
        slices_of(batch)
