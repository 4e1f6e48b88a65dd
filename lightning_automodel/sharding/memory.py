"""What a window may keep unsharded, gradients and parameters: decided by one estimate of the memory that they need."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_automodel.internals import fsdp2
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.sharding.sync_context import Deferral

FREE_MEMORY_SHARE = 0.5
"""Part of the free memory that the estimate may fill; activations need the rest."""

PARAMETERS = "unsharded_parameters"
GRADIENTS = "deferred_gradients"
STATE = "sharded_state"


@dataclass(frozen=True)
class Choice:
    """What a window keeps unsharded, and why."""

    defer: Deferral
    defer_reason: str
    keep: bool
    keep_reason: str


def choose(
    defer: Deferral | Literal["auto"],
    keep: bool | Literal["auto"],
    needed: dict[str, int],
    free: int | None,
    defer_reason: str | None = None,
    keep_reason: str | None = None,
) -> Choice:
    """Decide what is ``"auto"``: whether gradients are deferred, and parameters kept gathered, during a window.

    Both come out of one estimate. Gradients come first: parameters are kept if they fit as well. ``needed``
    (:func:`estimate`) and ``free`` must be the same on all ranks (:func:`agree`), so that these decide
    alike. A reason is that of what the caller has decided; without one, the option is.
    """
    defer_reason = defer_reason or f"defer_fsdp_grad_sync={defer!r}"
    keep_reason = keep_reason or f"reshard_during_accumulation={not keep}"
    if defer == "auto":
        others = needed[STATE] + (needed[PARAMETERS] if keep is True else 0)
        defer, defer_reason = _compare(others + needed[GRADIENTS], free)
    if keep == "auto":
        others = needed[STATE] + (needed[GRADIENTS] if defer is True else 0)
        keep, keep_reason = _compare(others + needed[PARAMETERS], free)
    return Choice(defer, defer_reason, keep, keep_reason)


def _compare(needed: int, free: int | None) -> tuple[bool, str]:
    """Whether so many bytes fit on every rank, and why."""
    mebibyte = 2**20
    if free is None:
        return (
            False,
            f"auto: an estimated {needed / mebibyte:,.0f} MiB, and unknown free memory on some rank",
        )
    budget = int(free * FREE_MEMORY_SHARE)
    fits = needed <= budget
    return fits, (
        f"auto: an estimated {needed / mebibyte:,.0f} MiB {'fits into' if fits else 'exceeds'}"
        f" {FREE_MEMORY_SHARE:.0%} of the free memory of {'every' if fits else 'some'} rank"
        f" ({budget / mebibyte:,.0f} MiB)"
    )


def agree(
    needed: dict[str, int], free: int | None, device: torch.device, groups: Iterable[dist.ProcessGroup]
) -> tuple[dict[str, int], int | None]:
    """The largest need and the smallest free memory of all ranks; None if it is unknown on one of them.

    A collective over each of the ``groups``, which together span the world.
    """
    least = torch.tensor([-1 if free is None else free, *(-size for size in needed.values())], device=device)
    for group in groups:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    agreed, *sizes = least.tolist()
    most = {name: -size for name, size in zip(needed, sizes, strict=True)}
    return most, None if agreed < 0 else agreed


def estimate(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Bytes of ``device`` that a window may need on one rank in addition to its shards. Not a collective.

    ``unsharded_parameters``: all units at once, instead of one at a time. ``deferred_gradients``: the same
    of what is trained, in the dtype that gradients are reduced in. ``sharded_state``: gradient shards and
    two optimizer moments, which are not allocated yet at set-up; under CPU offload they are not on the
    device.
    """
    unsharded = gradients = state = 0
    for group in fsdp2.fsdp_param_groups(model):
        for param in group.fsdp_params:
            numel = fsdp2.unsharded_numel(param)
            unsharded += numel * (param.param_dtype or param.orig_dtype).itemsize
            if param.sharded_param.requires_grad:
                gradients += numel * fsdp2.unsharded_gradient_dtype(param).itemsize
    for parameter in model.parameters():
        local = torch_internals.local_tensor(parameter)
        if parameter.requires_grad and local.device.type == device.type:
            moments = 2 * max(local.element_size(), torch.float32.itemsize)
            state += local.numel() * (local.element_size() + moments)
    return {PARAMETERS: unsharded, GRADIENTS: gradients, STATE: state}


def free_bytes(device: torch.device, local_ranks: int) -> int | None:
    """Bytes that this rank may still allocate on ``device``; on CPU its share of the host's. None if unknown."""
    if device.type != "cpu":
        try:
            free, _ = torch.accelerator.get_memory_info(device)
            return (
                free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
            )
        except (RuntimeError, ValueError):  # a backend that keeps no such figures, or is not the current one
            return None
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    # The smaller of what the kernel calls available and what the control group leaves.
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    usage = Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and usage.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(usage.read_text()))
    return max(free, 0) // max(local_ranks, 1)
