"""Values for a model that was created on the meta device: those that it would have had elsewhere, on every rank.

The model is sharded while it still has no values, and memory is allocated for the shards alone. Then every module's own
initialiser runs as it would have in the constructor: children before parents, on whole tensors in host memory, in the
dtype that they were created in, from rank 0's random state. Each rank keeps its shards of what comes out. So the
weights are the same for every layout, and the same as without the meta device where constructors do nothing but build
children and call these initialisers; and a rank never holds more than what one call touches.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.distributed import collectives
from lightning_automodel.sharding.apply import shard_like
from lightning_automodel.sharding.units import class_name

_UNTOUCHED = 0xA5
"""What the bytes of a tensor hold that nobody has given values yet."""

_LEFT_EMPTY = "_lightning_automodel_left_empty"
"""Attribute of a module: names of its parameters and buffers that have memory and were left without values.

Kept on modules, not on tensors: torch replaces those, and swaps none that anything refers to weakly.
"""


class _Call(NamedTuple):
    """One initialiser, and the module whose tensors, and those below, it may fill."""

    module: nn.Module
    run: Callable[[], Any]


class _Slot(NamedTuple):
    """Where a module holds a tensor."""

    module: nn.Module
    name: str

    def get(self) -> Tensor:
        return getattr(self.module, self.name)

    def put(self, tensor: Tensor) -> None:
        setattr(self.module, self.name, tensor)


def waiting(model: nn.Module) -> dict[str, torch.dtype]:
    """Parameters and buffers without values (meta device), by all names, with the dtypes that they were created in."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.dtype for name, tensor in named if tensor.device.type == "meta"}


def left_empty(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that an earlier :func:`materialize` left without values. Not a collective."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in sorted(vars(module).get(_LEFT_EMPTY, ()))
    ]


def _mark_left_empty(module: nn.Module, name: str) -> None:
    if any(slot.name == name for slot in _slots(module)):
        vars(module).setdefault(_LEFT_EMPTY, set()).add(name)


def materialize(model: nn.Module, created_as: dict[str, torch.dtype], device: torch.device, offload: bool) -> list[str]:
    """Give values to what has none, in place.

    A collective over the default group: every rank must call it, with the same model. Random numbers are drawn as on
    rank 0, and each rank goes on with its own random state as if none had been drawn.

    Args:
        model: The model, sharded as it is to be.
        created_as: From :func:`waiting`, before anybody converted the model.
        device: Where tensors are to be.
        offload: Where shards are to be in host memory instead.

    Returns:
        Names of the parameters, buffers and tensor attributes that no initialiser has touched: see
        :func:`check_filled`.
    """
    filling = _Filling(model, created_as, device, offload)
    try:
        with _random_as_on_rank_zero(), torch.no_grad():
            for call in _calls(model):
                filling.run(call)
    finally:
        for slot in (slot for module in model.modules() for slot in _slots(module)):
            if id(slot.get()) in filling.pending:
                _bytes(torch_internals.local_tensor(slot.get())).fill_(_UNTOUCHED)
                _mark_left_empty(slot.module, slot.name)
    attributes = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.device.type == "meta"
    ]
    return [*filling.pending.values(), *attributes]


def check_filled(model: nn.Module, untouched: list[str], device: torch.device) -> None:
    """Raise ValueError, on every rank, for tensors that still have no values, naming them.

    A collective over the default group where ``untouched`` is not empty. It reads tensors on the host.

    Args:
        model: The model, after checkpoints were loaded.
        untouched: From :func:`materialize` and :func:`left_empty`.
        device: Where the group can reduce.
    """
    if not untouched:
        return
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in untouched}
    tensors = [getattr(modules[name], name.rpartition(".")[2]) for name in untouched]
    flags = torch.tensor([_is_untouched(tensor) for tensor in tensors], dtype=torch.int32)
    if dist.group.WORLD is not None:
        flags = collectives.reduce_tensor(flags, dist.group.WORLD, "max", device)
    for module in modules.values():
        vars(module).pop(_LEFT_EMPTY, None)
    still = [name for name, flag in zip(untouched, flags, strict=True) if flag]
    for name in still:
        _mark_left_empty(modules[name], name.rpartition(".")[2])
    if not still:
        return
    empty = [f"{name} ({class_name(modules[name])})" for name in still]
    more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
    raise ValueError(
        f"{len(empty)} parameters, buffers or tensor attributes of {class_name(model)} were created on the meta device"
        f" and nobody gave them values: {', '.join(empty[:5])}{more}. Give their classes a reset_parameters() that"
        " fills them, as torch's layers have, load a checkpoint that holds them, or create them on a real device."
    )


@contextmanager
def _random_as_on_rank_zero() -> Iterator[None]:
    with _random_state_kept():
        lightning_internals.set_rng_states(
            collectives.broadcast_object(lightning_internals.collect_rng_states(include_cuda=False), src=0)
        )
        yield


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Context that draws nothing, also where it ends by an exception (for which Lightning's ``isolate_rng`` does)."""
    states = lightning_internals.collect_rng_states(include_cuda=False)
    try:
        yield
    finally:
        lightning_internals.set_rng_states(states)


def _children_first(model: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(model) in seen:
        return
    seen.add(id(model))
    for child in model.children():
        yield from _children_first(child, seen)
    yield model


def _calls(model: nn.Module) -> Iterator[_Call]:
    """Every initialiser in the order of construction.

    ``reset_parameters()`` is torch's convention, ``_reset_parameters()`` that of its attention and transformers;
    ``_init_weights(module)``, called for each module below, that of Hugging Face, timm and many others.
    """
    for module in _children_first(model):
        for name in ("reset_parameters", "_reset_parameters"):
            if _takes(module, name, 0):
                yield _Call(module, getattr(module, name))
                break
        if _takes(module, "_init_weights", 1):
            initialise: Any = module._init_weights
            for submodule in _own_modules(module):
                yield _Call(submodule, partial(initialise, submodule))
        elif _takes(module, "init_weights", 0):
            yield _Call(module, module.init_weights)  # type: ignore[arg-type]


def _takes(module: nn.Module, name: str, num_arguments: int) -> bool:
    """Whether the class of ``module`` has such a method, callable with so many arguments."""
    if not callable(getattr(type(module), name, None)):
        return False
    try:
        inspect.signature(getattr(module, name)).bind(*[None] * num_arguments)
    except (TypeError, ValueError):
        return False
    return True


def _own_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Children first, without submodels that have an ``_init_weights`` of their own."""
    others = {
        id(below)
        for module in model.modules()
        if module is not model and _takes(module, "_init_weights", 1)
        for below in module.modules()
    }
    return (module for module in _children_first(model) if id(module) not in others)


def _slots(module: nn.Module) -> list[_Slot]:
    """Where ``module`` itself holds parameters and buffers."""
    held = (*module._parameters.items(), *module._buffers.items())
    return [_Slot(module, name) for name, tensor in held if tensor is not None]


class _Filling:
    """What has been filled so far.

    Attributes:
        pending: Names of the tensors that have no values yet, by the tensor's id.
    """

    def __init__(
        self, model: nn.Module, created_as: dict[str, torch.dtype], device: torch.device, offload: bool
    ) -> None:
        self.pending: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._owners: dict[int, nn.Module] = {}
        self._allocate(model, device, offload)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) in self._owners:
                self._dtypes[id(tensor)] = created_as[name]
                if tensor.numel() > 0:
                    self.pending[id(tensor)] = name

    def _allocate(self, model: nn.Module, device: torch.device, offload: bool) -> None:
        """Memory for what has none, whatever it holds; who shares a tensor goes on sharing it."""
        allocated: dict[Tensor, Tensor] = {}
        for module in _children_first(model):
            for slot in _slots(module):
                tensor = slot.get()
                if tensor.device.type != "meta":
                    continue
                if tensor not in allocated:
                    on_host = offload and isinstance(tensor, DTensor)
                    where = torch.device("cpu") if on_host else device
                    empty = torch.empty_like(tensor, device=where, memory_format=torch.contiguous_format)
                    allocated[tensor] = _like(tensor, empty)
                    self._owners[id(allocated[tensor])] = module
                slot.put(allocated[tensor])

    def run(self, call: _Call) -> None:
        """Run an initialiser on whole copies of what it touches, and keep this rank's part of the outcome."""
        slots = [slot for module in call.module.modules() for slot in _slots(module)]
        whole = {id(slot.get()) for slot in slots}
        if whole.isdisjoint(self._owners):
            return
        reached = whole
        if any(slot.module is not call.module for slot in slots):
            with _random_state_kept():
                trial = _run(call, slots, {id(slot.get()): _on_meta(slot.get()) for slot in slots})
            reached = whole if trial.error else trial.reached
        states = lightning_internals.collect_rng_states(include_cuda=False)
        outcome = self._run_on_copies(call, slots, reached)
        if not outcome.reached <= reached:
            lightning_internals.set_rng_states(states)
            outcome = self._run_on_copies(call, slots, whole)
        if outcome.error is not None:
            raise outcome.error
        for slot, result in zip(slots, outcome.results, strict=True):
            if id(slot.get()) in outcome.reached and self._may_fill(call, slot):
                self._keep(slot.get(), result)

    def _run_on_copies(self, call: _Call, slots: list[_Slot], whole: set[int]) -> "_Outcome":
        tensors = {id(slot.get()): slot.get() for slot in slots}
        copies = {key: self._whole_copy(t) if key in whole else _on_meta(t) for key, t in tensors.items()}
        with _default_dtype(next((c.dtype for c in copies.values() if c.is_floating_point()), None)):
            return _run(call, slots, copies)

    def _whole_copy(self, tensor: Tensor) -> Tensor:
        """Its values in host memory, gathered where they are sharded: a collective; a pattern where it has none."""
        dtype = self._dtypes.get(id(tensor), tensor.dtype)
        if id(tensor) in self.pending:
            copy = _untouched_like(tensor, torch.device("cpu"), dtype)
        else:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            copy = whole.detach().to("cpu", dtype, copy=True)
        return _like(tensor, copy)

    def _may_fill(self, call: _Call, slot: _Slot) -> bool:
        """Not what had values from the start; and of the modules that share a tensor, the first one fills it."""
        owner = self._owners.get(id(slot.get()))
        return owner is not None and (owner is call.module or slot.module is not call.module)

    def _keep(self, tensor: Tensor, whole: Tensor) -> None:
        """Overwrite ``tensor`` with its part of ``whole``, which every rank holds, if that has values by now."""
        if id(tensor) not in self.pending or not _is_untouched(whole):
            torch_internals.local_tensor(tensor).copy_(torch_internals.local_tensor(shard_like(tensor, whole)))
            self.pending.pop(id(tensor), None)


def _like(original: Tensor, tensor: Tensor) -> Tensor:
    """``tensor``, as a parameter with the same attributes where the original is one."""
    if not isinstance(original, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=original.requires_grad)
    vars(parameter).update(vars(original))
    return parameter


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """What initialisers compute beside their tensors has the dtype that these were created in, as in a constructor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _untouched_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    pattern = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)
    _bytes(pattern).fill_(_UNTOUCHED)
    return pattern


def _is_untouched(tensor: Tensor) -> bool:
    """Whether this rank's part has no values; where it has no part, others know."""
    local = torch_internals.local_tensor(tensor)
    return local.device.type == "meta" or (local.numel() > 0 and bool((_bytes(local) == _UNTOUCHED).all()))


def _on_meta(tensor: Tensor) -> Tensor:
    return _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


class _Outcome(NamedTuple):
    """What came of an initialiser: what the slots held afterwards, whose tensors it reached, by id, and its failure."""

    results: list[Tensor]
    reached: set[int]
    error: Exception | None


def _run(call: _Call, slots: list[_Slot], copies: dict[int, Tensor]) -> _Outcome:
    """Run ``call`` while ``slots`` hold copies, by the ids of what they hold before and after."""
    originals = [slot.get() for slot in slots]
    error = None
    watch = _Watch(copies.values())
    try:
        for slot, tensor in zip(slots, originals, strict=True):
            slot.put(copies[id(tensor)])
        with watch:
            call.run()
    except Exception as raised:  # the caller decides whether it wanted values that it did not get
        error = raised
    finally:
        results = [slot.get() for slot in slots]
        for slot, tensor in zip(slots, originals, strict=True):
            slot.put(tensor)
    reached = {
        id(tensor)
        for tensor, result in zip(originals, results, strict=True)
        if result is not copies[id(tensor)] or id(result) in watch.seen
    }
    return _Outcome(results, reached, error)


class _Watch(TorchFunctionMode):
    """Notes which of ``tensors`` take part in any operation."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self._ids = {id(tensor) for tensor in tensors}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchFunctionMode`."""
        self.seen.update(self._ids.intersection(id(leaf) for leaf in tree_leaves((args, kwargs))))
        return function(*args, **(kwargs or {}))
