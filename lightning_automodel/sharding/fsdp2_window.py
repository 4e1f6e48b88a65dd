"""FSDP2's gradient synchronisation: which micro-batch communicates what, and which parameters stay gathered."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_automodel.distributed.mesh import num_expert_ranks
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.grad_sync import GradSync, Window
from lightning_automodel.internals import fsdp2, fsdp2_gathers
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.sharding.gathered import GatheredParameters
from lightning_automodel.sharding.gathers import reshard
from lightning_automodel.sharding.sync_context import Deferral, accumulate_in_one_dtype
from lightning_automodel.sharding.units import fsdp_roots, is_head

_ORDERS = 2**20 - 3  # a prime; sums of squares over ranks stay exact in float64

PENALTY_ON_WEIGHTS = (
    "Add the penalty's gradient where gradients are final, once a step: in on_before_optimizer_step, under"
    " torch.enable_grad(), `p.grad += torch.autograd.grad(penalty(p), p)[0]`, where penalty(p) computes"
    " with p as with a whole tensor. Or pass data_parallel='ddp'."
)
"""How a penalty on sharded weights is trained."""

GRADIENTS_OF_EXPERTS = (
    "Gradients of experts that are spread over ranks (expert_parallel_size > 1) were computed beside the"
    " strategy's own backward. They hold the tokens of all ranks that exchange them, whereas those of other"
    " parameters hold this rank's. For a loss that trains, call self.manual_backward(loss). For the gradient"
    " of inputs or activations, call torch.autograd.grad(loss, inputs)."
)
"""Why a backward that is not the strategy's must not reach spread experts."""


class Reductions(Enum):
    """What FSDP2 does with the gradients that a backward computes: three flags of each unit.

    They are whether it reduce-scatters them, whether it all-reduces them across replicas (HSDP), and whether
    zeros stand for parameters that this rank has not used, so that ranks send the same shapes.
    """

    BY_FSDP2 = (True, True, False)  # no window is open: every backward is averaged over ranks
    NONE = (False, False, True)  # a window is open: gradients wait, and foreign ones leave nothing behind
    WITHIN_REPLICAS = (True, False, True)  # in a backward of the strategy that does not end the window
    ALL = (True, True, True)  # in the window's last backward


class Phase(Enum):
    """What user code may do at a time, which decides what FSDP2 frees."""

    HOOKS = auto()  # what a forward gathers is freed after it: the module shows shards
    FORWARD = auto()  # of a training step: gathered parameters stay for its backward, or for the window
    EVALUATION = auto()  # each unit frees what it has gathered, as it was set up


class FSDP2Window(GradSync):
    """Controls the communication of an FSDP2 model in each accumulation window.

    Reductions happen inside the strategy's own backwards. Any other backward, such as
    ``torch.autograd.grad`` in a training step or a callback, would reduce what an open window has deferred,
    and leave it in ``.grad``.

    With ``retain_unsharded`` parameters are all-gathered in the first forward of a window only. Between two
    micro-batches the module shows its sharded parameters, while the memory of the unsharded ones is
    retained: others find an ordinary sharded module. Plain parameters are averaged over ``group``; None for
    one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        defer: Deferral,
        retain_unsharded: bool,
        group: dist.ProcessGroup | None = None,
        is_manual: bool = False,
    ) -> None:
        super().__init__()
        self._defer = defer
        self._group = group
        self._retain_unsharded = retain_unsharded
        self._is_manual = is_manual
        self.units = fsdp2.fsdp_units(model)
        # With the parameter groups at or below each.
        self._roots = {
            root: list(fsdp2.fsdp_param_groups(cast(nn.Module, root))) for root in fsdp_roots(model)
        }
        self._heads = {unit for unit in self.units if is_head(unit)}
        self._whole_step = [
            unit for unit in self.units if cast(nn.Module, unit) is model or unit in self._heads
        ]
        self._unadopted = list(self._whole_step)
        self._groups = [group for unit in self.units for group in fsdp2.param_groups(unit)]
        self._model = model
        self._unit_of = {group: unit for unit in self.units for group in fsdp2.param_groups(unit)}
        self._number_of = {group: number for number, group in enumerate(self._groups, start=1)}
        self._flags = fsdp2.UnitFlags(self.units)
        self._reductions = Reductions.BY_FSDP2
        self._phase: Phase | None = None
        self._gathered = GatheredParameters(self.units, self)
        self._retained: list[FSDPModule] = []  # which the module does not show, and whose memory is kept
        self._has_gathered = False
        self._has_two_dtypes = True  # until units are gathered
        params = [param for group in self._groups for param in group.fsdp_params]
        self._experts = {p.sharded_param for p in params if num_expert_ranks(p.sharded_param) > 1}
        self._params = {param.sharded_param: param for param in params}
        self._shard_of: dict[nn.Parameter, nn.Parameter] = {}  # by where autograd accumulates its gradient
        self._bypassed: list[str] = []
        self._register_hooks()
        self._enter(Phase.HOOKS)

    def _register_hooks(self) -> None:
        self._hooks += self._gathered.hooks
        for unit in self._whole_step:
            self._hooks += fsdp2_gathers.after_state_dicts(unit, partial(self._show_again, unit))
            self._tell_of_writes(unit, partial(self._gather_written, unit))
        for root in cast(list[nn.Module], self._roots):
            if root is not self._model:
                hook = partial(self._reshard_unless_training, fsdp2.fsdp_units(root))
                self._hooks.append(root.register_forward_hook(hook))

    def _reshard_unless_training(self, units: Sequence[FSDPModule], root: nn.Module, *_: object) -> None:
        """Forward hook of a root: frees parameters that no backward will free, and that would become stale.

        These are prefetched units that the forward did not use, and, if no gradients are computed, those of
        the root.
        """
        for prefetched in fsdp2.gathering(units):
            reshard(prefetched)
        if not torch.is_grad_enabled() and not (self._is_manual and self._retain_unsharded):
            cast(FSDPModule, root).reshard()

    def _show_again(self, unit: FSDPModule, *_: object) -> None:
        """Gather what FSDP2 has freed for a state dict within a step that goes on with it. Then a collective."""
        if self._phase is Phase.FORWARD:
            unit.unshard()

    def _tell_of_writes(self, unit: FSDPModule, listener: Callable[[], None] | None) -> None:
        for param in (param for group in fsdp2.param_groups(unit) for param in group.fsdp_params):
            param.sharded_param.on_write = listener

    def _gather_written(self, unit: FSDPModule) -> None:
        """Gather shards of a unit again that a step has written, and goes on to use. Then a collective.

        Other units are looked at when they are called.
        """
        if self._phase is Phase.FORWARD and fsdp2.unsharded([unit]):
            self._gathered.settle([unit])
            self._gathered.gather_again(unit)

    def _enter(self, phase: Phase) -> None:
        """Let FSDP2 free gathered parameters as the phase says. One place for all its flags of that."""
        if phase is self._phase:
            return
        self._phase = phase
        if phase is Phase.HOOKS:
            self._flags.reshard(always=True)
        elif phase is Phase.FORWARD and self._retain_unsharded:
            # Freed when all of the backward has run: it may read them after the unit's own part (a penalty).
            self._flags.reshard(always=False)
        else:
            self._flags.restore(fsdp2.RESHARDING)

    def gather_once(self) -> None:
        """Gather the units that have never been. A collective, if there are any.

        A unit that is first used in the last micro-batch of a window would lack the unsharded parameter that
        FSDP2 accumulates into.
        """
        self._has_gathered = True
        self._has_two_dtypes = any(map(fsdp2.has_two_gradient_dtypes, self._groups))
        for unit in self.units:
            if not all(map(fsdp2.was_unsharded, fsdp2.param_groups(unit))):
                unit.unshard()
                unit.reshard()
            self._gathered.adopt(unit)

    @override
    def _watch(self, parameter: nn.Parameter) -> None:
        """See the base class. Also notes whether autograd reaches the shard itself, past FSDP2."""
        param = self._params.get(parameter)
        if param is None:
            super()._watch(parameter)
            return
        leaf = param.unsharded_param  # the same from the first all-gather on
        leaf.requires_grad = True  # as the next all-gather sets it
        self._shard_of[leaf] = parameter
        super()._watch(leaf)
        with plain_access():
            if parameter in self._experts:
                self._hooks.append(leaf.register_hook(self._check_gradient_of_experts))
            # FSDP2 writes gradients of shards itself, past their hooks.
            self._hooks.append(parameter.register_hook(partial(self._note_bypass, parameter)))

    def _check_gradient_of_experts(self, _: Tensor) -> None:
        if self.window is None:
            raise RuntimeError(GRADIENTS_OF_EXPERTS)

    def _note_bypass(self, shard: Any, _: Tensor) -> None:
        if self.window is not None:
            self.reached.append(shard)
            self._bypassed.append(shard.parameter_name)

    @override
    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """See the base class. Inside another one it does nothing: the outer one has decided."""
        if self.is_last is not None:
            yield
            return
        try:
            with super().micro_batch(is_last):
                yield
        except BaseException:
            self._enter(Phase.HOOKS)  # what is saved after an exception are shards
            raise
        if not self._is_manual:  # else the step goes on
            self.end_step()

    @override
    def start_step(self) -> None:
        # They are gathered for the whole step, past the hooks that adopt other units.
        for unit in self._unadopted:
            unit.unshard()
            self._gathered.adopt(unit)
        self._unadopted.clear()
        self._enter(Phase.FORWARD)

    @override
    def end_forward(self) -> None:
        self._gathered.settle(self.units)
        for unit in fsdp2.unsharded(self.units):
            self._hide(unit)
        self._enter(Phase.HOOKS)

    def _hide(self, unit: FSDPModule) -> None:
        """Let the module show shards, and keep what was gathered."""
        with fsdp2_gathers.keeping_storage(unit):
            unit.reshard()
        self._retained.append(unit)

    @override
    def end_step(self) -> None:
        self._gathered.settle(self.units)
        for unit in fsdp2.unsharded(self.units):
            reshard(unit)
        self._enter(Phase.HOOKS)

    def evaluate(self) -> None:
        """A step of evaluation begins: nothing stays gathered after it."""
        self.release()
        self._gathered.begin_step()
        self._enter(Phase.EVALUATION)

    @override
    def release(self, retains: bool = False) -> None:
        """Reshard what is unsharded, so that nothing stale is used once weights are written.

        ``retains``, as a micro-batch starts: use retained parameters again unless the sharded ones were
        written since.
        """
        self._gathered.settle(self.units)
        retained = self._retained
        self._retained = []
        taken_back = []
        for unit in retained:
            is_shown = fsdp2_gathers.show_kept_storage(unit)
            if retains and is_shown and self._gathered.is_current(unit):
                taken_back.append(unit)
        self._reshard_others(taken_back)
        if retains:
            self._gathered.begin_step()

    def _reshard_others(self, needed: list[FSDPModule]) -> None:
        """Free what is gathered, except of these units."""
        still_needed = set(needed)
        for unit in self.units:
            if unit not in still_needed:
                reshard(unit)

    @override
    def toggled(self) -> None:
        unsharded = fsdp2.unsharded(self.units)
        for unit in unsharded:
            fsdp2.show_trainable(unit)
        for unit in self._retained:
            fsdp2_gathers.show_kept_storage(unit)
        self._retained = []
        self._reshard_others(unsharded)  # a backward that is to come needs them

    @override
    def stepped(self) -> None:
        # A hook may step within a backward, which needs the old ones.
        if self.window is None and fsdp2.unsharded(self.units):
            self.release()

    @override
    def begin(self, window: Window, loss: Tensor) -> None:
        if self._phase is Phase.HOOKS:
            for unit in self._retained:
                if not fsdp2_gathers.show_kept_storage(unit):  # a hook's forward has freed it
                    unit.unshard()
        self._retained = []
        self._enter(Phase.FORWARD)
        if not self._has_gathered:
            self.gather_once()
        if not window.trained <= self._tracked:
            self.track(window.trained)
        deferred = {True: Reductions.NONE, "all_reduce": Reductions.WITHIN_REPLICAS, False: Reductions.ALL}
        self._reduce(Reductions.ALL if window.ends else deferred[self._defer])
        ran = fsdp2.forward_order(self._groups)
        gathered = set(fsdp2.unsharded(self.units))
        freed = [self._unit_of[group] for group in ran if self._unit_of[group] not in gathered]
        self._gathered.settle(self.units)
        self._gathered.check_unassigned(freed)
        # Later forwards of a window use what the first has gathered.
        if window.order == 0 or not self._retain_unsharded:
            for group in ran:
                window.order = (window.order * 31 + self._number_of[group]) % _ORDERS
        if window.ends and self._has_two_dtypes:
            accumulate_in_one_dtype(self.units)
        if window.frozen and self._reductions is not Reductions.NONE:
            for group in self._groups:
                fsdp2.zero_missing_gradients(group, window.frozen)

    @override
    def reduce(self, window: Window) -> set[nn.Parameter]:
        """See the base class. Raises if the backward has bypassed FSDP2."""
        reached = set(map(self._shard_of.get, self.reached, self.reached))  # plain parameters are their own
        if self._bypassed:
            raise RuntimeError(
                f"{', '.join(self._bypassed[:3])}: {len(self._bypassed)} parameters that FSDP2 shards got a"
                " gradient that it does not reduce, since training_step uses them outside of their unit's"
                " forward. Code that calls only modules in a unit does that: call the unit itself"
                " (strategy.describe()['units'] has them), or pass an auto_wrap_policy with the classes of"
                f" what is called. So does a penalty on weights. {PENALTY_ON_WEIGHTS} For a method that"
                " differentiates by module.parameters(), as adjoint methods do, pass"
                " auto_wrap_policy=set(): the model is then one unit, which under automatic optimization"
                " is gathered during all of training_step."
            )
        if not window.ends:
            return reached
        for root, groups in self._roots.items():
            fsdp2.reduce_deferred_gradients(root, groups)
        trained = [parameter for parameter in window.final if parameter in window.trained]
        plain = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        if plain and self._group is not None:
            rescale_clip.average_gradients_(plain, self._group)
        if self._experts:
            rescale_clip.share_experts_gradients_([p for p in trained if p in self._experts])
        window.zero_filled = trained
        return reached

    @override
    def keep(self, window: Window) -> None:
        """See the base class; after it, the module shows its sharded parameters, and hooks follow."""
        self._reduce(Reductions.BY_FSDP2 if window.ends else Reductions.NONE)
        self._gathered.settle(self.units)
        for unit in fsdp2.unsharded(self.units):
            as_set = fsdp2.param_groups(unit)[0].reshard_after_backward or unit in self._heads
            if self._retain_unsharded:
                frees = window.ends
            else:
                frees = as_set
            if frees:
                unit.reshard()
            else:
                self._hide(unit)
        self._enter(Phase.HOOKS)

    def _reduce(self, reductions: Reductions) -> None:
        """Let backwards from now on reduce as ``reductions`` says."""
        if reductions is not self._reductions:
            self._flags.reduce(*reductions.value)
            self._reductions = reductions

    @override
    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """See the base class. Raises if HSDP holds partial sums of these and of other parameters in one buffer."""
        if parameters is None:
            wanted = None
        else:
            wanted = set(parameters)
        super().discard(wanted)
        for group in self._groups:
            owned = [p for p in group.fsdp_params if wanted is None or p.sharded_param in wanted]
            if not owned:
                continue
            others = [p for p in group.fsdp_params if p not in owned and p.sharded_param in self._tracked]
            if others and fsdp2.holds_partial_reduction(group):
                raise RuntimeError(
                    "Gradients of one FSDP unit belong to several optimizers, and one of them is zeroed in"
                    " the middle of a window whose replicas have not been added up:"
                    " defer_fsdp_grad_sync='all_reduce' cannot drop a part. Pass True or False."
                )
            fsdp2.clear_unreduced_gradients(group, owned)
        if wanted is None:
            self._reduce(Reductions.BY_FSDP2)

    @override
    def close(self) -> None:
        """Reshard the model, remove the hooks, and let FSDP2 reduce as before."""
        self.release()
        self._flags.restore()
        for unit in self._whole_step:
            self._tell_of_writes(unit, None)
        self._gathered.close()
        super().close()

    @override
    def recover(self) -> None:
        """After an exception in a forward or backward: make the model usable again, and drop deferred gradients."""
        self._bypassed = []
        self._gathered.forget_writes()
        # From torch 2.15 on, reset_iter_state also drops `.grad`, which may be older than the window.
        gradients = [
            (param.sharded_param, param.sharded_param.grad) for g in self._groups for param in g.fsdp_params
        ]
        for unit in self.units:
            fsdp2_gathers.forget_background_gather(unit)
        for root in self._roots:
            root.reset_iter_state()
        self.release()
        self._enter(Phase.HOOKS)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self.discard()
