"""Estimating what deferral and parameters retained unsharded cost, and whether it fits."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_automodel import torch_internals

FREE_MEMORY_SHARE = 0.5
"""Part of the free memory that unsharded parameters, unreduced gradients and optimizer state may fill; activations need
the rest."""

_OPTIMIZER_MOMENTS = 2  # in the parameter's dtype, or float32 for narrower ones


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank needs beside its shards, while a window runs.

    Attributes:
        unsharded_parameters: All units unsharded at once, instead of one at a time.
        deferred_gradients: Unsharded gradients that wait for the last micro-batch.
        sharded_state: Gradient shards and two optimizer moments, which are not allocated yet at set-up.
    """

    unsharded_parameters: int
    deferred_gradients: int
    sharded_state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.unsharded_parameters + self.deferred_gradients + self.sharded_state


def estimate(model: nn.Module, defers_gradients: bool) -> MemoryEstimate:
    """Estimate for a model that FSDP2 has sharded and unsharded once. Not a collective."""
    unsharded = gradients = state = 0
    for group in torch_internals.fsdp_param_groups(model):
        for param in group.fsdp_params:
            whole = torch_internals.local_tensor(param.unsharded_param)
            unsharded += whole.numel() * whole.element_size()
            if defers_gradients and param.sharded_param.requires_grad:
                gradients += whole.numel() * torch_internals.unsharded_gradient_dtype(param).itemsize
    for parameter in model.parameters():
        if parameter.requires_grad:
            local = torch_internals.local_tensor(parameter)
            moments = _OPTIMIZER_MOMENTS * max(local.element_size(), torch.float32.itemsize)
            state += local.numel() * (local.element_size() + moments)
    return MemoryEstimate(unsharded_parameters=unsharded, deferred_gradients=gradients, sharded_state=state)


def free_bytes(device: torch.device, local_ranks: int) -> int | None:
    """Memory that this rank may still take on ``device``: its share of the host's, on the CPU. None where unknown."""
    if device.type == "cpu":
        host = _free_host_bytes()
        return None if host is None else host // max(local_ranks, 1)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None


def _free_host_bytes() -> int | None:
    """The smaller of what the kernel calls available and what the control group leaves."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and usage.exists() and limit.read_text().strip().isdigit():
        limits.append(int(limit.read_text()) - int(usage.read_text()))
    return min(limits) if limits else None
