"""Causal attention of the last rows of a sequence, against the same over all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_automodel.context_parallel import attention
from lightning_automodel.context_parallel.attention import Slices

ROWS, COLUMNS = 5, 17
OPTIONS: dict[str, Any] = {"dropout_p": 0.0, "scale": 0.7, "enable_gqa": True}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Queries of four heads, keys and values of two, as many as there are columns."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((2, 4, COLUMNS, 8), (2, 2, COLUMNS, 8), (2, 2, COLUMNS, 8))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def last_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    slices = Slices(None, (0, 1), ROWS, COLUMNS)
    return attention._attend_to_end(query[..., -ROWS:, :], key, value, slices, OPTIONS)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_last_rows(dtype: torch.dtype) -> None:
    inputs = tensors(dtype)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, **OPTIONS)[..., -ROWS:, :]
    found = last_rows(*inputs)
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


def test_autocast_holds_here_too() -> None:
    inputs = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = last_rows(*inputs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, last_rows(*[tensor.bfloat16() for tensor in inputs]))


def test_on_cuda_torch_aligns_the_last_row_itself() -> None:
    """The bias that half precision is given there means what the mask says; the device itself is not run."""
    query, key, value = tensors(torch.float64)
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    bias: Any = attention.causal_lower_right(ROWS, COLUMNS)
    found = F.scaled_dot_product_attention(query[..., -ROWS:, :], key, value, attn_mask=bias, scale=0.7)
    torch.testing.assert_close(found, last_rows(query, key, value), rtol=1e-12, atol=1e-12)
