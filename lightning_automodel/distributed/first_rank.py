"""First-rank blocks: the first rank of each node runs a block before the others.

A failure reaches every rank. A block is meetings in the store, at its entry, when the first rank of a node has done
its work, and at the end, so no collective's timeout applies. Outside of a run its ranks have hearts meanwhile, so
that a rank that dies is noticed.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Literal, get_args

import torch.distributed as dist

from lightning_automodel.distributed import heart, join, meeting, process_group
from lightning_automodel.distributed.failures import RankFailure
from lightning_automodel.distributed.heart import Heart
from lightning_automodel.distributed.join import LINGER_S

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
        outer = _active[-1] if _active else _Block()
        inner = _Block(self._scope)
        with ExitStack() as stack:
            _active.append(inner)
            stack.callback(_active.remove, inner)
            if outer.group is None:
                stack.enter_context(self._open(inner))
            elif (self._group or dist.group.WORLD) is outer.group and self._scope == outer.scope:
                inner.group = outer.group
                inner.is_first = outer.is_first
            else:
                # Ranks that wait at the outer block's entry cannot take part in another order.
                members = dist.get_process_group_ranks(outer.group)
                raise ValueError(
                    "A FirstRankPerNode block cannot be inside a block of another group or scope, here of ranks"
                    f" {members} with scope={outer.scope!r}: leave that one first, or give both the same."
                )
            inner.ends = stack.pop_all()
        return inner.is_first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Report how the block ended, and wait until it has ended on all ranks, or one failed."""
        _active[-1].ends.__exit__(kind, error, traceback)

    @contextlib.contextmanager
    def _open(self, block: "_Block") -> Iterator[None]:
        """Context of a block that is in no other one, with a group that is made for it, where there is none."""
        makes_group = (
            self._group is None
            and not dist.is_initialized()
            and all(os.environ.get(name) for name in ENVIRONMENT)
            and join.number_in_environment("WORLD_SIZE", at_least=1) != 1
        )
        if makes_group:
            process_group.initialize_distributed("gloo", self._timeout)
        try:
            group = self._group or dist.group.WORLD
            if group is None or group.size() == 1:
                yield
            else:
                block.group = group
                with _in_order(block, group, self._timeout):
                    yield
        finally:
            if makes_group:
                process_group.destroy_global_state()


@dataclass(eq=False)
class _Block:
    """One use of :class:`FirstRankPerNode` on this rank."""

    scope: Scope = "node"
    group: dist.ProcessGroup | None = None  # None if there is nobody to wait for
    is_first: bool = True
    ends: ExitStack = field(default_factory=ExitStack)  # what is to be done when it ends


_active: list[_Block] = []
"""Blocks that this process is in, outermost first."""


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


def peers_of(rank: int, nodes: dict[int, str], scope: Scope) -> list[int]:
    """Ranks on the node of ``rank``, or all for scope ``"global"``: the lowest goes first. ``nodes`` are by rank."""
    return [other for other, node in nodes.items() if scope == "global" or node == nodes[rank]]


@contextlib.contextmanager
def _in_order(block: _Block, group: dist.ProcessGroup, timeout: timedelta) -> Iterator[None]:
    """Context in which this rank may run the block; what leaves it reaches the others. A collective of the group."""
    rank = dist.get_rank()
    dist.get_rank(group)  # raises if the group was destroyed
    members = dist.get_process_group_ranks(group)
    # Each member counts its blocks on this group. All enter the same blocks, so the numbers agree. The path
    # holds the lowest rank, since torch may give one name to groups that share no rank.
    number = process_group.next_number("blocks", group)
    path = f"first_rank/{group.group_name}.{min(members)}/{number}"
    store = dist.PrefixStore(path, process_group.connection(timeout))
    name = f"FirstRankPerNode(scope={block.scope!r})"
    with _heart(store, rank, members, name, timeout) as beating:
        try:
            limit_s = timeout.total_seconds()
            nodes = beating.meet(store, f"the entry to {name}", members, node_of(rank), limit_s)
            peers = peers_of(rank, dict(zip(members, nodes, strict=True)), block.scope)
            block.is_first = rank == min(peers)
            work = f"the work of rank {min(peers)} in {name}"
            if not block.is_first:
                beating.meet(store, work, peers, limit_s=LONGEST_WORK_S)
            yield
            if block.is_first:
                beating.meet(store, work, peers, limit_s=LONGEST_WORK_S)
            beating.meet(store, f"the end of {name}", members, limit_s=LONGEST_WORK_S)
        except BaseException as error:
            with contextlib.suppress(dist.DistError, OSError):
                meeting.post(store, RankFailure.from_exception(error, rank, name))
            raise
        finally:
            meeting.linger(store, "end", rank, members, LINGER_S)


@contextlib.contextmanager
def _heart(
    store: dist.Store, rank: int, members: list[int], name: str, timeout: timedelta
) -> Iterator[Heart]:
    """The heart of the run that this process is in, else one for the block."""
    running = heart.current()
    if running is not None:
        yield running
        return
    own = Heart(rank, members, store, timeout.total_seconds())
    own.record.where = name
    own.start()
    try:
        yield own
    finally:
        own.close()
