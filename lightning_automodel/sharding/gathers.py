"""All-gathers ahead of the forward or backward that needs them, and on a rank without data that others need."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_automodel.distributed.mesh import num_expert_ranks
from lightning_automodel.gradients.windows import DIFFERENT_UNITS
from lightning_automodel.internals import fsdp2, fsdp2_gathers
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.units import fsdp_roots, is_head

DIFFERENT_FORWARDS = (
    "so the tokens of one forward would reach the experts of another, or hang. Experts that are spread over"
    " ranks (expert_parallel_size > 1) exchange tokens in each forward: every rank must run every forward of"
    " training_step, one for logs included, in the same order. Compute what only one rank needs from the"
    " outputs of those."
)
"""What ranks must do that run different forwards through spread experts."""


def set_prefetch(model: nn.Module, num_ahead: int, in_background: bool) -> None:
    """Let each FSDP unit start the all-gathers of the next ``num_ahead`` units, in forward and backward.

    0 is FSDP2's own behaviour: one unit ahead in the backward. Not a collective, but ranks must agree on the
    arguments. If units run in another order than they are registered in, memory is wasted, but no rank
    hangs.
    """
    for root in fsdp_roots(model):
        below = [unit for unit in fsdp2.fsdp_units(cast(nn.Module, root)) if unit is not root]
        forward = [root, *below]
        backward = [root, *reversed(below)]
        for index, unit in enumerate(forward):
            unit.set_modules_to_forward_prefetch(forward[index + 1 : index + 1 + num_ahead])
        for index, unit in enumerate(backward):
            # FSDP2 itself gathers one unit ahead, in the order in which the units have really run.
            if num_ahead > 1:
                following = backward[index + 1 : index + 1 + num_ahead]
            else:
                following = []
            unit.set_modules_to_backward_prefetch(following)
        fsdp2_gathers.set_background_gathers(root, in_background)


def reshard(unit: FSDPModule) -> None:
    """Free what ``unit`` has gathered, also by a prefetch whose forward did not come.

    FSDP2 would use prefetched parameters at the unit's next forward, when the weights may have changed.
    """
    if fsdp2.gathering([unit]):
        unit.unshard()
    unit.reshard()


class GatheredForBackward:
    """Keeps what a unit has gathered for a forward, where FSDP2 cannot see that a backward will need it.

    FSDP2 gathers a unit again when a gradient reaches what its forward returned. It does not find tensors
    inside of objects (a ``torch.distributions`` policy), loses views that are changed in place, and does not
    know of what a forward hook has kept from inside of the unit (the features of a perceptual loss). The
    memory of such a unit is kept until the strategy's next backward ends, or weights are written. The unit
    is resharded all the same, and gathered again where FSDP2 sees the need, since other ranks may not keep
    it: a hook may be there on rank 0 alone.

    ``always``: every unit stays gathered, for second derivatives.
    """

    def __init__(self, units: Iterable[FSDPModule], always: bool) -> None:
        self._always = always
        self.units: set[FSDPModule] = set()  # whose memory is kept at the moment
        self.hooks: list[RemovableHandle] = []
        for unit in units:
            module = cast(nn.Module, unit)
            inner = list(_modules_within(module))
            kept = ExitStack()
            # FSDP2's own forward hook, which frees the parameters, runs between these two.
            before = partial(self._before_freeing, unit, inner, kept)
            self.hooks.append(module.register_forward_hook(before, prepend=True))
            after = partial(_restore_flags, kept)
            self.hooks.append(module.register_forward_hook(after, always_call=True))

    @torch_internals.not_compiled
    def _before_freeing(
        self,
        unit: FSDPModule,
        inner: list[nn.Module],
        kept: ExitStack,
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        if torch.is_grad_enabled() and (
            self._always or _hides_tensors(output) or torch_internals.has_forward_hooks(inner)
        ):
            self.units.add(unit)
        if unit not in self.units:  # which lasts for a forward without gradients that follows
            return
        if self._always:
            kept.enter_context(fsdp2.flags_restored([unit], fsdp2.RESHARDING))
            unit.set_reshard_after_forward(False, recurse=False)
        else:
            kept.enter_context(fsdp2_gathers.keeping_storage(unit))

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Context in which forwards keep nothing for second derivatives."""
        before = self._always
        self._always = False
        try:
            yield
        finally:
            self._always = before

    def stop_keeping(self, needed: Set[FSDPModule] = frozenset()) -> None:
        """Unshard what is kept of units that are not ``needed`` any more, so that resharding frees its memory."""
        for unit in self.units - needed:
            fsdp2_gathers.show_kept_storage(unit)
        self.units &= needed


@torch_internals.not_compiled
def _restore_flags(kept: ExitStack, *_: Any) -> None:
    kept.close()


def _modules_within(unit: nn.Module) -> Iterator[nn.Module]:
    """The modules below ``unit`` that belong to no other unit."""
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _modules_within(child)


def _hides_tensors(output: Any) -> bool:
    """Whether FSDP2 may not find, or lose, tensors in what a forward has returned."""
    if isinstance(output, Tensor):
        return output.requires_grad and torch_internals.is_view(output)
    if isinstance(output, Mapping):
        return any(map(_hides_tensors, output.values()))
    if isinstance(output, list | tuple):
        return any(map(_hides_tensors, output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return any(_hides_tensors(getattr(output, field.name)) for field in dataclasses.fields(output))
    return not isinstance(output, int | float | str | None)


class AgreedGathers:
    """Compares which units the ranks gather, one after the other, while it is open: in the first window.

    FSDP2 does not: if ranks gather different units of the same size, each silently gets a mixture of both.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[FSDPModule], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._doing = [f"uses {names[cast(nn.Module, unit)] or 'the model'}" for unit in units]
        heads = [names[cast(nn.Module, unit)] for unit in units if is_head(unit)]
        self._doing.append("begins the backward")
        self._doing += [f"begins the backward without having called {name}" for name in heads]
        self._num_units = len(units)
        self._group = group
        self._device = device
        self._advice = DIFFERENT_UNITS
        self.patches = PatchStack()
        for index, unit in enumerate(units):
            fsdp2_gathers.note_all_gathers(unit, partial(self._compare, index), self.patches)
            if _holds_experts(unit):
                # They exchange tokens in each forward, also where nothing is gathered.
                self._advice = DIFFERENT_FORWARDS
                compare = partial(self._compare_call, index)
                hook = cast(nn.Module, unit).register_forward_pre_hook(compare, prepend=True)
                self.patches.callback(hook.remove)

    def before_backward(self, called_head: bool) -> None:
        """All ranks must be through with their forwards, in which they have called the head, or not. A collective."""
        self._compare(self._num_units if called_head else self._num_units + 1)

    @torch_internals.not_compiled
    def _compare_call(self, index: int, *_: Any) -> None:
        self._compare(index)

    def _compare(self, index: int) -> None:
        own = torch.tensor(index, device=self._device)
        by_rank = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(by_rank, own, group=self._group)
        indices = [int(index_of_rank) for index_of_rank in by_rank]
        other = next((rank for rank, index in enumerate(indices) if index != indices[0]), None)
        if other is not None:
            raise RuntimeError(
                f"Ranks use different FSDP units in the same forward: rank 0 {self._doing[indices[0]]} while"
                f" rank {other} {self._doing[indices[other]]}, {self._advice}"
            )


def _holds_experts(unit: FSDPModule) -> bool:
    """Whether a parameter of ``unit`` itself spreads experts over ranks."""
    params = [param for group in fsdp2.param_groups(unit) for param in group.fsdp_params]
    return any(num_expert_ranks(param.sharded_param) > 1 for param in params)


class JoinedGathers:
    """Records which units an evaluation step gathers, so that a rank without data can take part in these gathers.

    No user code runs on that rank: nothing is logged, counted or drawn at random there.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._units = units
        self._newest: list[FSDPModule] = []
        self._before: list[FSDPModule] | None = None

    def start_loop(self) -> None:
        """Begin an evaluation loop: earlier gathers do not apply to it."""
        self._newest = []
        self._before = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step of this rank, which begins with everything sharded."""
        self._before = self._newest or None
        self._newest = []
        with PatchStack() as patches:  # not for longer, since training gathers the same units
            for unit in self._units:
                fsdp2_gathers.note_all_gathers(unit, partial(self._newest.append, unit), patches)
            yield

    def join(self) -> None:
        """Take part in a step of other ranks by repeating the gathers of this rank's last step. A collective."""
        self.check_order()
        for unit in self._newest:
            unit.unshard()
            unit.reshard()

    def check_order(self) -> None:
        """Raise RuntimeError if this rank's last two steps gathered different parameters: which would be next?"""
        if self._before is not None and self._before != self._newest:
            raise RuntimeError(
                "This rank has evaluated all its data, and other ranks have not. It cannot take part in what"
                " they gather, since its own last two steps gathered different parameters: give all ranks"
                " equally many batches, for example by a sampler that repeats samples."
            )
