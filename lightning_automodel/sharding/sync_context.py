"""The context of one micro-batch for loops without this strategy: whether its gradients are reduced."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_automodel.internals import fsdp2
from lightning_automodel.sharding.units import fsdp_roots

Deferral = bool | Literal["all_reduce"]


def get_sync_ctx(
    model: nn.Module, is_optim_step: bool, defer_fsdp_grad_sync: Deferral = True
) -> AbstractContextManager[None]:
    """Context for the forward and backward of one micro-batch, which decides whether its gradients are reduced.

    It covers every FSDP2 module and every ``DistributedDataParallel`` at or below ``model``, and on exit
    restores their settings, also after an exception. Ranks must agree on the arguments: a rank that reduces
    while another does not hangs until the group's timeout. If some FSDP2 roots below ``model`` took no part
    in the last micro-batch, leaving its context is a collective: it reduces the gradients that these roots
    have deferred.

    FSDP2 keeps deferred gradients when ``optimizer.zero_grad()`` is called. To give up a window, after an
    exception for example, run ``with get_sync_ctx(model, is_optim_step=True): pass`` on every rank, and then
    ``optimizer.zero_grad()``.

    Args:
        model: Model to be trained; if nothing in it is distributed, the context does nothing.
        is_optim_step: Whether this is the last micro-batch before the optimizer step.
        defer_fsdp_grad_sync: For FSDP2 and HSDP, what the other micro-batches do. True: nothing, gradients
            stay unsharded until the last one. False: reduce every time. ``"all_reduce"`` (HSDP):
            reduce-scatter every time and all-reduce across replicas at the last one. DDP always defers.

    Raises:
        ValueError: If ``defer_fsdp_grad_sync`` is none of these.
    """
    if not (isinstance(defer_fsdp_grad_sync, bool) or defer_fsdp_grad_sync == "all_reduce"):
        raise ValueError(
            f"defer_fsdp_grad_sync must be True, False or 'all_reduce', got {defer_fsdp_grad_sync!r}."
        )
    return _sync_ctx(model, is_optim_step, defer_fsdp_grad_sync)


@contextmanager
def _sync_ctx(model: nn.Module, is_optim_step: bool, defer: Deferral) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and not is_optim_step:
                stack.enter_context(module.no_sync())
        groups = fsdp2.groups_of(fsdp2.fsdp_units(model))
        stack.callback(fsdp2.set_flags, fsdp2.flags_of(groups, fsdp2.Reductions))
        for group in groups:
            group.reduce_grads = is_optim_step or defer is not True
            group.all_reduce_grads = is_optim_step or defer is False
            # The partial sums of a window live in one flat buffer: every micro-batch must fill the same
            # places of it, and the last one must take part even where the unit was not used in it.
            if defer == "all_reduce" and fsdp2.has_replicas(group):
                group.reduce_scatter_unused_params = True
            if is_optim_step:
                fsdp2.zero_missing_gradients(group)
        yield
        if not is_optim_step:
            return
        for root in fsdp_roots(model):
            units = fsdp2.fsdp_units(cast(nn.Module, root))
            fsdp2.reduce_deferred_gradients(root, fsdp2.groups_of(units))
