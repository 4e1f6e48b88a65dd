"""Sharded tensors that compute like the whole tensor, whatever user code does to them between steps.

A :class:`Shard` is a parameter of a sharded module, its gradient, or an optimizer's state for it. One rule holds
for all that torch can do with it:

- What treats each element by itself runs on this rank's part, without communication.
- Everything else runs on the whole tensor, which is gathered for it: a collective that every rank must reach. Its
  results are plain tensors, equal on all ranks. What it has written goes back into the shards, each rank its part.

Random numbers are drawn for the whole tensor, as one process draws them. Ranks that are seeded alike, and have drawn
alike since, then hold parts of one tensor.
"""

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel.distributed import collectives
from lightning_automodel.gradients.owner_exchange import holders_of
from lightning_automodel.gradients.token_loss import wide_dtype
from lightning_automodel.internals import fsdp2, fsdp2_gathers
from lightning_automodel.internals.dtensor import (
    DATA,
    GRAD,
    alike,
    break_graphs_at,
    has_layout,
    part_of,
    parts_of,
    plain_access,
    support_foreach,
    with_part,
)
from lightning_automodel.internals.torch import version, versions, without_wrappers

Function = Callable[..., Any]
Arguments = Sequence[Any]
Keywords = dict[str, Any]

SAVE_WHOLE = (
    "gather it on all ranks, and let one of them write it:"
    " state = {name: p.full_tensor() for name, p in module.state_dict().items()}, then"
    " `if trainer.is_global_zero: torch.save(state, path)`. Or call trainer.save_checkpoint(path), or"
    " export_hugging_face(module, path) in place of save_pretrained, on all ranks."
)
"""How to write sharded weights that other programs read."""


class Shard(DTensor):
    """A sharded tensor that user code may take for the whole one.

    Given by ``parameter.__class__ = Shard`` (:func:`make_shard`), so that the object, which FSDP2 and optimizers
    hold, stays the same.

    Attributes:
        parameter_name: For messages.
        fsdp_param: What FSDP2 knows of the parameter; None of a gradient or a state.
        accepts_hooks: Whether FSDP2 calls its post-accumulate-gradient hooks with a final gradient.
        num_assignments: How often it was given other values (``p.data = values``).
        on_write: Called after a write, since the parameter may be gathered.
        source: Of ``p.data`` and ``p.detach()``: whose memory and version counter it shares.
    """

    parameter_name: str = "a tensor"
    fsdp_param: Any = None
    accepts_hooks: bool = False
    num_assignments: int = 0
    on_write: Callable[[], None] | None = None
    source: "Shard | None" = None

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        if len(types) > 1 and any(hasattr(cls, "refuses_use") for cls in types):
            return NotImplemented  # what a shard has replaced raises itself
        with plain_access():
            return _rule_of(function.__name__)(function, args, kwargs or {})

    # Read so often, by optimizers, that it does not take the way of other attributes.
    @property
    def grad(self) -> Any:
        """The gradient, a shard too."""
        with plain_access():
            gradient = GRAD.__get__(self)
            if gradient.__class__ is DTensor:
                make_shard(gradient).parameter_name = self.parameter_name
        return gradient

    @grad.setter
    def grad(self, value: Any) -> None:
        with plain_access():
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if is_whole and value.shape == self.shape:
                value = with_part(Shard, own_part(value, self).clone(), self)
            GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shard":
        if id(self) in memo:
            return memo[id(self)]
        with plain_access(), torch.no_grad():
            copied: Any = with_part(DTensor, part_of(self).clone(), self)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied)
            make_shard(copied)
            copied.parameter_name = self.parameter_name
            copied.requires_grad_(self.requires_grad)
            if self.grad is not None:
                copied.grad = self.grad.clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"{self.parameter_name} is sharded, and would be pickled as the part of this rank alone, by"
            f" torch.save or by passing it to another process. Save it whole: {SAVE_WHOLE}"
        )


support_foreach(Shard)
break_graphs_at(Shard)


def make_shard(tensor: Any) -> Any:
    """Let a sharded DTensor compute like the whole tensor. Anything else is returned as it is."""
    if tensor.__class__ is DTensor and not any(placement.is_partial() for placement in tensor.placements):
        tensor.__class__ = Shard
    return tensor


def shard_parameters(module: nn.Module, accept_hooks: bool) -> None:
    """Let all parameters that FSDP2 manages compute like whole tensors, from now on, also after a run.

    ``accept_hooks``: whether FSDP2 may call post-accumulate-gradient hooks of theirs, since gradients are final then.
    """
    names = {id(parameter): without_wrappers(name) for name, parameter in module.named_parameters()}
    for group in fsdp2.fsdp_param_groups(module):
        for param in group.fsdp_params:
            shard = make_shard(param.sharded_param)
            shard.parameter_name = names.get(id(shard), "a parameter")
            shard.fsdp_param = param
            shard.accepts_hooks = accept_hooks


# --- Whole tensors --------------------------------------------------------------------------------------------------


def _no_copy() -> None:
    """The reference to a copy that was never made."""


class GatheredCopy:
    """The whole of a shard, gathered for a computation. What is written to it goes into the shard.

    Creating one is a collective on the shard's mesh.

    Attributes:
        shard: Where it comes from.
        whole: A plain tensor, equal on all ranks.
    """

    def __init__(self, shard: DTensor, function: Function) -> None:
        self.shard = shard
        self._function = function
        self.whole = gather(shard, function)
        self._note_versions()

    @classmethod
    def of(cls, shard: DTensor, function: Function) -> "GatheredCopy":
        """The copy that views of ``shard`` share, brought up to date, or a new one. A collective on the shard's mesh.

        One that autograd follows is nobody else's.
        """
        if _is_recorded(shard):
            return cls(shard, function)
        source: Any = getattr(shard, "source", None)
        if source is None:
            source = shard
        kept: GatheredCopy | None = getattr(source, "kept_copy", _no_copy)()
        with torch.no_grad():
            if kept is None:
                kept = cls(source, function)
                source.kept_copy = weakref.ref(kept)
            else:
                # Also if it is up to date: it may live on some ranks alone, and all must come.
                kept.whole.copy_(gather(source, function))
                kept._note_versions()
        return kept

    def _note_versions(self) -> None:
        (self._shard_version,) = versions([self.shard])
        self._whole_version = version(self.whole)

    def carry(self) -> None:
        """Write into the shard what the whole tensor was changed to since. Not a collective."""
        if version(self.whole) == self._whole_version:
            return
        if self.whole.shape != self.shard.shape:
            raise RuntimeError(
                f"{self._function.__name__} changes the shape of {_name_of(self.shard)}, which is sharded,"
                " in place. Call the function without the underscore, which gives a new tensor."
            )
        with torch.no_grad():
            part_of(self.shard).copy_(own_part(self.whole, self.shard))
        _count_writes([self.shard])
        self._note_versions()

    def refresh(self) -> None:
        """Gather again if the shard was written since, for a view that is used again. Then a collective.

        A view that one rank alone has kept may thus wait for the others, which are told what for.
        """
        if versions([self.shard]) != [self._shard_version] and not self.whole.requires_grad:
            with torch.no_grad():
                self.whole.copy_(gather(self.shard, self._function))
            self._note_versions()

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the whole one."""
        if tensor.layout is not torch.strided:
            return False
        memory = self.whole.untyped_storage().data_ptr()
        return memory != 0 and tensor.untyped_storage().data_ptr() == memory


class View(Tensor):
    """A view of a gathered tensor, such as ``p.grad[2:4]`` or ``p.view(-1)``: writes to it go into the shards."""

    copy: GatheredCopy
    owner: DTensor  # what the view was taken of: a parameter, or ``p.data``, which autograd does not follow

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        with plain_access():
            if function == DATA.__get__:
                function = Tensor.detach  # which shares the version counter
            return _on_wholes(function, args, kwargs or {})

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain_access():
            return self.as_subclass(Tensor).clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with plain_access():
            return self.as_subclass(Tensor).clone()


break_graphs_at(View)


def gather(shard: DTensor, function: Function) -> Tensor:
    """The whole of a sharded tensor. A collective on its mesh. Differentiable; what autograd leaves is the shard's.

    ``function`` is what it is gathered for: if some rank does not come, messages name it.
    """
    if shard.device_mesh.device_type == "cpu":
        # Gloo ends a process whose gather meets another gather, of another size. Here, a rank that is alone waits.
        _all_reduced(torch.zeros(1), shard, dist.ReduceOp.SUM, function)
    with collectives.gathering(_name_of(shard), function.__name__):
        if _is_recorded(shard):
            return shard.full_tensor()
        # Tensors of inference mode would not tell of writes.
        with torch.inference_mode(False), torch.no_grad():
            part = part_of(shard)
            # An offloaded shard lies on the host, where its ranks may not communicate.
            moved = part.to(shard.device_mesh.device_type)
            return with_part(DTensor, moved, shard).full_tensor().to(part.device)


def own_part(whole: Tensor, like: DTensor) -> Tensor:
    """The view of a plain tensor, which every rank has, that this rank would hold if it were laid out like ``like``."""
    return holders_of(like.device_mesh, like.placements).part(whole, dist.get_rank())


def _count_writes(shards: list[Any]) -> None:
    """Raise the version counters of shards whose parts were written, and tell who has gathered them."""
    counted = [shard for shard in shards if not shard.is_inference()]
    torch.autograd.graph.increment_version(counted)
    listeners = {shard.on_write for shard in shards if isinstance(shard, Shard)}
    for listener in listeners:
        if listener is not None:
            listener()


def _on_wholes(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Compute on whole tensors, gathered for it, and carry what was written into the shards. A collective."""
    _refuse_write_to_leaf(function, args)
    # By the ids of the tensors, which must live as long.
    copies: dict[int, tuple[DTensor, GatheredCopy]] = {}

    def whole_of(tensor: Any) -> Any:
        if isinstance(tensor, DTensor):
            if id(tensor) not in copies:
                copies[id(tensor)] = (tensor, GatheredCopy.of(tensor, function))
            return copies[id(tensor)][1].whole
        if isinstance(tensor, View):
            copies[id(tensor)] = (tensor.owner, tensor.copy)
            tensor.copy.refresh()
        return tensor

    def shard_or_view(result: Any) -> Any:
        if not isinstance(result, Tensor) or isinstance(result, View):
            return result
        for owner, copy in copies.values():
            if result is copy.whole:
                return owner
            if copy.shares_memory(result):
                view = result.as_subclass(View)
                view.copy = copy
                view.owner = owner
                return view
        return result

    result = function(*_map(whole_of, args), **_map(whole_of, kwargs))
    for _, copy in copies.values():
        copy.carry()
    return _map(shard_or_view, result)


def _map(convert: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``convert`` applied to what its lists, tuples and dictionaries hold."""
    if value.__class__ in (list, tuple):
        return value.__class__([_map(convert, entry) for entry in value])
    if value.__class__ is dict:
        return {key: _map(convert, entry) for key, entry in value.items()}
    return convert(value)


def _writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def _refuse_write_to_leaf(function: Function, args: Arguments) -> None:
    """Raise as torch does for a write that autograd would have to record on a parameter."""
    if not torch.is_grad_enabled() or not args or not _writes(function.__name__):
        return
    targets = args[0] if args[0].__class__ in (list, tuple) else [args[0]]
    sources = [target.owner if isinstance(target, View) else target for target in targets]
    is_recorded = any(isinstance(t, DTensor) and t.is_leaf and t.requires_grad for t in sources)
    if is_recorded and getattr(function, "__module__", None) != nn.init.__name__:
        raise RuntimeError(
            "A leaf Variable that requires grad is being used in an in-place operation: write parameters"
            " under torch.no_grad()."
        )


# --- Element by element ---------------------------------------------------------------------------------------------


def _elementwise(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Compute on this rank's parts, where all tensors fit to one layout; else on whole tensors."""
    if kwargs.get("out") is not None:
        return _into_out(function, args, kwargs)
    if "requires_grad" in kwargs:  # torch.zeros_like(p, requires_grad=True)
        others = {key: value for key, value in kwargs.items() if key != "requires_grad"}
        return _elementwise(function, args, others).requires_grad_(kwargs["requires_grad"])
    name = function.__name__
    writes = _writes(name)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    like = _model_of(tensors, writes)
    if like is None:
        return _on_wholes(function, args, kwargs)
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if writes and is_recorded:
        _refuse_write_to_leaf(function, args)
        return _as_dtensors(function, args, kwargs, like)
    parts: dict[int, Any] = {}
    for tensor in tensors:
        part = _part_like(tensor, like, is_recorded)
        if part is None:
            return _on_wholes(function, args, kwargs)
        parts[id(tensor)] = part
    result = function(
        *[parts.get(id(value), value) for value in args],
        **{key: parts.get(id(value), value) for key, value in kwargs.items()},
    )
    if not isinstance(result, Tensor):
        if result is NotImplemented:
            return result
        return _on_wholes(function, args, kwargs)
    if result is parts[id(like)]:  # written in place, or nothing to do, as for contiguous()
        if writes:
            _count_writes([like])
        return like
    if result.shape != parts[id(like)].shape or result.device != part_of(like).device:
        return _on_wholes(function, args, kwargs)
    return _as_shard(result, like)


def _model_of(tensors: list[Tensor], writes: bool) -> Shard | None:
    """The shard whose layout the result has: the largest, or the one that is written; None if that is whole."""
    if writes:
        if isinstance(tensors[0], Shard):
            return tensors[0]
        return None
    like = None
    for tensor in tensors:
        if isinstance(tensor, Shard) and (like is None or tensor.ndim > like.ndim):
            like = tensor
    return like


def _part_like(tensor: Tensor, like: DTensor, is_recorded: bool) -> Tensor | None:
    """This rank's part of what ``tensor`` is when it broadcasts to ``like``; None if it does not."""
    if isinstance(tensor, DTensor) and has_layout(tensor, like):
        if is_recorded and tensor.requires_grad:
            return tensor.to_local()
        return part_of(tensor)
    if tensor.numel() == 1 and tensor.ndim <= like.ndim and not isinstance(tensor, DTensor):
        if is_recorded and tensor.requires_grad:
            return None  # its gradient would be that of this rank's part
        return tensor
    if is_recorded and tensor.requires_grad:
        return None
    if isinstance(tensor, View):
        tensor.copy.refresh()
    if tensor.ndim > like.ndim or not _broadcasts(tensor.shape, like.shape):
        return None
    if isinstance(tensor, DTensor):
        tensor = gather(tensor, torch.broadcast_to)
    return own_part(tensor.expand(like.shape), like)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return all(size in (1, other) for size, other in zip(reversed(shape), reversed(to), strict=False))


def _as_shard(part: Tensor, like: DTensor) -> Shard:
    if part.requires_grad:
        return make_shard(
            DTensor.from_local(
                part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
            )
        )
    return with_part(Shard, part, like)


def _as_dtensors(function: Function, args: Arguments, kwargs: Keywords, like: DTensor) -> Any:
    """A write to a tensor that autograd follows, by DTensor's own rules: all tensors have its layout."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        replicas = [Replicate()] * like.device_mesh.ndim
        whole = DTensor.from_local(value.expand(like.shape).contiguous(), like.device_mesh, replicas)
        return whole.redistribute(placements=like.placements)

    return make_shard(function(*_map(convert, args), **_map(convert, kwargs)))


def _into_out(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``function(..., out=tensor)``: compute, then copy."""
    target = kwargs["out"]
    remaining = {key: value for key, value in kwargs.items() if key != "out"}
    has_shards = any(isinstance(value, (DTensor, View)) for value in (*args, *remaining.values()))
    if has_shards:
        result = _rule_of(function.__name__)(function, args, remaining)
    else:
        result = function(*args, **remaining)
    _rule_of("copy_")(Tensor.copy_, (target, result), {})
    return target


def _foreach(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Multi-tensor kernels (``torch._foreach_*``, ``torch._fused_*``), each entry of the lists by itself, on parts."""
    values = [*args, *kwargs.values()]
    targets = values[0]
    length = len(targets)
    models = _models_of(values, length)
    writes = _writes(function.__name__)
    writes_elsewhere = writes and any(
        like is not None and like is not target for like, target in zip(models, targets, strict=True)
    )
    if writes_elsewhere or any(map(_is_recorded, _listed(values))):
        return _on_wholes(function, args, kwargs)
    converted = []
    for value in values:
        if value.__class__ not in (list, tuple) or len(value) != length:
            converted.append(value)
            continue
        parts = _parts_alike(value, models)
        if parts is None:
            return _on_wholes(function, args, kwargs)
        converted.append(parts)
    result = function(*converted[: len(args)], **dict(zip(kwargs, converted[len(args) :], strict=True)))
    if writes:
        _count_writes([model for model in models if model is not None])
        return None if result is None else targets
    return [
        part if like is None else _as_shard(part, like) for part, like in zip(result, models, strict=True)
    ]


def _listed(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in lists."""
    for value in values:
        if value.__class__ in (list, tuple):
            yield from (entry for entry in value if isinstance(entry, Tensor))


def _models_of(values: Sequence[Any], length: int) -> Sequence[DTensor | None]:
    """For each index of the lists, the first shard that has it; None where all tensors are plain."""
    lists = [value for value in values if value.__class__ in (list, tuple) and len(value) == length]
    if set(map(type, lists[0])) == {Shard}:
        return lists[0]
    return [
        next((e for e in entries if isinstance(e, DTensor)), None) for entries in zip(*lists, strict=True)
    ]


def _parts_alike(tensors: Sequence[Any], models: Sequence[Any]) -> list[Any] | None:
    """This rank's parts of a list, each laid out like its model; None if some entry needs the whole tensor."""
    if tensors is models:
        return parts_of(models)
    classes = set(map(type, tensors))
    if classes == {Shard} and set(map(type, models)) == {Shard} and alike(tensors, models):
        return parts_of(tensors)
    parts: list[Any] = []
    for tensor, like in zip(tensors, models, strict=True):
        part = tensor
        if like is not None and isinstance(tensor, Tensor):
            part = _part_like(tensor, like, False)
        if part is None or isinstance(tensor, View):
            return None
        parts.append(part)
    return parts


# --- Sums and norms of all elements ---------------------------------------------------------------------------------


def _sum(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    shard: Any = args[0] if args else None
    is_plain = not isinstance(shard, DTensor) or len(args) > 1 or kwargs or _is_recorded(shard)
    if is_plain or not (shard.is_floating_point() or shard.is_complex()):
        return _on_wholes(function, args, kwargs)
    part = part_of(shard).sum(dtype=torch.promote_types(shard.dtype, torch.float32))
    return _all_reduced(part.reshape(1), shard, dist.ReduceOp.SUM, function).reshape(()).to(shard.dtype)


def _norm(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.norm()``, ``torch.norm(p, 2)``, ``torch.linalg.vector_norm(p, inf)``."""
    keywords = dict(kwargs)
    order = keywords.pop("p", keywords.pop("ord", args[1] if len(args) > 1 else 2))
    dtype = keywords.pop("dtype", None)
    if order in (None, "fro"):
        order = 2
    shard: Any = args[0] if args else None
    is_whole = len(args) > 2 or any(v is not None and v is not False for v in keywords.values())
    is_number = isinstance(order, (int, float)) and order > 0
    is_real = isinstance(shard, DTensor) and not shard.is_complex()
    if is_whole or not is_number or not is_real or _is_recorded(shard):
        return _on_wholes(function, args, kwargs)
    norm = _norms([shard], float(order), function)[0]
    return norm.to(dtype or shard.dtype.to_real())


def _equal(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``torch.equal``, which Lightning's finetuning callbacks call for each pair of parameters: by parts."""
    one, other = args
    if one.shape != other.shape:
        return False
    if not (isinstance(one, DTensor) and isinstance(other, DTensor) and has_layout(one, other)):
        return _on_wholes(function, args, kwargs)
    differs = torch.tensor([not torch.equal(part_of(one), part_of(other))], dtype=torch.int32)
    return not _all_reduced(differs, one, dist.ReduceOp.MAX, function)


def _foreach_norm(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """The norms of a list, as ``torch.nn.utils.clip_grad_norm_`` asks for them: together those of one layout."""
    tensors = list(args[0] if args else kwargs["self"])
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    if order <= 0 or any(_is_recorded(tensor) or tensor.is_complex() for tensor in tensors):
        return _on_wholes(function, args, kwargs)
    norms: list[Any] = [None] * len(tensors)
    by_layout: list[tuple[Tensor, list[int]]] = []
    for index, tensor in enumerate(tensors):
        indices = next((indices for like, indices in by_layout if _is_sharded_like(tensor, like)), None)
        if indices is None:
            indices = []
            by_layout.append((tensor, indices))
        indices.append(index)
    for like, indices in by_layout:
        alike = [tensors[index] for index in indices]
        if isinstance(like, DTensor):
            found = _norms(alike, order, function)
        else:
            found = torch.stack(torch._foreach_norm(alike, order))
        rounded = found.to(kwargs.get("dtype") or like.dtype.to_real())
        for index, norm in zip(indices, rounded.unbind(), strict=True):
            norms[index] = norm
    return norms


def _is_sharded_like(tensor: Tensor, like: Tensor) -> bool:
    """Whether norms of both are reduced over the same ranks, in one dtype."""
    if tensor.dtype != like.dtype or tensor.device != like.device:
        return False
    if not isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor.__class__ is like.__class__
    return tensor.placements == like.placements and tensor.device_mesh == like.device_mesh


def _norms(shards: list[Any], order: float, function: Function) -> Tensor:
    """[n] norms of shards of one layout. One all-reduce for each dimension of the mesh that they are sharded over."""
    parts = parts_of(shards)
    dtype = wide_dtype(parts[0].device)
    if math.isinf(order):
        nothing = torch.zeros((), dtype=dtype, device=parts[0].device)
        # A rank may hold nothing of a tensor, whose maximum torch refuses.
        own = [torch.linalg.vector_norm(p, order, dtype=dtype) if p.numel() > 0 else nothing for p in parts]
        return _all_reduced(torch.stack(own), shards[0], dist.ReduceOp.MAX, function)
    stacked = torch.stack(torch._foreach_norm(parts, order, dtype=dtype))
    return _all_reduced(stacked.pow(order), shards[0], dist.ReduceOp.SUM, function).pow(1 / order)


def _all_reduced(values: Tensor, like: DTensor, op: Any, function: Function) -> Tensor:
    """[n] numbers of this rank's part, combined over the ranks that hold the other parts. A collective on them."""
    mesh = like.device_mesh
    combined = values.to(mesh.device_type)  # of an offloaded tensor
    with collectives.gathering(_name_of(like), function.__name__):
        for dim, placement in enumerate(like.placements):
            if not placement.is_replicate() and mesh.size(dim) > 1:
                dist.all_reduce(combined, op=op, group=mesh.get_group(dim))
    return combined.to(values.device)


def _name_of(tensor: Tensor) -> str:
    return getattr(tensor, "parameter_name", "a tensor")


def _is_recorded(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


# --- What a tensor says of itself -----------------------------------------------------------------------------------


def _metadata(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    return function(*args, **kwargs)


def _refuse_memory(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """What safetensors writes, and what it and transformers take to be shared if the addresses are equal."""
    if function.__name__ == "data_ptr" and args[0].source is None:
        return function(*args)  # 0: nn.LSTM asks its parameters, and what is saved are aliases of these
    raise RuntimeError(
        f"{function.__name__} of {_name_of(args[0])}, which is sharded: no memory holds all of it."
        f" Save it whole: {SAVE_WHOLE}"
    )


def _new(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.new_zeros(size)``: a plain tensor, of the dtype and on the device of ``p``."""
    return function(part_of(args[0]), *args[1:], **kwargs)


def _numpy(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """An array of the whole tensor, which cannot be written: nothing would carry that into the shards."""
    array = _on_wholes(function, args, kwargs)
    array.flags.writeable = False
    return array


def _type(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``p.type()`` is a name, ``p.type(dtype)`` a conversion."""
    if len(args) == 1 and not kwargs:
        return part_of(args[0]).type()
    return _elementwise(function, args, kwargs)


def _alias(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """What returns the same memory, and shares its version counter."""
    return _alias_of(args[0], function(*args, **kwargs))


def _alias_of(shard: Any, alias: Any) -> Any:
    make_shard(alias)
    if isinstance(alias, Shard) and alias is not shard:
        alias.source = shard if shard.source is None else shard.source
        alias.parameter_name = shard.parameter_name
        alias.on_write = shard.on_write
    return alias


def _format(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Printing gathers a number, and nothing else: a rank often prints alone."""
    if args[0].ndim == 0:
        return _on_wholes(function, args, kwargs)
    return object.__format__(args[0], args[1])


def _attribute(function: Any, args: Arguments, kwargs: Keywords) -> Any:
    name = function.__self__.__name__
    if name in _VIEWING_ATTRIBUTES:
        return _on_wholes(function, args, kwargs)
    if name == "data":
        return _alias_of(args[0], args[0].detach())
    return function(*args)


def _assignment(function: Any, args: Arguments, kwargs: Keywords) -> Any:
    name = function.__self__.__name__
    target, value = args
    if name == "data":
        _set_data(target, value)
        return
    function(target, value)


def _set_data(target: Any, value: Tensor) -> None:
    """``p.data = values``: the shard gets its part of them, in memory of its own, as does whoever swaps weights."""
    if not isinstance(target, DTensor):
        whole = gather(value, torch.clone) if isinstance(value, DTensor) else value
        DATA.__set__(target, whole)
        return
    if value.shape != target.shape or value.dtype != target.dtype:
        raise RuntimeError(
            f"{_name_of(target)} is sharded, of shape {tuple(target.shape)} and dtype {target.dtype}, and"
            f" cannot become one of shape {tuple(value.shape)} and dtype {value.dtype}. Change shapes and"
            " dtypes before the model is sharded, in __init__ or configure_model."
        )
    if isinstance(target, Shard):
        target.num_assignments += 1
    with torch.no_grad():
        if not isinstance(value, DTensor):
            part = own_part(value, target).clone()
        elif has_layout(value, target):
            part = part_of(value).clone()
        else:
            part = own_part(gather(value, Tensor.clone), target).clone()
        param = getattr(target, "fsdp_param", None)
        if param is None or not fsdp2_gathers.move_shard(target, param, part):
            part_of(target).copy_(part)
    _count_writes([target])


def _hook(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Hooks on parameters: FSDP2 writes gradients itself, and calls none of them when a gradient is final."""
    shard = args[0]
    if isinstance(shard, Shard) and shard.is_leaf and shard.requires_grad and not shard.accepts_hooks:
        raise RuntimeError(
            f"{function.__name__} on {shard.parameter_name}, which is sharded: FSDP2 would not call the"
            " hook, or would call it before the gradient is divided by the label tokens of its window."
            " Change or read gradients in on_before_optimizer_step, where they are final. For hooks that"
            " step inside of the backward use count_window_ahead=True, or else data_parallel='ddp'."
        )
    return function(*args, **kwargs)


# --- Gradients by shards --------------------------------------------------------------------------------------------


def _leaves(inputs: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """The inputs of a differentiation, and for each what FSDP2's forward uses in its place, if anything."""
    listed = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    others = [getattr(getattr(tensor, "fsdp_param", None), "unsharded_param", None) for tensor in listed]
    return listed, others


def _grad(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``torch.autograd.grad`` by shards, or by the gathered copies that the graph has in their place."""
    if function is not torch.autograd.grad:
        return _on_wholes(function, args, kwargs)
    keywords = inspect.signature(function).bind(*args, **kwargs).arguments
    inputs, others = _leaves(keywords.pop("inputs"))
    used = [other for other in others if other is not None and other.requires_grad]
    allow_unused = keywords.pop("allow_unused", None)
    if not used:
        found = function(inputs=inputs, allow_unused=allow_unused, **keywords)
        return tuple(map(make_shard, found))
    found = function(inputs=[*inputs, *used], allow_unused=True, **keywords)
    of_copies = iter(found[len(inputs) :])
    gradients: list[Tensor | None] = []
    for gradient, other in zip(found, others, strict=False):
        of_copy = next(of_copies) if other is not None and other.requires_grad else None
        gradients.append(of_copy if gradient is None else make_shard(gradient))
    if not (allow_unused or keywords.get("materialize_grads")) and any(g is None for g in gradients):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set"
            " allow_unused=True if this is the desired behavior."
        )
    return tuple(gradients)


def _backward(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """``backward(inputs=shards)``, also by the gathered copies that the graph has in their place."""
    inputs = kwargs.get("inputs")
    if inputs is not None:
        listed, others = _leaves(inputs)
        kwargs = {**kwargs, "inputs": [*listed, *(other for other in others if other is not None)]}
    return function(*args, **kwargs)


# --- Which rule a function follows ----------------------------------------------------------------------------------

_METADATA = """
    dim dim_order element_size get_device is_coalesced is_complex is_conj is_contiguous
    is_distributed is_floating_point is_inference is_leaf is_neg is_pinned is_same_size is_shared
    is_signed ndimension nelement numel requires_grad_ retain_grad size stride storage_offset
    __len__ __hash__ _has_compatible_shallow_copy_type _is_view result_type can_cast is_tensor
""".split()  # noqa: SIM905 (a table of names)

_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bfloat16
    bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip clone
    conj contiguous copy copysign cos cosh cpu cuda deg2rad digamma div divide double elu eq erf erfc erfinv
    exp exp2 expm1 float float_power floor floor_divide fmax fmin fmod frac ge gelu greater
    greater_equal gt half hardshrink hardsigmoid hardswish hardtanh heaviside hypot isclose isfinite
    isinf isnan isneginf isposinf isreal le leaky_relu lerp less less_equal lgamma log log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt
    masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative nextafter not_equal
    ones_like positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid
    sign signbit silu sin sinc sinh softplus softsign sqrt square sub subtract tan tanh tanhshrink
    threshold to true_divide trunc type_as where xlogy zero zeros_like empty_like full_like fill
    __abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__
    __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__
    __rmod__ __rmul__ __ror__ __rpow__ __rsub__ __rtruediv__ __rxor__ __sub__ __truediv__ __xor__
""".split()  # noqa: SIM905 (a table of names)

_AUGMENTED = """
    __iadd__ __iand__ __idiv__ __ifloordiv__ __imod__ __imul__ __ior__ __ipow__ __isub__ __itruediv__ __ixor__
""".split()  # noqa: SIM905

_WRITING = frozenset({*_AUGMENTED, "__setitem__"})

_VIEWING_ATTRIBUTES = frozenset({"T", "H", "mT", "mH", "real", "imag"})

_RULES: dict[str, Function] = {
    **dict.fromkeys(_METADATA, _metadata),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **{f"{name}_": _elementwise for name in _ELEMENTWISE if not name.startswith("__")},
    **dict.fromkeys(_AUGMENTED, _elementwise),
    **dict.fromkeys(("data_ptr", "share_memory_", "storage", "untyped_storage"), _refuse_memory),
    "detach": _alias,
    "detach_": _alias,
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"), _new),
    "type": _type,
    "numpy": _numpy,
    "__array__": _numpy,
    "__format__": _format,
    "__get__": _attribute,
    "__set__": _assignment,
    "__delete__": _metadata,
    "register_hook": _hook,
    "register_post_accumulate_grad_hook": _hook,
    "grad": _grad,
    "backward": _backward,
    "sum": _sum,
    "equal": _equal,
    "norm": _norm,
    "vector_norm": _norm,
    "_foreach_norm": _foreach_norm,
    "_foreach_max": _on_wholes,
}


@functools.cache
def _rule_of(name: str) -> Function:
    """How shards take part in a function of torch of this name."""
    if name in _RULES:
        return _RULES[name]
    if name.startswith(("_foreach_", "_fused_")):
        return _foreach
    return _on_wholes
