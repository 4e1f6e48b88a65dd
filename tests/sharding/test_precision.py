"""Which dtypes come of which precision, and the arithmetic that keeps half-precision gradients right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel import AutomodelStrategy
from lightning_automodel.distributed.mesh import MeshSizes
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.gradients.rescale_clip import scale_gradients_
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.precision import cast_around, resolve_policy

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
FP64 = torch.float64
MIXED = {"reduce_dtype": FP32, "output_dtype": FP32}
OWN: dict[str, Any] = {"cast_forward_inputs": False}


@pytest.mark.parametrize(
    ("plugin", "dtype", "expected"),
    [
        (Precision(), FP32, OWN),
        (Precision(), FP64, OWN),
        (Precision(), BF16, {**OWN, "reduce_dtype": FP32}),
        (DoublePrecision(), FP64, OWN),
        (HalfPrecision("bf16-true"), BF16, {**OWN, "reduce_dtype": FP32}),
        (HalfPrecision("16-true"), FP16, {**OWN, "reduce_dtype": FP32}),
        (MixedPrecision("bf16-mixed", "cpu"), FP32, {**MIXED, "param_dtype": BF16}),
        (MixedPrecision("16-mixed", "cpu"), FP32, {**MIXED, "param_dtype": FP16}),
    ],
)
def test_policy_of_each_precision(plugin: Precision, dtype: torch.dtype, expected: dict[str, Any]) -> None:
    """Half precision is reduced in float32; only mixed precision casts."""
    parameters = [
        nn.Parameter(torch.zeros(1, dtype=dtype)),
        nn.Parameter(torch.zeros(1), requires_grad=False),
    ]
    assert resolve_policy(plugin, None, parameters) == MixedPrecisionPolicy(**expected)


def test_policy_that_is_none() -> None:
    """Found out when the strategy is made."""
    policy: Any = "bf16"
    with pytest.raises(TypeError, match="mp_policy must be MixedPrecisionPolicy or None, got 'bf16'"):
        AutomodelStrategy(mp_policy=policy)


def test_casting_around_a_module() -> None:
    """Floating tensors in any container, going in and coming out; integers stay."""
    seen: list[torch.dtype] = []

    class Module(nn.Module):
        def forward(self, ids: torch.Tensor, *, more: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            seen.extend([ids.dtype, more["x"].dtype])
            return [more["x"], ids]

    module = Module()
    cast_around([module], MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP64))
    outputs = module(torch.tensor([1]), more={"x": torch.ones(1)})
    assert seen == [torch.int64, BF16]
    assert [output.dtype for output in outputs] == [FP64, torch.int64]
    untouched = Module()
    cast_around([untouched], MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False))
    assert untouched(torch.tensor([1]), more={"x": torch.ones(1)})[0].dtype == FP32


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rescaling_rounds_once(dtype: torch.dtype) -> None:
    """Each gradient is off by half a unit in the last place at most, and the factor by none: errors have no bias."""
    parameter = nn.Parameter(torch.zeros(10_000, dtype=dtype))
    before = torch.rand(10_000, dtype=FP64).add(0.5).to(dtype)
    parameter.grad = before.clone()
    scale_gradients_([parameter], torch.tensor(1 / 3, dtype=FP64))
    relative = parameter.grad.double() / (before.double() / 3) - 1
    eps = torch.finfo(dtype).eps
    assert relative.abs().max() <= eps / 2 * 1.01
    assert relative.mean().abs() < eps / 50
    rounded_factor = torch.tensor(1 / 3, dtype=dtype).double() * 3 - 1
    assert rounded_factor.abs() > eps / 10


def _scaling(in_float16: bool) -> LossScaling:
    alone: Any = SimpleNamespace(sizes=MeshSizes(1, 1))
    return LossScaling(None, in_float16, alone, torch.device("cpu"), False, PatchStack())


def test_range_of_sums() -> None:
    """Room for sixteen times what the first micro-batch lets expect, then for the largest window: powers of two."""
    scaling = _scaling(True)
    assert scaling.start_window(1000) == 2.0**-14
    for denominator, factor in (
        (1500.0, 2.0**-14),
        (0.0, 2.0**-14),
        (16_500.0, 2.0**-15),
        (1100.0, 2.0**-15),
    ):
        scaling.window_ended([], torch.tensor(denominator, dtype=FP64))
        assert scaling.start_window(1) == factor
    assert _scaling(True).start_window(2.0**-10) == 2.0**6  # denominators below one enlarge the sums
    assert _scaling(True).start_window(0) == 1
    assert _scaling(False).start_window(1) is None
