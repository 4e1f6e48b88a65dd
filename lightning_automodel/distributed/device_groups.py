"""Groups of accelerators. Their collectives are queued and return: they neither block the host nor raise.

A rank whose peer is gone waits where its host reads from the device, until the group's timeout ends its
process. Only an abort frees it before.
"""

import threading
import weakref

import torch.distributed as dist

from lightning_automodel.internals import process_groups

_aborting = threading.Lock()
_looked_at: tuple[weakref.ref[dist.ProcessGroup], tuple[str, ...], bool] | None = None


def exist() -> bool:
    """Whether this process is in such a group. Not a collective, nor are the others."""
    global _looked_at
    world = dist.group.WORLD
    if world is None:
        return False
    known = _looked_at
    names = process_groups.group_names()
    # This is asked in each step, and listing all backends takes longer than anything else there. A reference
    # to them would keep their connections.
    if known is None or known[0]() is not world or known[1] != names:
        known = weakref.ref(world), names, bool(process_groups.accelerator_backends())
        _looked_at = known
    return known[2]


def num_queued() -> dict[str, int]:
    """How many collectives this rank has queued, by group; nothing of backends that do not count them.

    A group has the same name on all of its ranks.
    """
    counted = {}
    for name, backend in process_groups.accelerator_backends().items():
        try:
            counted[name] = process_groups.num_queued(backend)
        except RuntimeError:
            continue
    return counted


def abort() -> None:
    """Free this rank's device and host from all collectives, for good; groups of the host stay as they are.

    It may wait for as long as a collective: call it where something else ends the process after less. Safe
    to call twice, and from two threads: the second one waits for the first.
    """
    with _aborting:
        process_groups.abort_backends(list(process_groups.accelerator_backends().values())[::-1])
