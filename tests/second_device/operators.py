"""Runs torch's own operator samples on the second device and on the CPU, and says where they differ.

`python -m tests.second_device.operators [FIRST] [STEP]` takes each STEP-th operator of torch's list from the
FIRST on.
"""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.second_device import device

SAMPLES = 4
LEFT_OUT = {
    "empty": "its result is whatever the memory held",
    "empty_like": "the same",
    "empty_permuted": "the same",
    "empty_strided": "the same",
    "new_empty": "the same",
    "new_empty_strided": "the same",
    "chalf": "complex halves cannot be compared on a CPU",
    "tensor_split": "wants its sections on the CPU, whatever the device",
    "to": "its samples name a CPU as where to",
}
DTYPES = (torch.float64, torch.float32, torch.int64, torch.complex128)
NOT_DENSE = "a result that is not dense"


def op_database() -> Any:
    """Torch's list of operators with samples; it imports a package for snapshots, which nothing here uses."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=object))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


class Copier:
    """Copies tensors to the device with their strides, offsets and shared storages."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._storages: dict[int, tuple[Any, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            raise NotImplementedError(NOT_DENSE)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage._cdata] = storage, whole.to(self._target, copy=True)
        moved = torch.empty(0, dtype=tensor.dtype, device=self._target).set_(
            self._storages[storage._cdata][1].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        moved = torch._neg_view(moved) if tensor.is_neg() else moved
        return (moved.conj() if tensor.is_conj() else moved).requires_grad_(tensor.requires_grad)


def _placed(arguments: Any, target: str) -> Any:
    """The arguments on `target`, where keywords name devices and generators too."""
    copier = Copier(target)
    moved = tree_map_only(Tensor, copier, arguments)
    args, kwargs = moved
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": target}
    return args, kwargs


def _outcome(run: Callable[..., Any], given: Any, target: str) -> Any:
    torch.manual_seed(0)
    args, kwargs = _placed(copy.copy(given), target)
    # What makes tensors from numbers makes them there.
    is_factory = not any(isinstance(each, Tensor) for each in tree_flatten((args, kwargs))[0])
    try:
        with warnings.catch_warnings(), torch.device(target) if is_factory else nullcontext():
            warnings.simplefilter("ignore")
            return run(args, kwargs)
    except Exception as error:
        return error


def _difference(here: Any, there: Any) -> str | None:
    """How a result differs from the CPU's; None if it has the same type, shape, values and, for a tensor, place."""
    if isinstance(there, Exception):
        return None  # composite kernels check less than the CPU's
    if isinstance(here, Exception):
        return f"{here!r:.300}"
    mine, mine_spec = tree_flatten(here)
    theirs, theirs_spec = tree_flatten(there)
    if len(mine) != len(theirs):
        return f"{mine_spec} != {theirs_spec}"
    for index, (own, other) in enumerate(zip(mine, theirs, strict=True)):
        if not isinstance(other, Tensor):
            if own != other and not (own != own and other != other) and not isinstance(other, torch.device):
                return f"{index}: {own!r} != {other!r}"
            continue
        if own.device.type != device.TYPE:
            return f"{index}: on {own.device}"
        if other.layout != torch.strided:
            raise NotImplementedError(NOT_DENSE)
        if (own.shape, own.dtype) != (other.shape, other.dtype):
            return f"{index}: {own.shape}, {own.dtype} != {other.shape}, {other.dtype}"
        got = own.detach().cpu().resolve_conj().resolve_neg()
        expected = other.detach().resolve_conj().resolve_neg()
        if torch.equal(got, expected):
            continue
        tolerance = 1e-12 if expected.dtype in (torch.float64, torch.complex128) else 1e-5
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{index}: values differ\n{got}\n{expected}"
    return None


def _gradients(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    leaves = [
        each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor) and each.requires_grad
    ]
    results = [
        each
        for each in tree_flatten(function(*args, **kwargs))[0]
        if isinstance(each, Tensor) and each.requires_grad
    ]
    if not leaves or not results:
        return []
    weights = [
        torch.linspace(0.5, 1.5, each.numel(), dtype=torch.float64).view(each.shape) for each in results
    ]
    ones = [weight.to(each.device, each.dtype) for weight, each in zip(weights, results, strict=True)]
    return torch.autograd.grad(results, leaves, ones, allow_unused=True)


def _with_out(function: Callable[..., Any], args: Any, kwargs: Any, how: str) -> Any:
    """The operator with `out=`, of which an empty tensor is resized and one with gaps is not."""
    result = function(*args, **kwargs)
    if not isinstance(result, Tensor):
        return None
    if how == "empty":
        out = torch.empty(0, dtype=result.dtype, device=result.device)
    else:
        out = torch.full((*result.shape, 2), 7, dtype=result.dtype, device=result.device)[..., 0]
    torch.manual_seed(0)
    return function(*args, **kwargs, out=out), out


def _variants(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What is done with a sample, as a function of its arguments."""
    yield "call", lambda args, kwargs: op(*args, **kwargs)
    if op.supports_autograd:
        yield "gradients", lambda args, kwargs: _gradients(op, args, kwargs)
    if op.supports_out:
        for how in ("empty", "gaps"):
            yield f"out ({how})", lambda args, kwargs, how=how: _with_out(op, args, kwargs, how)
    if op.inplace_variant is not None:
        yield "in place", lambda args, kwargs: _in_place(op.inplace_variant, args, kwargs)


def _in_place(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Tensor, lambda each: each.detach(), (args, kwargs))
    return function(*args, **kwargs), args


def differences(op: Any, dtype: torch.dtype) -> Iterator[str]:
    """Where an operator does something else on the device than on the CPU, and how."""
    samples = list(
        op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point)
    )
    # The first samples are the plain ones, the last the odd ones.
    for sample in [*samples[: SAMPLES // 2], *samples[SAMPLES // 2 :][-SAMPLES // 2 :]]:
        given = (sample.input, *sample.args), sample.kwargs
        for name, run in _variants(op):
            try:
                here = _outcome(run, given, device.TYPE)
                there = _outcome(run, given, "cpu")
                found = _difference(here, there)
            except NotImplementedError as error:
                found = str(error)
            if found and NOT_DENSE in found:
                continue
            if found:
                yield f"{op.formatted_name} {dtype} {name}: {found}"
                break


def main(first: int, step: int) -> None:
    """Print what differs, and how many operators were compared."""
    database = [op for op in op_database() if op.name not in LEFT_OUT]
    compared = [(op, dtype) for op in database[first::step] for dtype in DTYPES if dtype in op.dtypes]
    for op, dtype in compared:
        for found in differences(op, dtype):
            print(found, flush=True)
    print(f"{len(compared)} compared", flush=True)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:3]) if sys.argv[1:] else (0, 1))
