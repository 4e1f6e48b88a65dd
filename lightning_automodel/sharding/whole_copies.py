"""Whole copies of sharded tensors, gathered for what user code does to them; what it writes goes into the shards.

Views of such a copy (``p.grad[2:4]``) keep it, so that writes to them go into the shards too.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
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

Function = Callable[..., Any]
Arguments = Sequence[Any]
Keywords = dict[str, Any]

AUGMENTED = """
    __iadd__ __iand__ __idiv__ __ifloordiv__ __imod__ __imul__ __ior__ __ipow__ __isub__ __itruediv__ __ixor__
""".split()  # noqa: SIM905 (a table of names)
"""Operators such as ``+=``."""


_UNNAMED = "a tensor"
# --- Communication --------------------------------------------------------------------------------------------------


def name_of(tensor: Tensor) -> str:
    """For messages."""
    return getattr(tensor, "parameter_name", _UNNAMED)


def is_recorded(tensor: Tensor) -> bool:
    """Whether autograd follows what is computed with a tensor."""
    return torch.is_grad_enabled() and tensor.requires_grad


def add_up(values: Tensor, tensors: Sequence[Tensor], function: Function) -> Tensor:
    """[n] numbers of this rank's parts of n tensors, each added up over the ranks that hold the other parts.

    A collective on the meshes of the tensors, one for each group that some of them are sharded over.
    """
    sharded: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        for group in sharding_groups(tensor):
            sharded[group].append(index)
    for group, indices in sharded.items():
        first: Any = tensors[indices[0]]
        with collectives.gathering(name_of(first), function.__name__):
            total = values[indices].to(first.device_mesh.device_type)  # of an offloaded tensor
            dist.all_reduce(total, group=group)
            values[indices] = total.to(values.device)
    return values


def gather(shard: DTensor, function: Function) -> Tensor:
    """The whole of a sharded tensor. A collective on its mesh. Differentiable; what autograd leaves is the shard's.

    ``function`` is what it is gathered for: if some rank does not come, messages name it.
    """
    if shard.device_mesh.device_type == "cpu":
        # Gloo ends a process whose gather meets another gather, of another size. Here, a rank that is
        # alone waits.
        add_up(torch.zeros(1), [shard], function)
    with collectives.gathering(name_of(shard), function.__name__):
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


def count_writes(shards: list[Any]) -> None:
    """Raise the version counters of shards whose parts were written."""
    torch.autograd.graph.increment_version([shard for shard in shards if not shard.is_inference()])


# --- Copies and their views -----------------------------------------------------------------------------------------


class GatheredCopy:
    """The whole of a shard, gathered for a computation. What is written to it goes into the shard.

    Creating one is a collective on the shard's mesh.

    Attributes:
        shard: Where it comes from.
        whole: A plain tensor, equal on all ranks.
    """

    def __init__(self, shard: DTensor, function: Function) -> None:
        self.shard = shard
        self.whole = gather(shard, function)
        self._note_versions()

    def _note_versions(self) -> None:
        self._shard_version = self._count_writes_of_shard()
        self._whole_version = version(self.whole)

    def _count_writes_of_shard(self) -> int:
        return 0 if self.shard.is_inference() else version(self.shard)

    @torch.no_grad()
    def gather_again(self, function: Function) -> None:
        """Show the shard as it is now. A collective on its mesh."""
        self.whole.copy_(gather(self.shard, function))
        self._note_versions()

    def refresh(self, function: Function) -> None:
        """Gather again if the shard was written since, for a view that is used again. Then a collective.

        A view that one rank alone has kept may thus wait for the others, which are told what for.
        """
        if self._count_writes_of_shard() != self._shard_version:
            self.gather_again(function)

    def carry(self, function: Function) -> bool:
        """Write into the shard what ``function`` has changed the whole tensor to, if it has. Not a collective."""
        if version(self.whole) == self._whole_version:
            return False
        if self.whole.shape != self.shard.shape:
            raise RuntimeError(
                f"{function.__name__} changes the shape of {name_of(self.shard)}, which is sharded,"
                " in place. Call the function without the underscore, which gives a new tensor."
            )
        write_part(self.shard, self.whole)
        self._note_versions()
        return True

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the whole one."""
        if tensor.layout is not torch.strided:
            return False
        memory = self.whole.untyped_storage().data_ptr()
        return memory != 0 and tensor.untyped_storage().data_ptr() == memory


_copies: WeakValueDictionary[int, GatheredCopy] = WeakValueDictionary()
"""Copies that views share, by the id of the shard, which its copy keeps alive."""


def _copy_of(shard: DTensor, function: Function) -> GatheredCopy:
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
    def __torch_function__(
        cls, function: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        with plain_access():
            return on_wholes(function, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with plain_access():
            return self.as_subclass(Tensor).clone()


break_graphs_at(View)


# --- Computing ------------------------------------------------------------------------------------------------------


def written(function: Function, args: Arguments, kwargs: Keywords) -> Sequence[Any]:
    """The tensors that a function writes to."""
    target = kwargs.get("out")
    if _writes(function.__name__) or kwargs.get("inplace"):
        target = [*args, *kwargs.values()][0]
    if target is None:
        return ()
    if isinstance(target, Tensor):
        return (target,)
    return target


@functools.cache
def _writes(name: str) -> bool:
    return name in (*AUGMENTED, "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _refuse_derivatives(shard: Tensor) -> None:
    """Let a backward raise that reaches what was written to ``shard``: it would leave out what autograd follows."""

    def refuse(_: Tensor) -> None:
        raise RuntimeError(
            "A backward reaches what was written in place to a sharded tensor that autograd follows: write"
            " parameters under torch.no_grad(), and call functions without the underscore on what is computed"
            " from them."
        )

    if shard.is_floating_point():
        zero = torch.zeros((), dtype=shard.dtype, device=shard.device, requires_grad=True)
        zero.register_hook(refuse)
        shard.add_(zero)


def on_wholes(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Compute on whole tensors, gathered for it, and carry what was written into the shards. A collective."""
    targets = [target for target in written(function, args, kwargs) if isinstance(target, DTensor | View)]
    # Functions of torch.nn.init do it themselves under no_grad.
    if any(map(is_recorded, targets)) and getattr(function, "__module__", None) != nn.init.__name__:
        raise RuntimeError(
            f"{function.__name__} writes in place to a sharded tensor that autograd follows: write parameters"
            " under torch.no_grad(), and call functions without the underscore on what is computed from them."
        )
    follows = bool(targets) and tree_any_only(Tensor, is_recorded, (args, kwargs))
    copies: dict[int, GatheredCopy] = {}  # by the ids of arguments

    def whole_of(value: Any) -> Any:
        if isinstance(value, View):
            value.source.refresh(function)
            copies[id(value)] = value.source
        elif isinstance(value, DTensor):
            if id(value) not in copies:
                copies[id(value)] = _copy_of(value, function)
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

    with torch.set_grad_enabled(torch.is_grad_enabled() and not targets):
        result = function(*tree_map(whole_of, args), **tree_map(whole_of, kwargs))
    for gathered in copies.values():
        is_written = gathered.carry(function)
        # Nobody differentiates a gradient, which has a name.
        if is_written and follows and name_of(gathered.shard) == _UNNAMED:
            _refuse_derivatives(gathered.shard)
    return tree_map(shard_or_view, result)
