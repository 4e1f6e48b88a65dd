"""Estimates of the memory that deferred gradients and retained unsharded parameters need."""

from pathlib import Path

import torch
from torch import nn

from lightning_automodel import torch_internals

FREE_MEMORY_SHARE = 0.5
"""Part of the free memory that the estimate may fill; activations need the rest."""


def estimate(model: nn.Module, defers_gradients: bool) -> dict[str, int]:
    """Bytes that one rank needs in addition to its shards, while a window runs. Not a collective.

    ``unsharded_parameters``: all units at once, instead of one at a time. ``sharded_state``: gradient shards and two
    optimizer moments, which are not allocated yet at set-up.
    """
    unsharded = gradients = state = 0
    for group in torch_internals.fsdp_param_groups(model):
        for param in group.fsdp_params:
            numel = torch_internals.unsharded_numel(param)
            unsharded += numel * (param.param_dtype or param.orig_dtype).itemsize
            if defers_gradients and param.sharded_param.requires_grad:
                gradients += numel * torch_internals.unsharded_gradient_dtype(param).itemsize
    for parameter in model.parameters():
        if parameter.requires_grad:
            local = torch_internals.local_tensor(parameter)
            moments = 2 * max(local.element_size(), torch.float32.itemsize)
            state += local.numel() * (local.element_size() + moments)
    return {"unsharded_parameters": unsharded, "deferred_gradients": gradients, "sharded_state": state}


def free_bytes(device: torch.device, local_ranks: int) -> int | None:
    """Bytes that this rank may still allocate on ``device``; on CPU its share of the host's. None if unknown."""
    if device.type != "cpu":
        try:
            free, _ = torch.accelerator.get_memory_info(device)
            return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        except (RuntimeError, ValueError):  # a backend that keeps no such figures, or is not the current one
            return None
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    # The smaller of what the kernel calls available and what the control group leaves.
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and usage.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(usage.read_text()))
    return free // max(local_ranks, 1)
