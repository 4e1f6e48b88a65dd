"""First-rank blocks: the first rank of each node runs a block before the others.

A failure reaches every rank. A block is two meetings in the store, at its entry and at its end, so no collective's
timeout applies. Outside of a run its ranks have hearts of their own meanwhile, so that a rank that dies is noticed.
"""

import contextlib
import os
import socket
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, get_args

import torch.distributed as dist

from lightning_automodel.distributed import heart, join, meeting, process_group
from lightning_automodel.distributed.failures import RankFailedError, RankFailure
from lightning_automodel.distributed.heart import Heart, ended
from lightning_automodel.distributed.join import LINGER_S
from lightning_automodel.distributed.last_resort import end_process

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
    the entry, without running the block, if it waits there, else at the exit. A block inside another one of
    the same group and scope is a part of it, and waits for no rank.

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
            ValueError: If the block around this one has another group or scope.
        """
        outer = next((block for block in _active if block is not None), None)
        if outer is None:
            block = self._open()
        elif (self._group or dist.group.WORLD) is outer.group and self._scope == outer.scope:
            block = None
        else:
            # Ranks that wait at the outer block's entry cannot take part in another order.
            raise ValueError(
                "A FirstRankPerNode block cannot be inside a block of another group or scope, here of ranks"
                f" {outer.members} with scope={outer.scope!r}: leave that one first, or give both the same."
            )
        _active.append(block)
        if block is None:
            return outer is None or outer.is_first
        try:
            return block.enter()
        except BaseException as error:
            _active.pop()
            block.end(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Report how the block ended, and wait until it has ended on all ranks, or one failed."""
        block = _active.pop()
        if block is not None:
            block.leave(error)

    def _open(self) -> "_Block | None":
        """The block to enter; None if there is nobody to wait for."""
        makes_group = (
            self._group is None
            and not dist.is_initialized()
            and all(os.environ.get(name) for name in ENVIRONMENT)
            and join.number_in_environment("WORLD_SIZE", at_least=1) != 1
        )
        if makes_group:
            process_group.initialize_distributed("gloo", self._timeout)
        group = self._group or dist.group.WORLD
        if group is None or group.size() == 1:
            return None
        return _Block(group, self._scope, self._timeout, makes_group)


_num_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_active: "list[_Block | None]" = []
"""Blocks that this process is in, outermost first; None for a part of another one."""


def is_active() -> bool:
    """Whether this process is in a block, where a rank may wait for longer than a collective."""
    return bool(_active)


def node_of(rank: int) -> str:
    """Name of this process's node: its host, and the rank of its first process."""
    name = socket.gethostname()
    local_rank = join.number_in_environment("LOCAL_RANK")
    if local_rank is not None:  # ranks of a node are consecutive
        name += f" from rank {rank - local_rank}"
    return name


def first_rank(rank: int, nodes: dict[int, str], scope: Scope) -> int:
    """The lowest rank on the node of ``rank``, or of all ranks for scope ``"global"``; ``nodes`` by rank."""
    return min(other for other, node in nodes.items() if scope == "global" or node == nodes[rank])


class _Block:
    """One use of :class:`FirstRankPerNode` on this rank; ``members`` are ranks of the default group."""

    def __init__(self, group: dist.ProcessGroup, scope: Scope, timeout: timedelta, made_group: bool) -> None:
        dist.get_rank(group)  # raises if the group was destroyed
        self.group = group
        self.members = dist.get_process_group_ranks(group)
        self.scope = scope
        self.is_first = False
        self._rank = dist.get_rank()
        self._timeout_s = timeout.total_seconds()
        self._made_group = made_group
        self._at = f"FirstRankPerNode(scope={scope!r})"
        # Each member counts its blocks on this group. All enter the same blocks, so the numbers agree. The
        # path holds the lowest rank, since torch may give one name to groups that share no rank.
        _num_blocks[group] = _num_blocks.get(group, 0) + 1
        path = f"first_rank/{group.group_name}.{min(self.members)}/{_num_blocks[group]}"
        self._store = dist.PrefixStore(path, process_group.connection(timeout))
        self._own_heart: Heart | None = None
        running = heart.current()
        if running is None:
            where = {"where": self._at}
            running = Heart(
                self._rank, self.members, self._store, self._timeout_s, lambda: where, self._end_if_lost
            )
            self._own_heart = running
            running.start()
        self._heart = running

    def enter(self) -> bool:
        """Wait until all ranks have come, and until the first one has left the block, unless this is it."""
        nodes = self._meet("the entry to", node_of(self._rank), self._timeout_s)
        first = first_rank(self._rank, dict(zip(self.members, nodes, strict=True)), self.scope)
        self.is_first = self._rank == first
        if not self.is_first:
            at = f"the end of {self._at}"
            key = f"{at}/{first}"
            self._wait(partial(meeting.wait, self._store, at, key, self._rank, [first], LONGEST_WORK_S))
        return self.is_first

    def leave(self, error: BaseException | None) -> None:
        """Wait until the block has ended on all ranks, unless it has ended with an ``error`` here; end it."""
        try:
            if error is None:
                self._meet("the end of", None, LONGEST_WORK_S)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Report how the block ended here, and free what was made for it. Rank 0, the store's host, waits."""
        try:
            if error is not None:
                with contextlib.suppress(dist.DistError, OSError):
                    meeting.post(self._store, RankFailure.from_exception(error, self._rank, self._at))
            meeting.linger(self._store, "end", self._rank, len(self.members), LINGER_S)
        finally:
            if self._own_heart is not None:
                self._own_heart.close()
            if self._made_group:
                process_group.destroy_global_state()

    def _meet(self, where: str, value: str | None, limit_s: float) -> list[Any]:
        at = f"{where} {self._at}"
        met: list[Any] = self._wait(
            partial(meeting.meet, self._store, at, self._rank, self.members, value, limit_s)
        )
        return met

    def _wait(self, wait: Callable[..., Any]) -> Any:
        """Wait as ``wait`` does, for as long as neither the run nor the store is lost."""
        try:
            return wait(check=self._heart.raise_failure, records=self._heart.store)
        except (dist.DistError, OSError) as error:
            raise RankFailedError(self._heart.lose_store(ended(error))) from error

    def _end_if_lost(self, failure: RankFailure) -> None:
        """Outside of a run, the main thread asks for failures; it cannot if the store's host is stopped."""
        if self._own_heart is not None and self._own_heart.is_stuck:
            end_process(self._rank, str(failure))
