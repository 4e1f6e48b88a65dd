"""FSDP2: which micro-batch communicates what, in which order, and which parameters stay gathered.

A window is in one :class:`Phase`, and FSDP2 reduces gradients in one way:

========================  ==================  =========================  =======================================
what comes                phase after it      reductions after it        parameters that are gathered
========================  ==================  =========================  =======================================
:meth:`start_forward`     STEP                as before                  those of a whole step, and what was retained
                                                                         and is current
:meth:`resume_step`       STEP                as before                  those of a whole step
a forward                 as before           as before                  stay for the window, or are freed
:meth:`end_forward`       BEFORE_BACKWARD     as before                  retained: the module shows shards
:meth:`begin`             STEP                all at the window's end,   shown again, or gathered anew
                                              else as ``defer`` says
:meth:`keep`              HOOKS               BY_FSDP2 at the window's   retained until the window ends, then freed
                                              end, else NONE
:meth:`end_step`          HOOKS               as before                  freed
:meth:`apart`             STEP or REPLAY,     as before; after an error  freed before it, and after it
                          then HOOKS          BY_FSDP2
:meth:`release`           as before           as before                  freed, so that none is stale
:meth:`recover`           HOOKS               BY_FSDP2                   freed, and what was written is given up
:meth:`discard`           as before           BY_FSDP2, if all           as before
                                              gradients are dropped
:meth:`keep_gathered`     as before           as before                  a group's stay for each such step from now on
:meth:`close`             as at set-up        as at set-up               freed
========================  ==================  =========================  =======================================

(the methods of :class:`FSDP2Engine`). With ``retain_unsharded`` parameters are all-gathered in the first
forward of a window only. Between two micro-batches the module shows its sharded parameters, while the
memory of the unsharded ones is retained: others find an ordinary sharded module.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_automodel.distributed.collectives import gathers
from lightning_automodel.distributed.mesh import Placement, num_expert_ranks
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.engine import Engine
from lightning_automodel.gradients.rank_agreement import DIFFERENT_UNITS
from lightning_automodel.gradients.window_records import BackwardPass
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.fsdp2_setup import FSDP2Settings, set_prefetch
from lightning_automodel.sharding.gathered import WRITTEN_BEFORE_BACKWARD, GatheredUnits, Phase
from lightning_automodel.sharding.gathered_tensor import SECOND_DERIVATIVE
from lightning_automodel.sharding.shards import Shard
from lightning_automodel.sharding.tensor_parallel import refuse_second_derivatives, share_random_state
from lightning_automodel.sharding.units import fsdp_roots, is_head

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

_BYPASSED = (
    "parameters that FSDP2 shards got a gradient that it does not reduce, since training_step uses them outside"
    " of their unit's forward. A step that takes a state dict uses shards after it: take it in a hook. Code that"
    " calls only modules in a unit does that: call the unit itself (strategy.describe()['units'] has them), or pass an"
    f" auto_wrap_policy with the classes of what is called. So does a penalty on weights. {PENALTY_ON_WEIGHTS}"
    " For a method that differentiates by module.parameters(), as adjoint methods do, pass"
    " auto_wrap_policy=set(): the model is then one unit, which under automatic optimization is gathered during"
    " all of training_step."
)

_EXPERTS_WITHOUT_DATA = (
    "This rank has evaluated all its data, and other ranks have not: it cannot take part in their forwards,"
    " which send tokens to the experts that it holds (expert_parallel_size > 1). Give all ranks equally many"
    " batches: Trainer(limit_val_batches=...), or limit_test_batches or limit_predict_batches, with as many as"
    " each rank has, or a DistributedSampler with drop_last=True."
)

_ZEROED_IN_PART = (
    "Gradients of one FSDP unit belong to several optimizers, and one of them is zeroed in the middle of a"
    " window whose replicas have not been added up: defer_fsdp_grad_sync='all_reduce' cannot drop a part. Pass"
    " True or False."
)

_STEP_ENDS = -1
"""Told in place of the number of a unit."""

_BACKWARD_ALONE = (
    "A backward in a step of evaluation in which other ranks have no data left: FSDP2 would reduce gradients of"
    " parameters with these ranks. For gradients of inputs or activations, call torch.autograd.grad(loss, inputs), or"
    " give all ranks equally many batches."
)
"""Why a backward is refused whose reductions others do not join."""

BY_FSDP2 = fsdp2.Reductions(reduce_grads=True, all_reduce_grads=True, reduce_scatter_unused_params=False)
"""While no window is open, FSDP2 averages the gradients of every backward."""

NONE = fsdp2.Reductions(reduce_grads=False, all_reduce_grads=False, reduce_scatter_unused_params=True)
"""While a window is open, gradients wait in FSDP2. Other backwards leave nothing in ``.grad``."""


_SHOW_SHARDS = (Phase.HOOKS, Phase.BEFORE_BACKWARD)


class FSDP2Engine(Engine):
    """Parameters, gradients and optimizer state sharded by FSDP2, over one group or over each replica (HSDP).

    Reductions happen inside the strategy's own backwards. Any other backward, such as
    ``torch.autograd.grad`` in a training step or a callback, would reduce what an open window has deferred,
    and leave it in ``.grad``.

    FSDP2 matches the collectives of ranks by their order alone: where ranks use different units, each gets parameters
    or gradients of another layer than it asks for, without an error if layers have one shape. So the order is noted.

    In an evaluation step that a rank joins without data, the first rank with some, its leader, tells all ranks, over a
    group of hosts, which unit it gathers next. No user code runs on the rank without data: nothing is logged, counted
    or drawn at random there.

    Attributes:
        gathered: The FSDP units of the module, each with its gathered parameters.
        phase: The code that runs now, which decides what FSDP2 frees.
        calls: By FSDP2's group, how often a step has called its unit with gradients.

    Args:
        module: Sharded by FSDP2, with parameters that are :class:`Shard`.
        placement: Where this rank computes. Creating an engine is a collective over the tensor-parallel ranks.
        settings: What :func:`shard_module` has decided for the module.
    """

    def __init__(self, module: nn.Module, placement: Placement, settings: FSDP2Settings) -> None:
        mesh = placement.mesh
        super().__init__(mesh.group if mesh.sizes.divisor > 1 else None)
        self.phase = Phase.STEP  # as no flag was changed yet
        self.calls: Counter[Any] = Counter()
        self._reductions: fsdp2.Reductions | None = None
        self.model = module
        self._defer = settings.defer
        self._retain_unsharded = settings.retains_unsharded
        self._host_group = placement.host_group
        self._leader: int | None = None  # while it tells what it gathers
        self._patches = PatchStack()
        # How many forwards of each group the backward is still to leave, if the step has called any repeatedly.
        self._forwards_left: Counter[Any] = Counter()
        roots: list[Any] = fsdp_roots(module)
        units_of = {root: fsdp2.fsdp_units(root) for root in roots}
        modules = dict.fromkeys(chain.from_iterable(units_of.values()))
        self.gathered = GatheredUnits(modules, lambda unit: unit is module or is_head(unit), self)
        self._roots = {root: fsdp2.groups_of(units) for root, units in units_of.items()}
        self._groups = [group for unit in self.gathered.units for group in unit.groups]
        self._experts = {shard for shard in self.gathered.shards if num_expert_ranks(shard) > 1}
        self.first_peer = min(dist.get_process_group_ranks(mesh.fsdp.get_group(mesh.fsdp.ndim - 1)))
        self._watch_units()
        self._keep_flags()
        units = units_of.values()
        self._prefetch = partial(set_prefetch, units, settings.prefetch, placement.device.type == "cpu")
        self._prefetch_is_pending = settings.prefetch > 0
        if settings.prefetch:
            self._patches.callback(set_prefetch, units, 0, in_background=False)
        if mesh.tensor_group is not None:
            split = {p for p in self.gathered.shards if p.device_mesh.ndim > mesh.fsdp.ndim} - self._experts
            refuse_second_derivatives(module, split, self._patches)
        share_random_state(mesh.tensor_group, placement.device)
        self.enter(Phase.HOOKS)
        self.discard()  # units that the user has sharded may hold gradients of earlier training

    def _watch_units(self) -> None:
        """Note in which order units communicate, and let the engine restore them at its end."""
        # FSDP2 reads each shard as an ordinary DTensor, which is faster, unless it calls hooks of users.
        calls_hooks = any(shard.accepts_hooks for shard in self.gathered.shards)
        access = nullcontext if calls_hooks else plain_access
        for index, unit in enumerate(self.gathered.units):
            self._patches.callback(unit.close)
            note = partial(self._note, index)
            fsdp2.watch_unit(
                unit.module, note, self.keep_gathered, self._forwards_left, access, self._patches
            )

    def _keep_flags(self) -> None:
        """Keep FSDP2's flags of set-up, to be restored, and those of each phase."""
        self._patches.callback(fsdp2.set_flags, fsdp2.flags_of(self._groups, fsdp2.Reductions))
        of_setup = fsdp2.flags_of(self._groups, fsdp2.Resharding)
        self._patches.callback(fsdp2.set_flags, of_setup)
        self._resharding_in_hooks = {
            group: fsdp2.Resharding(True, group.mesh_info) for group in self._groups
        }
        if self._retain_unsharded:
            # Freed when all of the backward has run: it may read them after the unit's own part (a penalty).
            self._resharding_in_step = dict.fromkeys(self._groups, fsdp2.Resharding(False, None))
        else:
            # A step may run backwards of its own, and go on with those of the whole step.
            self._resharding_in_step = of_setup | {
                group: of_setup[group]._replace(reshard_after_backward=False)
                for unit in self.gathered.whole_step
                for group in unit.groups
            }

    def _reduce_as(self, reductions: fsdp2.Reductions) -> None:
        if reductions != self._reductions:
            fsdp2.set_flags(dict.fromkeys(self._groups, reductions))
            self._reductions = reductions

    def enter(self, phase: Phase) -> None:
        """Let FSDP2 free gathered parameters as the phase says."""
        if phase is not self.phase:
            shows_shards = phase in _SHOW_SHARDS
            fsdp2.set_flags(self._resharding_in_hooks if shows_shards else self._resharding_in_step)
            self.phase = phase

    def keep_gathered(self, group: Any) -> None:
        """Keep the parameters of a group gathered in each step from now on: a second derivative reads them late.

        Raises RuntimeError in hooks, after which nothing may stay gathered.
        """
        if self.phase in _SHOW_SHARDS:
            raise RuntimeError(SECOND_DERIVATIVE)
        self._resharding_in_step[group] = fsdp2.Resharding(False, None)
        fsdp2.set_flags(self._resharding_in_step)

    @override
    def _watch(self, parameter: nn.Parameter) -> None:
        """See the base class. Also notes whether autograd reaches the shard itself, past FSDP2."""
        param = getattr(parameter, "fsdp_param", None)
        if param is None:
            super()._watch(parameter)
            return
        leaf = param.unsharded_param  # the same from the first all-gather on
        super()._watch(leaf)
        with plain_access():
            if parameter in self._experts:
                self._patches.callback(leaf.register_hook(self._check_gradient_of_experts).remove)
            # FSDP2 writes gradients of shards itself, past their hooks.
            self._patches.callback(parameter.register_hook(partial(self._note_bypass, parameter)).remove)

    def _check_gradient_of_experts(self, _: Tensor) -> None:
        if self.backward is None and self.phase is not Phase.REPLAY:
            raise RuntimeError(GRADIENTS_OF_EXPERTS)

    def _note_bypass(self, shard: Any, _: Tensor) -> None:
        if self.backward is not None:
            self.reached.append(shard)

    @override
    def start_forward(self) -> None:
        """Begin a step, with what earlier ones have gathered, unless the shards were written since."""
        self.release(reuses_retained=True)
        self.calls.clear()
        self.resume_step()
        self.gathered.note_start()

    @override
    def resume_step(self) -> None:
        self.enter(Phase.STEP)

    @override
    def end_forward(self) -> None:
        self.gathered.check_current()
        self.enter(Phase.BEFORE_BACKWARD)
        self.gathered.show_shards(retained=True)

    @override
    def end_step(self) -> None:
        self.gathered.check_current()
        self.enter(Phase.HOOKS)
        self.gathered.show_shards(retained=False)

    @override
    def keep(self, backward: BackwardPass) -> None:
        """See the base class; after it, the module shows its sharded parameters, and hooks follow."""
        if backward.ends:
            self._reduce_as(BY_FSDP2)
            if self._prefetch_is_pending:
                # Not before ranks compare, at this window's end, which units they use.
                self._prefetch_is_pending = False
                self._prefetch()
        else:
            self._reduce_as(NONE)
        self.enter(Phase.HOOKS)
        self.gathered.show_shards(retained=self._retain_unsharded and not backward.ends)

    @contextmanager
    def apart(self, phase: Phase) -> Iterator[None]:
        """Context of what belongs to no window, which leaves no parameters gathered."""
        self.release()
        self.enter(phase)
        try:
            yield
        except BaseException:
            self.recover()  # a caller may go on, as BatchSizeFinder does when memory is short
            raise
        self.release()
        self.enter(Phase.HOOKS)

    @override
    def release(self, reuses_retained: bool = False) -> None:
        self.gathered.release(reuses_retained)

    @override
    def begin(self, backward: BackwardPass, loss: Tensor) -> None:
        self.gathered.show_for_backward()
        reductions = fsdp2.Reductions(
            reduce_grads=backward.ends or self._defer is not True,
            all_reduce_grads=backward.ends or self._defer is False,
            reduce_scatter_unused_params=True,
        )
        self.enter(Phase.STEP)
        if max(self.calls.values(), default=0) > 1:
            self._forwards_left.update(fsdp2.forwards_reached(loss))
        self._reduce_as(reductions)
        if reductions.reduce_grads:
            for group in self._groups:
                fsdp2.zero_missing_gradients(group, backward.frozen)

    @override
    def reduce(self, backward: BackwardPass) -> set[nn.Parameter]:
        """See the base class. Raises if the backward bypassed FSDP2, or reached shards that were written before it."""
        reached = set()
        bypassed = []
        for leaf in self.reached:
            reached.add(getattr(leaf, "shard", leaf))
            if isinstance(leaf, Shard):
                bypassed.append(leaf.parameter_name)
        if bypassed:
            raise RuntimeError(f"{', '.join(bypassed[:3])}: {len(bypassed)} {_BYPASSED}")
        for shard in self.gathered.written_before_backward:
            if shard in reached:
                raise RuntimeError(f"{shard.parameter_name} {WRITTEN_BEFORE_BACKWARD}")
        self._forwards_left.clear()
        if not backward.ends:
            return reached
        for root, groups in self._roots.items():
            fsdp2.reduce_deferred_gradients(root, groups)
        plain = [parameter for parameter in backward.final if not isinstance(parameter, DTensor)]
        if plain and self.group is not None:
            rescale_clip.average_gradients_(plain, self.group)
        if self._experts:
            rescale_clip.share_experts_gradients_(backward.final)
        backward.zero_filled = backward.final
        return reached

    @override
    @contextmanager
    def evaluation(self, find_leader: Callable[[], int | None]) -> Iterator[None]:
        """See the base class. A collective if there is a leader; RuntimeError if it gathers other units."""
        with self.apart(Phase.STEP):
            self._leader = find_leader()
            try:
                yield
                self._note(_STEP_ENDS)
            finally:
                self._leader = None

    @override
    def join_evaluation(self, leader: int) -> None:
        if self._experts:
            raise RuntimeError(_EXPERTS_WITHOUT_DATA)
        with self.apart(Phase.STEP):
            while (index := self._told(leader, _STEP_ENDS)) != _STEP_ENDS:
                unit = self.gathered.units[index].module
                unit.unshard()
                unit.reshard()
            self._note(_STEP_ENDS)

    def _note(self, index: int, *reduced: int) -> None:
        """Note what begins: a unit's all-gather, or the reduction of some of its parameters; or that a step ends."""
        if self.phase is Phase.HOOKS:
            gathers.check()
        elif self._leader is not None:
            if reduced:
                raise RuntimeError(_BACKWARD_ALONE)
            if self._told(self._leader, index) != index:
                raise RuntimeError(DIFFERENT_UNITS)
        self.unit_order = hash((self.unit_order, index, *reduced))

    def _told(self, leader: int, own: int) -> int:
        """What the leader tells, which this rank tells if it is the leader. A collective over the hosts."""
        told = torch.tensor(own, device="cpu")
        dist.broadcast(told, leader, self._host_group)
        return int(told)

    @override
    @contextmanager
    def replaying(self) -> Iterator[None]:
        with self.apart(Phase.REPLAY), super().replaying():
            yield

    @override
    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """See the base class. Raises if HSDP holds partial sums of these and of other parameters in one buffer."""
        wanted = None if parameters is None else set(parameters)
        for group in self._groups:
            owned = [p for p in group.fsdp_params if wanted is None or p.sharded_param in wanted]
            if not owned:
                continue
            if fsdp2.holds_partial_reduction(group) and any(
                p not in owned and p.sharded_param in self.tracked for p in group.fsdp_params
            ):
                raise RuntimeError(_ZEROED_IN_PART)
            fsdp2.clear_unreduced_gradients(group, owned)
        if parameters is None:
            self._reduce_as(BY_FSDP2)

    @override
    def close(self) -> None:
        """Reshard the model, remove the hooks, and restore the flags of set-up."""
        try:
            self.release()  # raises where a write is lost
        finally:
            self._patches.restore()
            super().close()

    @override
    def recover(self) -> None:
        """After an exception in a forward or backward: make the model usable again, and drop deferred gradients."""
        super().recover()
        self.unit_order = 0
        self._forwards_left.clear()
        # From torch 2.15 on, reset_iter_state also drops `.grad`, which may be older than the window.
        gradients = [(shard, shard.grad) for shard in self.gathered.shards]
        self.gathered.recover()
        for root in self._roots:
            root.reset_iter_state()
        self.release()
        self.enter(Phase.HOOKS)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self.discard()
