"""Attention outside of a run."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from lightning_automodel import context_parallel_attention
from lightning_automodel.context_parallel import attention
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


@pytest.mark.parametrize("chunks", [(0, 1), (0, 3), (1, 2)])
def test_attention_while_operations_are_counted(chunks: tuple[int, int]) -> None:
    """`FlopCounterMode` is a dispatch mode, in which torch cannot make its causal bias."""
    slices = attention.Slices(group=None, chunks=chunks, chunk=2, length=8)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 2, 4, 4, generator=generator).double()
    key, value = (torch.randn(1, 2, 8, 4, generator=generator).double() for _ in range(2))

    def attend() -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "whole", lambda part, slices: torch.cat([key, value], dim=-1))
            with attention.computing_on(slices):
                return context_parallel_attention(query, key[..., :4, :], value[..., :4, :])

    with FlopCounterMode(display=False):
        attended = attend()
    torch.testing.assert_close(attended, attend(), rtol=1e-12, atol=1e-12)


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
