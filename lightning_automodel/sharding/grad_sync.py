"""Which micro-batch communicates what: deferring gradient reduction, and keeping parameters gathered meanwhile."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_automodel import torch_internals
from lightning_automodel.torch_internals import FSDPParamGroup

Deferral = bool | Literal["all_reduce"]

_REDUCTION_FLAGS = ("reduce_grads", "all_reduce_grads", "reduce_scatter_unused_params")
_RESHARD_FLAGS = ("reshard_after_backward", "post_forward_mesh_info")


def get_sync_ctx(
    model: nn.Module, is_optim_step: bool, defer_fsdp_grad_sync: Deferral = True
) -> AbstractContextManager[None]:
    """Context for the forward and backward of one micro-batch: does its backward communicate gradients?

    It covers every FSDP2 module and every ``DistributedDataParallel`` at or below ``model``, and restores on exit,
    also after an exception, what it found. Ranks must agree on the arguments: a rank that reduces while another does
    not hangs until the group's timeout. Leaving the last micro-batch is a collective where several FSDP2 roots lie
    below ``model`` and some took no part in it: what they deferred is reduced then.

    Args:
        model: Model to be trained; where nothing is distributed, the context does nothing.
        is_optim_step: Whether this is the last micro-batch before the optimizer step.
        defer_fsdp_grad_sync: For FSDP2 and HSDP, what the other micro-batches do. True: nothing, gradients stay
            unsharded until the last one. False: reduce every time. ``"all_reduce"`` (HSDP): reduce-scatter every time
            and all-reduce across replicas at the last one. DDP always defers.

    Raises:
        ValueError: If ``defer_fsdp_grad_sync`` is none of these.
    """
    check_deferral(defer_fsdp_grad_sync)
    return _sync_ctx(model, is_optim_step, defer_fsdp_grad_sync)


@contextmanager
def _sync_ctx(model: nn.Module, is_optim_step: bool, defer: Deferral) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and not is_optim_step:
                stack.enter_context(module.no_sync())
        groups = list(torch_internals.fsdp_param_groups(model))
        stack.enter_context(_restored(groups, _REDUCTION_FLAGS))
        for group in groups:
            _set_reduction(group, is_optim_step, defer)
        stack.enter_context(_one_gradient_dtype(groups if is_optim_step else []))
        yield
        if is_optim_step:
            _reduce_pending([module for module in model.modules() if isinstance(module, FSDPModule)])


def _reduce_pending(modules: Sequence[FSDPModule]) -> None:
    """Reduce what roots have deferred that took no part in the last backward: FSDP2 visits the others only."""
    for root in modules:
        if torch_internals.is_fsdp_root(root) and torch_internals.has_deferred_gradients(root):
            torch_internals.finish_backward(root)


def check_deferral(defer: Deferral) -> None:
    """Raise ValueError unless ``defer`` is True, False or "all_reduce"."""
    if not (isinstance(defer, bool) or defer == "all_reduce"):
        raise ValueError(f"defer_fsdp_grad_sync must be True, False or 'all_reduce', got {defer!r}.")


@contextmanager
def _restored(groups: list[FSDPParamGroup], flags: tuple[str, ...]) -> Iterator[None]:
    """Put these attributes of ``groups`` back on exit."""
    before = [[getattr(group, flag) for flag in flags] for group in groups]
    try:
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            for flag, value in zip(flags, values, strict=True):
                setattr(group, flag, value)


def _set_reduction(group: FSDPParamGroup, is_optim_step: bool, defer: Deferral) -> None:
    group.reduce_grads = is_optim_step or defer is not True
    group.all_reduce_grads = is_optim_step or defer is False
    if defer == "all_reduce" and torch_internals.is_replicated(group):
        # The partial sums of a window live in one flat buffer: every micro-batch must fill the same places of it, and
        # the last one must take part even where the unit was not used in it.
        group.reduce_scatter_unused_params = True


@contextmanager
def _one_gradient_dtype(groups: Sequence[FSDPParamGroup]) -> Iterator[None]:
    """Context for the last micro-batch: parameters that none before it has used get as wide a gradient as the others.

    So do those that it does not use either, where they are to take part in the reduction.
    """
    handles = []
    for group in groups:
        for param in torch_internals.lacks_accumulator(group):
            if group.reduce_scatter_unused_params:
                torch_internals.start_accumulator(param)
            else:
                handles.append(torch_internals.widen_gradient(param))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _free_unless_training(root: nn.Module, *_: object) -> None:
    """Forward hook: a root stays gathered for the backward that follows; where none does, it would become stale."""
    if not torch.is_grad_enabled():
        cast(FSDPModule, root).reshard()


class FSDPGradSync:
    """Communication of an FSDP2 model through the windows of a strategy.

    Args:
        model: Module at or below which every FSDP2 module is governed.
        defer: As ``defer_fsdp_grad_sync`` of :func:`get_sync_ctx`.
        keep_gathered: Keep parameters gathered from the first forward of a window to its last backward. Between two
            micro-batches they are parked: the module shows its sharded parameters, the gathered copy waits aside.
    """

    def __init__(self, model: nn.Module, defer: Deferral, keep_gathered: bool) -> None:
        self.defer = defer
        self.keep_gathered = keep_gathered
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._groups = list(torch_internals.fsdp_param_groups(model))
        self._parked: list[tuple[FSDPParamGroup, list[int]]] = []
        self._is_last: bool | None = None
        self._used: set[int] = set()
        self._followed: set[int] = set()
        self._handles = [
            root.register_forward_hook(_free_unless_training)
            for root in self._modules
            if root is not model and torch_internals.is_fsdp_root(root)
        ]
        for group in self._groups:
            self._follow_use(group)

    def _follow_use(self, group: FSDPParamGroup) -> None:
        """Tell parameters without a gradient in a window from those with a zero one, which FSDP2 gives them here."""
        for parameter, gathered in torch_internals.sharded_and_gathered(group):
            if not parameter.requires_grad:
                continue
            self._followed.add(id(parameter))
            mark = partial(self._mark_used, id(parameter))
            self._handles.append(gathered.register_post_accumulate_grad_hook(mark))

    def _mark_used(self, parameter_id: int, _: nn.Parameter) -> None:
        self._used.add(parameter_id)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Context for the forward and backward of one micro-batch; ``is_last``: the optimizer steps after it.

        Inside another one it does nothing: the outer one has decided.
        """
        if self._is_last is not None:
            yield
            return
        with (
            _restored(self._groups, _REDUCTION_FLAGS + _RESHARD_FLAGS),
            self._deciding(is_last),
        ):
            for group in self._groups:
                _set_reduction(group, is_last, self.defer)
                # Ranks may differ in what they use of a unit, and must send gradients of the same shapes.
                group.reduce_scatter_unused_params = True
                if self.keep_gathered:
                    group.post_forward_mesh_info = None
                    group.reshard_after_backward = is_last
            with _one_gradient_dtype(self._groups if is_last else []):
                yield

    @contextmanager
    def _deciding(self, is_last: bool) -> Iterator[None]:
        self._is_last = is_last
        try:
            yield
        finally:
            self._is_last = None

    def resume(self) -> None:
        """Start a micro-batch: take parked parameters back unless somebody has written the sharded ones since.

        Whatever else is still gathered (another forward's) is freed, so that nothing stale is ever used.

        Raises:
            RuntimeError: If weights were changed past autograd's version counters (``.data``), which other ranks may
                not have noticed.
        """
        parked, self._parked = self._parked, []
        for group, versions in parked:
            if not group.is_sharded or not torch_internals.gathered_storage_is_alive(group):
                continue
            if versions != torch_internals.sharded_versions(group):
                torch_internals.free_parked(group)
                continue
            # Once a window is enough to raise before its step, and reading all weights each time is not free.
            if self._is_last and group.device.type == "cpu" and torch_internals.own_shard_changed(group):
                raise RuntimeError(
                    f"Parameters of {torch_internals.name_of(group)} were written through `.data` between two"
                    " micro-batches of one accumulation window, while they are kept gathered. Write them in place under"
                    " torch.no_grad() (`p.copy_(...)`), which is noticed, or pass reshard_during_accumulation=True."
                )
            torch_internals.unpark_gathered(group)
        taken_back = {id(group) for group, _ in parked if group.is_unsharded}
        for group in self._groups:
            if id(group) not in taken_back and not group.is_sharded:
                group.reshard()

    def end_backward(self) -> None:
        """Show sharded parameters to everybody else."""
        if self._is_last:
            _reduce_pending(self._modules)
        for group in self._groups:
            if group.is_unsharded and not group.reshard_after_backward:
                torch_internals.park_gathered(group)
                self._parked.append((group, torch_internals.sharded_versions(group)))

    def followed(self, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, bool]]:
        """Those of these that get a zero gradient where they were not used, and whether this rank used them."""
        return [(p, id(p) in self._used) for p in parameters if id(p) in self._followed]

    def release(self) -> None:
        """Free everything gathered: somebody may write the sharded weights, or needs the memory."""
        for group, _ in self._parked:
            if group.is_sharded:
                torch_internals.free_parked(group)
        self._parked = []
        for module in self._modules:
            module.reshard()

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Drop the gradients that FSDP2 holds outside of ``.grad`` for these (or all) sharded parameters."""
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        for group in self._groups:
            owned = [p for p in group.fsdp_params if wanted is None or id(p.sharded_param) in wanted]
            for param in owned:
                torch_internals.clear_accumulated_gradients(param)
                self._used.discard(id(param.sharded_param))
            if owned:
                torch_internals.discard_partial_reduction(group)

    def close(self) -> None:
        """Leave the model to itself, with nothing gathered."""
        self.release()
        for handle in self._handles:
            handle.remove()

    def recover(self) -> None:
        """After an exception in a forward or backward: make the model usable for another run."""
        self.release()
        for module in self._modules:
            if torch_internals.is_fsdp_root(module):
                module.reset_iter_state()
        self.discard()
