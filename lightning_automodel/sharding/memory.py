"""What a window may keep unsharded, gradients and parameters: what fits into half of the free memory of every rank."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.torch import local_tensor
from lightning_automodel.options import StrategyOptions

FREE_MEMORY_SHARE = 0.5
"""Part of the free memory that the estimate may fill; activations need the rest."""

PARAMETERS = "unsharded_parameters"
GRADIENTS = "deferred_gradients"
STATE = "sharded_state"

_DEFER = "defer_fsdp_grad_sync"
_RESHARD = "reshard_during_accumulation"


def choose(
    parameters: Iterable[nn.Parameter], is_automatic: bool, placement: Placement, options: StrategyOptions
) -> dict[str, Any]:
    """Decide ``defer_fsdp_grad_sync`` and ``reshard_during_accumulation`` for ``describe()``.

    ``parameters`` are those of the sharded module, and ``is_automatic`` tells how it is optimized.
    It says why, unless they are what was given. Gradients come first: parameters are kept gathered during a
    window if they fit beside them. A collective over the world: the rank that is short of memory decides for all.
    """
    needed = estimate(parameters, placement.device)
    spare = spare_bytes(needed, placement)
    defer = options.defer_fsdp_grad_sync
    reshard = options.reshard_during_accumulation
    reasons = {}
    if reshard is False:
        spare -= needed[PARAMETERS]
    if placement.mesh.sizes.divisor == 1:
        # Deferral would save nothing and only keep gradients out of ``.grad``.
        defer = False
        reasons[f"{_DEFER}_reason"] = "one rank reduces nothing"
    elif defer == "auto":
        defer = needed[GRADIENTS] <= spare
        reasons[f"{_DEFER}_reason"] = _reason(needed[GRADIENTS], spare)
    if defer is not True:
        needed[GRADIENTS] = 0
    spare -= needed[GRADIENTS]
    if reshard == "auto" and is_automatic:
        reshard = needed[PARAMETERS] > spare
        reasons[f"{_RESHARD}_reason"] = _reason(needed[PARAMETERS], spare)
    elif reshard == "auto":
        reshard = True
        reasons[f"{_RESHARD}_reason"] = "auto: manual optimization may step between two forwards of a step"
    return {_DEFER: defer, _RESHARD: reshard, "estimated_extra_bytes": needed, **reasons}


def _reason(needed: int, spare: int) -> str:
    return (
        f"auto: an estimated {needed / 2**20:,.0f} MiB {'fits into' if needed <= spare else 'exceeds'} what"
        f" {FREE_MEMORY_SHARE:.0%} of the free memory of the rank with least leaves beside its optimizer"
        f" state, and what else is kept ({spare / 2**20:,.0f} MiB)"
    )


def spare_bytes(needed: dict[str, int], placement: Placement) -> int:
    """What the rank with least may keep unsharded in half of its free memory, beside its own optimizer state.

    A collective over the world, on the hosts.
    """
    free = free_bytes(placement.device, placement.local_ranks)
    spare = int(free * FREE_MEMORY_SHARE) - needed[STATE]
    return min(collectives.gather_objects(spare, placement.host_group))


def estimate(parameters: Iterable[nn.Parameter], device: torch.device) -> dict[str, int]:
    """Bytes of ``device`` that a window may need on one rank in addition to its shards. Not a collective.

    ``unsharded_parameters``: all units at once, instead of one at a time. ``deferred_gradients``: the same
    of what is trained, in the dtype that gradients are reduced in. ``sharded_state``, which alone differs by
    rank: gradient shards and two optimizer moments, which are not allocated yet at set-up; under CPU offload
    they are not on the device.
    """
    unsharded = gradients = state = 0
    for parameter in parameters:
        param = getattr(parameter, "fsdp_param", None)
        local = local_tensor(parameter)
        is_trained = parameter.requires_grad
        if param is not None:
            numel = fsdp2.unsharded_numel(param)
            unsharded += numel * (param.param_dtype or param.orig_dtype).itemsize
            if is_trained:
                gradients += numel * fsdp2.unsharded_gradient_dtype(param).itemsize
        if is_trained and local.device.type == device.type:
            moments = 2 * max(local.element_size(), torch.float32.itemsize)
            state += local.numel() * (local.element_size() + moments)
    return {PARAMETERS: unsharded, GRADIENTS: gradients, STATE: state}


def free_bytes(device: torch.device, local_ranks: int) -> int:
    """Bytes that this rank may still allocate on ``device``, 0 if that is unknown.

    On a CPU, the rank's share of the machine's memory, whatever other processes use.
    """
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (RuntimeError, ValueError):  # a backend that keeps no such figures, or is not the current one
        return 0
