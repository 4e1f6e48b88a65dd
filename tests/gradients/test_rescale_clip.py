"""Rescaling and clipping in one process, against torch's own functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import clip_gradients, reduce_loss, rescale_gradients
from lightning_automodel.gradients.rescale_clip import (
    check_finite,
    clip_gradient_values,
    gradient_factor,
    scale_gradients_,
)

SHAPES = [(3, 4), (5,), (), (0, 2)]


def _parameters(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[nn.Parameter]:
    """Parameters with random gradients, and a last one without."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return [*parameters, nn.Parameter(torch.zeros(2, dtype=dtype))]


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    return [parameter.grad for parameter in parameters]


def _module(parameters: list[nn.Parameter]) -> nn.Module:
    module = nn.Module()
    for index, parameter in enumerate(parameters):
        module.register_parameter(f"p{index}", parameter)
    return module


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("clip_norm", [0.1, 1, 100.0])
@pytest.mark.parametrize("wrap", [list, iter, _module], ids=["list", "iterator", "module"])
def test_clipping_equals_torch(wrap: Any, clip_norm: float, foreach: bool) -> None:
    """The norm before and the gradients after are torch's, for a module as for parameters; `.grad` stays in place."""
    ours = _parameters()
    theirs = _parameters()
    objects = [id(gradient) for gradient in _gradients(ours)]
    norm = clip_gradients(wrap(ours), clip_norm, foreach)
    expected = nn.utils.clip_grad_norm_(theirs, clip_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-15, atol=0.0)
    torch.testing.assert_close(_gradients(ours)[:-1], _gradients(theirs)[:-1], rtol=1e-15, atol=0.0)
    assert [id(gradient) for gradient in _gradients(ours)] == objects
    assert (norm > clip_norm).item() == (clip_norm < 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_gradients_have_a_wide_norm(dtype: torch.dtype) -> None:
    """Half precision neither overflows in the square nor rounds the norm, and gradients keep their dtype."""
    parameters = _parameters(dtype, scale=1000.0)
    exact = torch.cat([p.grad.double().flatten() for p in parameters[:-1]]).norm().item()
    norm = clip_gradients(parameters, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    assert {p.grad.dtype for p in parameters[:-1]} == {dtype}
    clipped = torch.cat([p.grad.double().flatten() for p in parameters[:-1]]).norm().item()
    assert clipped == pytest.approx(1.0, rel=4 * torch.finfo(dtype).eps)


def test_sparse_gradients() -> None:
    """An embedding's sparse gradient counts its repeated rows once summed, and is scaled."""
    sparse = nn.Embedding(4, 3, sparse=True)
    dense = nn.Embedding(4, 3)
    dense.weight = nn.Parameter(sparse.weight.detach().clone())
    for embedding in (sparse, dense):
        embedding(torch.tensor([1, 1, 3])).square().sum().backward()
    norms = [clip_gradients(embedding, 0.5).item() for embedding in (sparse, dense)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


@pytest.mark.parametrize("model", [[], nn.ReLU(), [nn.Parameter(torch.ones(2))], _parameters(scale=0.0)])
def test_nothing_to_clip(model: Any) -> None:
    """No parameters, none with a gradient, or gradients of zero: a norm of zero, by which nothing is divided."""
    assert clip_gradients(model, 1.0).item() == 0.0
    parameters = model if isinstance(model, list) else []
    assert not any(gradient.any() for gradient in _gradients(parameters) if gradient is not None)


@pytest.mark.parametrize("foreach", [True, False])
def test_complex_gradients(foreach: bool) -> None:
    """As torch clips them: the square of an element is that of its absolute value."""
    ours = _parameters(torch.complex128)
    theirs = _parameters(torch.complex128)
    for parameter in (*ours[:1], *theirs[:1]):
        parameter.grad *= 1 + 2j
    norm = clip_gradients(ours, 0.5, foreach)
    torch.testing.assert_close(norm.double(), nn.utils.clip_grad_norm_(theirs, 0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(_gradients(ours), _gradients(theirs), rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match=r"(?i)complex"):  # torch's own: they have no order
        clip_gradient_values(ours, 0.5)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, True, None, "1"])
@pytest.mark.parametrize("clip", [clip_gradients, clip_gradient_values])
def test_thresholds_that_are_not_positive(clip: Any, value: Any) -> None:
    """They raise before any gradient is touched."""
    parameters = _parameters()
    with pytest.raises(ValueError, match="positive number") as raised:
        clip(parameters, value)
    assert str(raised.value) == f"The value to clip gradients to must be a positive number, got {value!r}."
    torch.testing.assert_close(
        _gradients(parameters)[:-1], _gradients(_parameters())[:-1], rtol=0.0, atol=0.0
    )


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_norm_that_is_not_finite(norm: float) -> None:
    """The message says which, and that nothing was changed."""
    with pytest.raises(RuntimeError, match="gradient norm") as raised:
        check_finite(torch.tensor(norm))
    assert str(raised.value) == (
        f"The gradient norm of this window is {norm}; no parameter has been changed by it. Look at the"
        " losses of the window or lower the learning rate; with error_if_nonfinite=False training goes on."
    )
    check_finite(torch.tensor(1e30))


@pytest.mark.parametrize(
    "count", [4, torch.tensor(4), torch.tensor([4]), torch.tensor(4, dtype=torch.uint8), torch.tensor(4.0)]
)
def test_rescaling_alone(count: int | Tensor) -> None:
    """Without a group: divided by the count, which stays as it was."""
    parameters = _parameters()
    rescale_gradients(parameters, count)
    for gradient, original in zip(_gradients(parameters)[:-1], _gradients(_parameters())[:-1], strict=True):
        assert gradient.equal(original / 4)
    assert parameters[-1].grad is None
    assert torch.equal(torch.as_tensor(count).reshape(()).long(), torch.tensor(4))


def test_a_count_of_python_is_not_rounded() -> None:
    """A sum of class weights, or more tokens than float32 can tell apart."""
    for count in (0.1, 2.0**25 + 1):
        parameter = nn.Parameter(torch.zeros((), dtype=torch.float64))
        parameter.grad = torch.ones_like(parameter)
        rescale_gradients(parameter, count)
        assert parameter.grad.item() == 1 / count
        assert reduce_loss([], count)[1].item() == count


@pytest.mark.parametrize(
    ("denominator", "divisor", "factor"), [(8.0, 2, 0.25), (0.5, 4, 8.0), (0.0, 4, 0.0), (-8.0, 2, math.nan)]
)
def test_gradient_factor(denominator: float, divisor: int, factor: float) -> None:
    """D / N, zero where nothing was counted, and NaN where N is no sum of counts, rather than a wrong sign."""
    found = gradient_factor(torch.tensor(denominator, dtype=torch.float64), divisor)
    assert found.item() == pytest.approx(factor, rel=0, nan_ok=True)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("largest", [3e19, 1e30, 1e38, 3e38])
def test_large_finite_gradients_are_clipped_not_zeroed(largest: float, foreach: bool) -> None:
    """The squares of float32 beyond 1.8e19 overflow, and in the end the norm that is returned does."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, largest)
    norm = clip_gradients(parameters, 1.0, foreach=foreach)
    exact = 5**0.5 * largest
    assert norm.item() == pytest.approx(
        exact if exact < torch.finfo(torch.float32).max else math.inf, rel=1e-6
    )
    assert torch.cat([parameter.grad for parameter in parameters]).norm().item() == pytest.approx(
        1.0, rel=1e-5
    )


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_a_factor_in_the_dtype_of_the_gradients_gives_the_same_numbers(dtype: torch.dtype) -> None:
    """As a float64 factor: torch rounds that to the dtype that it computes in, before it multiplies."""
    generator = torch.Generator().manual_seed(2)
    for exponent in range(-30, 31, 3):
        factor = torch.rand((), generator=generator, dtype=torch.float64) * 2.0**exponent
        parameters = [
            nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 67), (1,), (0,), (130,))
        ]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        expected = [(parameter.grad.to(wide) * factor).to(dtype) for parameter in parameters]
        scale_gradients_(parameters, factor)
        assert all(map(torch.equal, _gradients(parameters), expected))
