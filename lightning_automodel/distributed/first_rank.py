"""First-rank blocks: the first rank of each node runs a block before the others.

A failure reaches every rank. A block is three meetings in the store, so no collective's timeout applies: of all ranks
at its entry, of a node's ranks when its first one has done its work, and of all ranks at its end. Outside of a run
its ranks have hearts meanwhile, so that a rank that dies is noticed.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, get_args

import torch.distributed as dist

from lightning_automodel.distributed import heart, join, meeting, process_group
from lightning_automodel.distributed.failures import RankFailure
from lightning_automodel.distributed.heart import Heart
from lightning_automodel.distributed.store import STORE_ERRORS

Scope = Literal["node", "global"]

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LONGEST_WORK_S = 24 * 3600.0


class FirstRankPerNode(ContextDecorator):
    """Run a block on the first rank of each node, then on the node's other ranks, when the work is done.

    A context manager and a decorator. ``with ... as is_first`` tells whether this rank goes first. One
    object serves any number of blocks. All ranks of the group must enter the same blocks in the same order,
    from one thread; others take no part. It calls no collective.

    A block starts when all ranks have entered it, and ends when it has ended on all ranks. An exception
    leaves the block unchanged on the rank that raised it. Every other rank raises ``RankFailedError``: at
    the entry, without running the block, if it waits there, else at the exit. Blocks cannot be nested.

    Without a process group the block just runs. With ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` in the environment and more than one rank, a gloo group is made for the block and
    destroyed after it.

    Args:
        group: Group of the ranks that take part; None is the default group.
        scope: Who goes first: the lowest rank of the group on each ``"node"`` (for local disks), or the
            lowest rank of the group, ``"global"`` (for a shared file system).
        timeout: Within which all ranks must enter a block, and, outside of a run of the strategy, how long a
            rank that others wait for may miss heartbeats (in one, its ``heartbeat_timeout``): a
            ``timedelta`` or minutes. It does not limit the work, for which the others wait up to a day.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        scope: Scope = "node",
        timeout: timedelta | float = timedelta(minutes=30),
    ) -> None:
        if scope not in get_args(Scope):
            raise ValueError(f"scope must be 'node' or 'global', got {scope!r}.")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group must be None or a ProcessGroup that this rank is in, got {group!r}.")
        self._group = group
        self._scope = scope
        self._timeout = process_group.parse_timeout(timeout)

    def __enter__(self) -> bool:
        """Wait until this rank may run the block, and return whether it goes first.

        Raises:
            RankFailedError: If another rank failed, did not join, or was silent, or the store was lost.
            RuntimeError: In another block.
        """
        block = self._enter()
        is_first = block.__enter__()
        self._block = block  # now: another block within this one raises
        return is_first

    def __exit__(self, *raised: Any) -> None:
        """Report how the block ended, and wait until it has ended on all ranks, or one failed."""
        self._block.__exit__(*raised)

    @contextmanager
    def _enter(self) -> Iterator[bool]:
        """Context of a block, in a group that is made where the environment tells of one."""
        with ExitStack() as at_end:
            is_told_of_ranks = all(os.environ.get(name) for name in ENVIRONMENT)
            can_join = self._group is None and not dist.is_initialized() and is_told_of_ranks
            if can_join and process_group.get_world_size_safe() > 1:
                process_group.initialize_distributed("gloo", self._timeout)
                at_end.callback(process_group.destroy_global_state)
            group = self._group or dist.group.WORLD
            if group is None or group.size() == 1:
                yield True
            else:
                yield from self._meetings(group, at_end)

    def _meetings(self, group: dist.ProcessGroup, at_end: ExitStack) -> Iterator[bool]:
        """Wait for all others, and for the first rank's work; yield whether this rank goes first; wait for all again.

        A collective of the group, through the store.
        """
        dist.get_rank(group)  # raises if the group was destroyed
        rank = dist.get_rank()
        timeout_s = self._timeout.total_seconds()
        members = dist.get_process_group_ranks(group)
        running = heart.current()
        if running is not None and running.is_in_block:
            raise RuntimeError(
                "A FirstRankPerNode block cannot be inside another one: leave that one first. With"
                " first_rank_setup=True, `setup` hooks are in one already, and need none of their own."
            )
        # Each member counts its blocks on groups of this name. All enter the same blocks, so the numbers agree. The
        # path holds the lowest rank, since torch may give one name to groups that share no rank.
        path = f"{group.group_name}.{min(members)}"
        path += f"/{process_group.next_number(path)}"
        name = f"FirstRankPerNode(scope={self._scope!r})"
        if running is None:
            store = dist.PrefixStore(f"first_rank/{path}", process_group.connection(self._timeout))
            running = Heart(rank, members, store, timeout_s)
            running.record.where = name
            running.start()
            at_end.callback(running.close)
        running.is_in_block = True
        at_end.callback(setattr, running, "is_in_block", False)
        try:
            entry = f"the entry to {name} {path}"
            own = node_of(rank)
            nodes = zip(members, running.meet(entry, members, own, timeout_s), strict=True)
            peers = [member for member, node in nodes if self._scope == "global" or node == own]
            first = min(peers)
            after_work = f"the work of rank {first} in {name} {path}"
            if rank != first:
                running.meet(after_work, peers, None, LONGEST_WORK_S)
            yield rank == first
            if rank == first:
                running.meet(after_work, peers, None, LONGEST_WORK_S)
            running.meet(f"the end of {name} {path}", members, None, LONGEST_WORK_S)
        except BaseException as error:
            with suppress(*STORE_ERRORS):
                meeting.post(running.store, RankFailure.from_exception(error, rank, name))
            raise


def node_of(rank: int) -> str:
    """Name of this process's node: its host, and the rank of its first process."""
    name = socket.gethostname()
    local_rank = join.number_in_environment("LOCAL_RANK")
    if local_rank is not None:  # ranks of a node are consecutive
        name += f" from rank {rank - local_rank}"
    return name
