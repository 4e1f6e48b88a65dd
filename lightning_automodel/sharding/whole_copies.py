"""Whole copies of sharded tensors, gathered for what user code does to them; what it writes goes into the shards.

Views of such a copy (``p.grad[2:4]``) keep it, so that writes to them go into the shards too.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed import collectives
from lightning_automodel.gradients.owner_exchange import holders_of
from lightning_automodel.gradients.rescale_clip import sharding_groups
from lightning_automodel.internals.dtensor import (
    break_graphs_at,
    plain_access,
    tree_any_only,
    tree_map,
    with_part,
)
from lightning_automodel.internals.torch import local_tensor, version

AUGMENTED = """
    __iadd__ __iand__ __idiv__ __ifloordiv__ __imod__ __imul__ __ior__ __ipow__ __isub__ __itruediv__ __ixor__
""".split()  # noqa: SIM905 (a table of names)
"""Operators such as ``+=``."""


_COLLECTIVES = dist.all_reduce.__module__
_OPERATORS = type(torch.ops.aten.add).__module__
"""Where functions come from that do not count what they write."""

_UNNAMED = "a tensor"

_FOLLOWED = (
    "in place to a sharded tensor that autograd follows: write parameters under torch.no_grad(), and call functions"
    " without the underscore on what is computed from them."
)


class Call:
    """A call of a function of torch in which sharded tensors take part.

    Attributes:
        function: What is called, with ``args`` and ``kwargs``.
        name: The function's.
        values: All arguments.
    """

    def __init__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.name = function.__name__
        self.values = [*args, *kwargs.values()]

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)

    def run_with(self, change: Callable[[Any], Any]) -> Any:
        """Call the function with what ``change`` makes of each argument."""
        changed = {key: change(value) for key, value in self.kwargs.items()}
        return self.function(*map(change, self.args), **changed)

    def written(self) -> Sequence[Any]:
        """The tensors that it writes to."""
        target = self.kwargs.get("out")
        is_in_place = self.name.endswith("_") and not self.name.endswith("__")
        if is_in_place or self.name in (*AUGMENTED, "__setitem__") or self.kwargs.get("inplace"):
            target = self.values[0]
        if target is None:
            return ()
        if isinstance(target, Tensor):
            return (target,)
        return target

    @property
    def counts_writes(self) -> bool:
        """Whether it counts what it writes: not a collective, nor an operator of another library."""
        return not self._home.startswith((_COLLECTIVES, _OPERATORS))

    def check_is_synchronous(self) -> None:
        """Raise RuntimeError for a collective that would go on writing afterwards."""
        if self._home == _COLLECTIVES and any(value is True for value in self.values):
            raise RuntimeError(
                f"{self.name} on sharded tensors with async_op=True, whose result would be lost: leave that out."
            )

    @property
    def _home(self) -> str:
        return str(getattr(self.function, "__module__", None))


# --- Communication --------------------------------------------------------------------------------------------------


def name_of(tensor: Tensor) -> str:
    """For messages."""
    return getattr(tensor, "parameter_name", _UNNAMED)


def is_recorded(tensor: Tensor) -> bool:
    """Whether autograd follows what is computed with a tensor."""
    return torch.is_grad_enabled() and tensor.requires_grad


def add_up(values: Tensor, tensors: Sequence[Tensor], function: str) -> Tensor:
    """[n] numbers of this rank's parts of n tensors, each added up over the ranks that hold the other parts.

    A collective on the meshes of the tensors, one for each group that some of them are sharded over.
    """
    sharded: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        for group in sharding_groups(tensor):
            sharded[group].append(index)
    for group, indices in sharded.items():
        first: Any = tensors[indices[0]]
        with collectives.gathering(name_of(first), function):
            total = values[indices].to(first.device_mesh.device_type)  # of an offloaded tensor
            dist.all_reduce(total, group=group)
            values[indices] = total.to(values.device)
    return values


def gather(shard: DTensor, function: str) -> Tensor:
    """The whole of a sharded tensor. A collective on its mesh. Differentiable: the gradient reaches the shard.

    ``function`` is what it is gathered for: if some rank does not come, messages name it.
    """
    if shard.device_mesh.device_type == "cpu":
        # Gloo ends a process whose gather meets another gather, of another size. Here, a rank that is
        # alone waits.
        add_up(torch.zeros(1), [shard], function)
    with collectives.gathering(name_of(shard), function):
        if is_recorded(shard):
            return shard.full_tensor().clone()  # autograd lets nobody write to what is itself a view
        # Tensors of inference mode would not tell of writes.
        with torch.inference_mode(False), torch.no_grad():
            part = local_tensor(shard)
            # An offloaded shard lies on the host, where its ranks may not communicate.
            moved = part.to(shard.device_mesh.device_type)
            return with_part(DTensor, moved, shard).full_tensor().to(part.device)


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """The view of a plain tensor, which every rank has, that this rank would hold if it were laid out like ``like``."""
    if not isinstance(like, DTensor):
        return whole
    return holders_of(like.device_mesh, like.placements).part(whole, dist.get_rank())


@torch.no_grad()
def write_part(into: Tensor, whole: Tensor) -> None:
    """Write this rank's part of a plain tensor, which every rank has, into a sharded one. Not a collective."""
    local_tensor(into).copy_(own_part(whole, into))
    count_writes([into])
    note_write([into], "write", [whole])


def versions(shards: list[Any]) -> list[int]:
    """How often each of ``shards`` was written, as autograd counts it; 0 for those of inference mode."""
    with plain_access():
        try:
            return list(map(version, shards))
        except RuntimeError:
            # Asking each first whether it is one takes longer than all the rest.
            return [0 if shard.is_inference() else version(shard) for shard in shards]


def count_writes(shards: list[Any]) -> None:
    """Raise the version counters of shards whose parts were written."""
    torch.autograd.graph.increment_version([shard for shard in shards if not shard.is_inference()])


def note_write(shards: Sequence[Any], function: str, values: Sequence[Any]) -> None:
    """Let ranks compare which parameters, or their gradients, each has written, with which tensors and numbers."""
    reference = getattr(shards[0], "engine_ref", None)
    engine = None if reference is None else reference()
    if engine is None or engine.group is None:
        return
    tensors = [v for v in values if isinstance(v, Tensor) and not isinstance(v, DTensor | View)]
    what = " ".join([function, *map(name_of, shards)])
    engine.written.add(what, tensors, [v for v in values if isinstance(v, int | float)])


# --- Copies and their views -----------------------------------------------------------------------------------------


class GatheredCopy:
    """The whole of a shard, gathered for a computation. What is written to it goes into the shard.

    Creating one is a collective on the shard's mesh.

    Attributes:
        shard: Where it comes from.
        whole: A plain tensor, equal on all ranks.
    """

    def __init__(self, shard: DTensor, function: str) -> None:
        self.shard = shard
        self.whole = gather(shard, function)
        self._note_versions()

    def _note_versions(self) -> None:
        self._shard_version = versions([self.shard])
        self._whole_version = version(self.whole)

    @torch.no_grad()
    def gather_again(self, function: str) -> None:
        """Show the shard as it is now. A collective on its mesh."""
        self.whole.copy_(gather(self.shard, function))
        self._note_versions()

    def refresh(self, function: str) -> None:
        """Gather again if the shard was written since, for a view that is used again. Then a collective.

        A view that one rank alone has kept may thus wait for the others, which are told what for.
        """
        if versions([self.shard]) != self._shard_version:
            self.gather_again(function)

    def carry(self, function: str, is_followed: bool) -> None:
        """Write into the shard what ``function`` has changed the whole tensor to, if it has. Not a collective.

        ``is_followed``: whether autograd follows something that it has computed with, and would leave this out.
        """
        if version(self.whole) == self._whole_version:
            return
        if self.whole.shape != self.shard.shape:
            raise RuntimeError(
                f"{function} changes the shape of {name_of(self.shard)}, which is sharded, in place. Call the"
                " function without the underscore, which gives a new tensor."
            )
        if is_followed and is_recorded(self.shard):
            raise RuntimeError(f"{function} writes {_FOLLOWED}")
        write_part(self.shard, self.whole)
        self._note_versions()
        # Nobody differentiates a gradient, which has a name.
        if is_followed and name_of(self.shard) == _UNNAMED:
            _refuse_derivatives(self.shard)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the whole one."""
        if tensor.layout is not torch.strided:
            return False
        memory = self.whole.untyped_storage().data_ptr()
        return memory != 0 and tensor.untyped_storage().data_ptr() == memory


_copies: WeakValueDictionary[int, GatheredCopy] = WeakValueDictionary()
"""Copies that views share, by the id of the shard, which its copy keeps alive."""


def _copy_of(shard: DTensor, function: str) -> GatheredCopy:
    """The copy that views of ``shard`` share, brought up to date, or a new one. A collective on the shard's mesh."""
    if is_recorded(shard):  # by autograd, so that it is nobody else's
        return GatheredCopy(shard, function)
    kept = _copies.get(id(shard))
    if kept is None:
        kept = GatheredCopy(shard, function)
        _copies[id(shard)] = kept
    else:
        # Also if it is up to date: it may live on some ranks alone, and all must come.
        kept.gather_again(function)
    return kept


class View(Tensor):
    """A view of a gathered tensor, such as ``p.grad[2:4]`` or ``p.view(-1)``: writes to it go into the shards."""

    source: GatheredCopy
    data: Any = property(lambda view: view.detach())  # which shares the version counter

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_access():
            return on_wholes(Call(function, args, kwargs or {}))

    def __format__(self, spec: str) -> str:
        return format(self.clone(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with plain_access():
            return self.as_subclass(Tensor).clone()


break_graphs_at(View)


def _refuse_derivatives(shard: Tensor) -> None:
    """Let a backward raise that reaches what was written to ``shard``: it would leave out what autograd follows."""

    def refuse(_: Tensor) -> None:
        raise RuntimeError(f"A backward reaches what was written {_FOLLOWED}")

    if shard.is_floating_point():
        zero = torch.zeros((), dtype=shard.dtype, device=shard.device, requires_grad=True)
        zero.register_hook(refuse)
        shard.add_(zero)


# --- Computing ------------------------------------------------------------------------------------------------------


def on_wholes(call: Call) -> Any:
    """Compute on whole tensors, gathered for it, and carry what was written into the shards. A collective."""
    call.check_is_synchronous()
    is_written = any(isinstance(target, DTensor | View) for target in call.written())
    # Functions of torch.nn.init write under no_grad themselves.
    writes_without_gradient = getattr(call.function, "__module__", None) == nn.init.__name__
    is_followed = not writes_without_gradient and tree_any_only(
        Tensor, is_recorded, (call.args, call.kwargs)
    )
    copies: dict[int, GatheredCopy] = {}  # by the ids of arguments

    def whole_of(value: Any) -> Any:
        if isinstance(value, View):
            value.source.refresh(call.name)
            copies[id(value)] = value.source
        elif isinstance(value, DTensor):
            if id(value) not in copies:
                copies[id(value)] = _copy_of(value, call.name)
            return copies[id(value)].whole
        return value

    def shard_or_view(result: Any) -> Any:
        if not isinstance(result, Tensor) or isinstance(result, View):
            return result
        for gathered in copies.values():
            if result is gathered.whole:
                return gathered.shard
            if gathered.has(result):
                view = result.as_subclass(View)
                view.source = gathered
                return view
        return result

    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_written):
        args, kwargs = tree_map(whole_of, (tuple(call.args), dict(call.kwargs)))
        before: dict[int, Tensor] = {}
        if not call.counts_writes:
            before = {key: gathered.whole.detach().clone() for key, gathered in copies.items()}
        result = call.function(*args, **kwargs)
    written = set(map(id, call.written()))
    for key, gathered in copies.items():
        if key in written or (key in before and not torch.equal(before[key], gathered.whole)):
            torch.autograd.graph.increment_version([gathered.whole])  # some of torch's do not count, either
        gathered.carry(call.name, is_followed)
    return tree_map(shard_or_view, result)
