"""Shards that user code takes for whole tensors: ``p.grad[rows] = 0`` in ``on_before_optimizer_step``.

Torch gives a copy for a slice across shards, so that what ``p.grad[2:4].zero_()`` writes is lost. For the
number of a norm, ``float(p.grad.norm())``, it gives each rank its own part. Random numbers it draws for each
shard by itself: on a CPU the same ones on all ranks, so that ``p.normal_()`` makes equal rows.
"""

import functools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import versions
from lightning_automodel.sharding.write_counts import DATA

_SLICING = ("chunk", "diagonal", "dsplit", "hsplit", "narrow", "select", "split", "tensor_split", "vsplit")
_VIEWING = ("flatten", "ravel", "reshape", "reshape_as", "unflatten", "view", "view_as")
_NUM_KEPT = 100  # slices of an optimizer step
_FILLING = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)
_DRAWING_LIKE = ("rand_like", "randint_like", "randn_like")
_DRAWING_FROM = ("bernoulli", "normal", "poisson")  # from probabilities, means or rates
_READING = ("item", "tolist", "__float__", "__int__", "__bool__", "__len__")


class ShardsAsWhole:
    """Makes ``shard[index]`` and random numbers right, and refuses what would be wrong, as long as ``patches`` last.

    Code that indexes runs on all ranks: if a tensor must be gathered for it, that is a collective on its
    mesh. Random numbers are drawn for the whole tensor, as in one process, and each rank keeps its shard of
    them. Ranks that are seeded alike, and have drawn alike since, then hold parts of one tensor.
    """

    def __init__(self, module: nn.Module, patches: PatchStack) -> None:
        self._shapes = {parameter.shape for parameter in module.parameters()}
        self._sizes = {parameter.numel() for parameter in module.parameters()}
        self._copies: deque[tuple[Tensor, int]] = deque(maxlen=_NUM_KEPT)
        for name in ("__getitem__", *_SLICING, *_VIEWING):
            patches.set(DTensor, name, self._watched(getattr(DTensor, name)))
        for name in _SLICING:
            patches.set(torch, name, self._watched(getattr(torch, name)))
        for name in _READING:
            patches.set(DTensor, name, _refusing_parts(getattr(DTensor, name)))
        patches.set(DTensor, "__setitem__", self._assigning(DTensor.__setitem__))
        for name in _FILLING:
            patches.set(DTensor, name, self._filling(getattr(DTensor, name)))
        for name in (*_DRAWING_LIKE, *_DRAWING_FROM):
            patches.set(torch, name, self._drawing(getattr(torch, name)))
        patches.set(DTensor, "bernoulli", self._drawing(DTensor.bernoulli))
        patches.callback(register_optimizer_step_post_hook(self._check).remove)

    def _watched(self, slicing: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(slicing)
        def cut(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not args or not isinstance(args[0], DTensor):
                return slicing(*args, **kwargs)
            tensor = args[0]
            if torch.is_grad_enabled() and tensor.requires_grad:
                return slicing(*args, **kwargs)
            # Rows that a tensor or a list chooses are a copy of a plain tensor too.
            if slicing.__name__ == "__getitem__" and _chooses(args[1]):
                if _is_sharded(tensor):
                    return tensor.full_tensor()[_whole(args[1])]
                return slicing(*args)
            found = slicing(*args, **kwargs)
            watch = partial(self._watch, tensor)
            if isinstance(found, (tuple, list)):
                return tuple(map(watch, found))
            return watch(found)

        return cut

    def _watch(self, tensor: DTensor, part: Any) -> Any:
        """A slice whose writes are counted by itself, if it should share the memory of ``tensor`` and does not."""
        # Activations of tensor-parallel layers are sliced too.
        is_known = tensor.numel() in self._sizes or any(tensor is copied for copied, _ in self._copies)
        if not isinstance(part, DTensor) or not is_known:
            return part
        memory = torch_internals.local_tensor(tensor).untyped_storage().data_ptr()
        if torch_internals.local_tensor(part).untyped_storage().data_ptr() == memory:
            return part
        part = DATA.__get__(part)  # with a version counter of its own
        self._copies.append((part, *versions([part])))
        return part

    def _assigning(self, assign: Callable[..., None]) -> Callable[..., None]:
        def set_item(tensor: DTensor, index: Any, value: Any) -> None:
            if (torch.is_grad_enabled() and tensor.requires_grad) or not _is_sharded(tensor):
                assign(tensor, index, value)
                return
            # `g[2:4] *= 2` changes a slice, and assigns it.
            kept = [entry for entry in self._copies if entry[0] is not value]
            self._copies = deque(kept, maxlen=_NUM_KEPT)
            with torch.no_grad():
                whole = tensor.full_tensor()
                whole[_whole(index)] = _whole(value)
                tensor.copy_(_sharded_like(whole, tensor))

        return set_item

    def _stands_for_parameter(self, tensor: Any) -> bool:
        """Whether it is a sharded parameter or gradient, and no activation of a tensor-parallel layer."""
        return isinstance(tensor, DTensor) and tensor.shape in self._shapes and _is_sharded(tensor)

    def _filling(self, fill: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fill)
        def fill_whole(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
            if not self._stands_for_parameter(tensor):
                return fill(tensor, *args, **kwargs)
            whole = _empty_whole(tensor)
            fill(whole, *map(_whole, args), **kwargs)
            return tensor.copy_(_sharded_like(whole, tensor))

        return fill_whole

    def _drawing(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        is_like = draw.__name__ in _DRAWING_LIKE

        def whole_argument(value: Any) -> Any:
            if is_like and isinstance(value, DTensor):
                return _empty_whole(value)
            return _whole(value)

        @functools.wraps(draw)
        def draw_whole(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return draw(*args, **kwargs)
            model = next(filter(self._stands_for_parameter, (*args, *kwargs.values())), None)
            if model is None:
                return draw(*args, **kwargs)
            whole_kwargs = {name: whole_argument(value) for name, value in kwargs.items()}
            return _sharded_like(draw(*map(whole_argument, args), **whole_kwargs), model)

        return draw_whole

    def _check(self, *_: Any) -> None:
        copies = self._copies
        self._copies = deque(maxlen=_NUM_KEPT)
        if any(
            version != before
            for version, (_, before) in zip(versions(p for p, _ in copies), copies, strict=True)
        ):
            raise RuntimeError(
                "A slice of a sharded parameter or gradient was written in place, and the write was lost,"
                " since the slice is a copy. Assign it, as p.grad[rows] = 0 or p.grad[rows] *= 0.5, which"
                " writes into the shards and gathers the tensor for it. Or pass data_parallel='ddp'."
            )


def _is_sharded(tensor: DTensor) -> bool:
    """Whether some rank holds less than the whole."""
    return not any(placement.is_partial() for placement in tensor.placements) and any(
        not placement.is_replicate() for placement in tensor.placements
    )


def _empty_whole(tensor: DTensor) -> Tensor:
    """A plain tensor like all of ``tensor``, without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _sharded_like(whole: Tensor, tensor: DTensor) -> DTensor:
    """The shards of a plain tensor that every rank has, laid out like ``tensor``. Nothing is communicated."""
    replicated = DTensor.from_local(whole, tensor.device_mesh, [Replicate()] * len(tensor.placements))
    return replicated.redistribute(placements=tensor.placements)


def _chooses(index: Any) -> bool:
    """Whether an index chooses rows by a tensor or a list."""
    if isinstance(index, tuple):
        return any(map(_chooses, index))
    return isinstance(index, (Tensor, list))


def _refusing_parts(read: Callable[..., Any]) -> Callable[..., Any]:
    """A way to read a number that refuses each rank's part of it."""

    @functools.wraps(read)
    def read_whole(tensor: DTensor) -> Any:
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        is_part = any(size > 1 and placement.is_partial() for size, placement in sizes)
        # torch.tensor([norm]) asks a number for its length, as Lightning's grad_norm() does.
        if is_part and (tensor.ndim == 0 or read.__name__ != "__len__"):
            raise RuntimeError(
                "The number of a sharded parameter or gradient was read, such as float(p.grad.norm()), and"
                " each rank would get that of its own part. Gather it first, on all ranks:"
                " p.grad.norm().full_tensor()."
            )
        return read(tensor)

    return read_whole


def _whole(value: Any) -> Any:
    """An index or a value, with DTensors gathered. A collective if there are any."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, tuple):
        return tuple(map(_whole, value))
    return value
