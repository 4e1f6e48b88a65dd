"""The key-value store of a process group: where it is, another connection to it, and how often ranks ask it."""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

RANKS_PER_SECOND = 1000
SHORTEST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.25
STORE_ERRORS = dist.DistError, OSError
"""What calls to a store raise if its host is gone."""


def pause_s(waited_s: float, num_ranks: int) -> float:
    """Seconds until the store is asked again: longer as a wait takes longer, and as more ranks wait."""
    share_s = num_ranks / RANKS_PER_SECOND
    return max(SHORTEST_PAUSE_S, share_s / 4, min(max(LONGEST_PAUSE_S, share_s), waited_s / 10))


def launcher_hosts_store() -> bool:
    """Whether ``torchrun`` keeps the store at MASTER_ADDR and MASTER_PORT, so that no rank has to."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def without_prefixes(store: dist.Store) -> dist.Store:
    """The store below all of its ``PrefixStore`` wrappers."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def another_connection(store: dist.Store, timeout: timedelta) -> dist.Store:
    """Another connection to ``store``, with its prefixes: one in which a thread waits serves no other thread.

    Raises at once if the store's host is gone.
    """
    innermost = without_prefixes(store)
    if isinstance(innermost, dist.TCPStore):
        # A client would retry for longer than the timeout.
        socket.create_connection((innermost.host, innermost.port), timeout=timeout.total_seconds()).close()
    connection: dist.Store = store.clone()  # type: ignore[attr-defined]
    connection.set_timeout(timeout)
    return connection
