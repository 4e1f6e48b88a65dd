"""Private names of FSDP2's all-gathers: when parameters are gathered, and where they stay."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.fsdp2 import FSDPParam, FSDPParamGroup, gathering, param_groups
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import local_tensor, set_local_tensor

Substitute: TypeAlias = tuple[nn.Module, str, Tensor]

_IS_SHARDED = attrgetter("is_sharded")


def set_background_gathers(root: FSDPModule, is_on: bool) -> None:
    """Set whether all-gathers at or below ``root`` are asynchronous: on a CPU, synchronous ones block the thread."""
    root._set_unshard_async_op(is_on)


def note_all_gathers(unit: FSDPModule, note: Callable[[], None], patches: PatchStack) -> None:
    """Call ``note`` before each all-gather of ``unit``, for which FSDP2 has no hook."""

    def noting(group: FSDPParamGroup, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            note()
        unshard(*args, **kwargs)

    for group in param_groups(unit):
        patches.set(group, "unshard", partial(noting, group, group.unshard))


class Unit:
    """One FSDP2 unit, whose parameters are gathered together.

    Attributes:
        module: The unit; of several modules that share one, the first.
        groups: What FSDP2 communicates at once: one group, unless parameters are sharded over several meshes.
        params: What FSDP2 knows of each of its parameters.
        is_hidden: Whether its modules show shards, while the memory of what was gathered is kept.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module: Any = module
        self.groups = param_groups(module)
        self.params = [param for group in self.groups for param in group.fsdp_params]
        self.is_hidden = False
        param_of = {param.sharded_param: param for param in self.params}
        holders = dict.fromkeys(h for group in self.groups for root in group.modules for h in root.modules())
        # Where modules hold them: in several places if they share one.
        self._places = [
            (holder, name, param_of[shard])
            for holder in holders
            for name, shard in holder._parameters.items()
            if shard in param_of
        ]

    def gather(self) -> None:
        """Gather its parameters, unless they are. A collective if not."""
        gather(self.module)

    def gather_again(self) -> None:
        """Free what was gathered, and gather the shards as they are now, also within a forward. A collective."""
        self._show("SHARDED", "sharded_param")
        self.gather()

    def hide(self) -> None:
        """Let modules show shards, and keep the memory of what was gathered."""
        self._show("SHARDED", "sharded_param")
        self.is_hidden = True

    def _show(self, state: str, shown: str) -> None:
        for group in self.groups:
            group._sharded_state = type(group._sharded_state)[state]
        for param in self.params:
            param.sharded_state = type(param.sharded_state)[state]
        for holder, name, param in self._places:
            if cast(Any, type(holder)).__setattr__ is nn.Module.__setattr__:
                holder._parameters[name] = getattr(param, shown)
            else:  # as recurrent layers have
                setattr(holder, name, getattr(param, shown))

    def show(self) -> bool:
        """Undo :meth:`hide`. False if it was not called, or if a forward has freed what was kept."""
        is_kept = (
            self.is_hidden and all(map(_IS_SHARDED, self.groups)) and all(map(_has_memory, self.groups))
        )
        self.is_hidden = False
        if is_kept:
            self._show("UNSHARDED", "unsharded_param")
            self.show_trainable()
        return is_kept

    def free(self) -> None:
        """Free what was gathered, also what is kept, and by a prefetch whose forward did not come.

        FSDP2 would use prefetched parameters at the unit's next forward, when the weights may have changed.
        """
        if self.is_hidden:
            self.is_hidden = False
            for param in self.params:
                param.free_unsharded_param()
        free(self.module)

    def forget_background_gather(self) -> None:
        """Never wait for a running all-gather on a CPU: a rank that has failed may not join it."""
        for group in self.groups:
            if group.device.type == "cpu":
                group._all_gather_result = None

    def show_trainable(self) -> None:
        """Give gathered parameters the ``requires_grad`` of the shards, as the next gather would."""
        with plain_access():
            for param in self.params:
                param.unsharded_param.requires_grad_(param.sharded_param.requires_grad)

    def substitutes(self) -> list[Substitute]:
        """The tensors that stand where modules have parameters, for one forward (``torch.func.functional_call``)."""
        found: list[Substitute] = []
        for holder, name, param in self._places:
            tensor = holder._parameters[name]
            if (
                tensor is param.sharded_param
                or tensor is None
                or tensor is getattr(param, "unsharded_param", None)
            ):
                continue
            if tensor is not getattr(param, "_sharded_post_forward_param", None):
                found.append((holder, name, tensor))
        return found

    def place(self, substitutes: list[Substitute]) -> None:
        """Let modules have the gathered parameters, or what stands in their place.

        After a forward that has gathered them, ``functional_call`` puts back the shards.
        """
        for holder, name, param in self._places:
            if holder._parameters[name] is param.sharded_param:
                holder._parameters[name] = param.unsharded_param
        for holder, name, tensor in substitutes:
            holder._parameters[name] = cast(nn.Parameter, tensor)  # or any tensor

    def after_state_dicts(self, hook: Callable[..., None]) -> list[RemovableHandle]:
        """Call ``hook`` after a state dict of its modules was made or loaded, for which FSDP2 shows shards."""
        handles: list[RemovableHandle] = []
        for holder in {holder for holder, _, _ in self._places}:
            handles.append(holder.register_state_dict_post_hook(hook))
            handles.append(holder.register_load_state_dict_post_hook(hook))
        return handles


def _has_memory(group: FSDPParamGroup) -> bool:
    """Whether what a group has gathered is kept. FSDP2 frees all of a group at once."""
    gathered = (tensor for param in group.fsdp_params for tensor in param.all_gather_outputs)
    return any(tensor.untyped_storage().size() > 0 for tensor in gathered)


def gather(unit: FSDPModule) -> None:
    """Gather the parameters of ``unit``, unless they are. A collective if not.

    The first gather makes tensors that later ones write to, which training could not if they were
    inference tensors.
    """
    with torch.inference_mode(False), torch.no_grad():
        unit.unshard()


def free(unit: FSDPModule) -> None:
    """Free what ``unit`` has gathered, also by a prefetch whose forward did not come."""
    if gathering([unit]):
        unit.unshard()
    unit.reshard()


def move_shard(shard: DTensor, param: FSDPParam, local: Tensor) -> bool:
    """Give a shard other memory, from which FSDP2 gathers it. False if it cannot: while it is gathered."""
    if param.sharded_state.name != "SHARDED":
        return False
    set_local_tensor(shard, local)
    param.reset_sharded_param()
    return True


def own_slice(param: FSDPParam) -> Tensor:
    """The part of an unsharded parameter, sharing its memory, that this rank holds as its shard."""
    whole = local_tensor(param.unsharded_param)
    shard = local_tensor(param.sharded_param)
    dim = param.fsdp_placement.dim
    # All ranks but the last have full chunks; the last ones may have none.
    start = getattr(param.mesh_info, "shard_mesh_rank", 0) * param.padded_sharded_param_size[dim]
    if shard.numel() > 0:
        length = shard.size(dim)
    else:
        length = 0
    return whole.narrow(dim, min(start, whole.size(dim)), length)
