"""Private names of torch's process groups and device meshes."""

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute

from lightning_automodel.internals import release_probe


def forget_meshes() -> None:
    """Clear DTensor's caches of sharding decisions, which keep every mesh alive that was ever used.

    A mesh holds its groups, and a group that is held keeps its threads and connections, destroyed or not. A
    later mesh over a new default group may equal an old one, and would get the old groups from the caches.
    """
    of_modules = _caches(_module_and_class_attributes("torch.distributed"))
    # Before the first computation with a DTensor, these are empty: there is no mesh to search the whole
    # process for.
    if any(cache.cache_info().currsize for cache in of_modules):
        # The garbage collector lists caches that instances hold, but none from before a gc.freeze().
        for cache in (*of_modules, *_caches(gc.get_objects())):
            cache.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()


def _caches(objects: Iterable[Any]) -> list[Any]:
    cache_type = type(functools.lru_cache(_caches))
    # Not isinstance: it reads __class__ of proxies, some of which then warn that they are deprecated.
    return [
        o for o in objects if type(o) is cache_type and str(o.__module__).startswith("torch.distributed")
    ]


def _module_and_class_attributes(package: str) -> Iterator[Any]:
    for name, module in sys.modules.copy().items():
        for value in list(vars(module).values()) if name.startswith(package) else []:
            yield value
            if issubclass(type(value), type):
                yield from (
                    getattr(attribute, "__func__", attribute) for attribute in list(vars(value).values())
                )


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten ``mesh`` into one dimension called ``name``. A collective over the world if it makes a new group."""
    return mesh._flatten(name)


def make_group(partition: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of a ``partition`` of the world. A collective over the world, unless its parts have one rank.

    A group of one rank connects to nothing before it is used.
    """
    assert dist.group.WORLD is not None
    if len(partition[0]) == 1:
        with unbound():
            return dist.new_group([dist.get_rank()], use_local_synchronization=True)
    if dist.group.WORLD.bound_device_id is not None:
        own = dist.split_group(split_ranks=partition)  # connects all parts at once
    else:
        own, _ = dist.new_subgroups_by_enumeration(partition)
    return cast(dist.ProcessGroup, own)


@contextmanager
def unbound() -> Iterator[None]:
    """Context in which new groups do not inherit the device that the default group is bound to, nor connect at once."""
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def accelerator_backends() -> dict[str, Any]:
    """Backends of accelerators in all groups of this process, by a name that each rank of the group has for it.

    Nothing public lists the groups, or returns the backend of a device. Those of gloo are left out: its
    collectives block and raise, whatever the device.
    """
    found = {}
    for group in list(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else []:
        for device in group._device_types:
            backend = group._get_backend(device)
            if device.type != "cpu" and backend.name().lower() != dist.Backend.GLOO:
                # Groups that share no rank may have one name.
                lowest_rank = min(dist.get_process_group_ranks(group))
                found[f"{group.group_name} of rank {lowest_rank}"] = backend
    return found


def group_names() -> tuple[str, ...]:
    """Names of all groups of this process, in the order in which they were made; cheap enough for each step."""
    return tuple(dist.distributed_c10d._world.pg_names.values())


def num_queued(backend: Any) -> int:
    """Collectives that this rank has queued; the group's own method raises for backends of others."""
    return int(backend._get_sequence_number_for_group())


def abort_backends(backends: Iterable[Any]) -> None:
    """Free this rank's device and host from collectives that others will not join. May wait for the group's timeout.

    As in torch's own function for all groups, which would also drop those of the host, NCCL's are aborted as
    one: each by itself, they could wait for each other.
    """
    backends = list(backends)
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


def flight_records() -> bytes:
    """The newest collectives of this rank, as ``torchfrtrace`` reads them. Waits for no device."""
    c10d: Any = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) or c10d._dump_fr_trace
    return cast(bytes, dump())


def _probe() -> None:
    """Check at import the private names that the functions above use on public classes and modules."""
    check = partial(release_probe.check, "torch")
    check(_redistribute, "clear_redistribute_planner_cache")
    check(torch._C, "_clear_DTensor_sharding_propagator_cache")
    check(DeviceMesh, "_flatten")
    check(dist.distributed_c10d, "_world", "_abort_process_group")
    check(dist.ProcessGroup, "_device_types", "_get_backend")
    check(torch._C._distributed_c10d.Backend, "_get_sequence_number_for_group")
    check(torch._C._distributed_c10d, "_dump_fr_trace")


_probe()
