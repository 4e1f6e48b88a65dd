"""Groups of accelerators. Their collectives are queued and return: they neither block the host nor raise.

A rank whose peer is gone waits where its host reads from the device, until the group's timeout ends its
process. Only an abort frees it before.
"""

import threading

from lightning_automodel.internals import process_groups

_aborting = threading.Lock()


def exist() -> bool:
    """Whether this process is in such a group. Not a collective, nor is the other. It looks at every group."""
    return bool(process_groups.accelerator_backends())


def abort() -> None:
    """Free this rank's device and host from all collectives, for good; groups of the host stay as they are.

    It may wait for as long as a collective: call it where something else ends the process after less. Safe
    to call twice, and from two threads: the second one waits for the first.
    """
    with _aborting:
        process_groups.abort_backends(process_groups.accelerator_backends()[::-1])
