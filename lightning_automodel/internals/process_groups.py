"""Private names of torch's process groups and device meshes."""

import functools
import sys
import threading
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute, debug

broadcast_coalesced: Any = dist._broadcast_coalesced
"""``(group, tensors, num_bytes)``: overwrites tensors with those of the group's first rank, in buckets of that size."""

_aborting = threading.Lock()


def forget_meshes() -> None:
    """Clear DTensor's caches of sharding decisions, which keep every mesh alive that was ever used.

    A mesh holds its groups, and a group that is held keeps its threads and connections, destroyed or not. A
    later mesh over a new default group may equal an old one, and would get the old groups from the caches.
    """
    for cache in _caches("torch.distributed"):
        cache.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    debug._clear_sharding_prop_cache()


def _caches(package: str) -> list[Any]:
    """Each ``lru_cache`` of a function or method in the modules of ``package`` that are loaded."""
    cache_type = type(functools.lru_cache(_caches))
    modules = [module for name, module in sys.modules.copy().items() if name.startswith(package)]
    # Each once: modules import them from each other.
    values = {id(value): value for module in modules for value in vars(module).values()}.values()
    # Not isinstance: it reads __class__ of proxies, some of which then warn that they are deprecated.
    classes = [value for value in values if issubclass(type(value), type)]
    methods = [getattr(method, "__func__", method) for cls in classes for method in vars(cls).values()]
    return [value for value in (*values, *methods) if type(value) is cache_type]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten ``mesh`` into one dimension called ``name``. A collective over the world if it makes a new group."""
    return mesh._flatten(name)


def make_group(partition: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of a ``partition`` of the world. A collective over the world, unless parts have one rank.

    The group of all ranks is the default group: another communicator would take device memory, and time to connect.
    """
    if len(partition) == 1:
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if len(partition[0]) == 1:
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)
    own, _ = dist.new_subgroups_by_enumeration(partition)
    return cast(dist.ProcessGroup, own)


def accelerator_backends() -> list[Any]:
    """Backends of the accelerator in all groups of this process, in the order in which they were made.

    Their collectives are queued and return: they neither block the host nor raise. A rank whose peer is gone waits
    where its host reads from the device. Groups of gloo are left out: its collectives block and raise, whatever the
    device. Nothing public lists the groups, or returns the backend of a device.
    """
    device = torch.accelerator.current_accelerator()
    if device is None or not dist.is_initialized():
        return []
    found = []
    for group in list(dist.distributed_c10d._world.pg_names):
        with suppress(RuntimeError):  # a group of hosts
            backend = group._get_backend(device)
            if backend.name().lower() != dist.Backend.GLOO:
                found.append(backend)
    return found


def abort_accelerators() -> None:
    """Free this rank's device and host from collectives, for good; groups of the host stay. Not a collective.

    It may wait for the group's timeout: call it where something else ends the process before. If two threads call it,
    the second one waits for the first. NCCL's groups are aborted as one, since they could wait for each other; torch's
    own function does so too, but would also drop the host's.
    """
    with _aborting:
        backends = accelerator_backends()[::-1]
        first = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
        if first is not None:
            first._group_start()
        try:
            for backend in backends:
                with suppress(Exception):  # one that is gone already, or cannot be aborted
                    backend.abort()
        finally:
            if first is not None:
                first._group_end()


def abort_process_groups() -> None:
    """Leave all groups as ``destroy_process_group`` does, without waiting for what they have queued."""
    dist.distributed_c10d._abort_process_group()
