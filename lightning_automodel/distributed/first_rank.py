"""First-rank blocks: the first rank of each node runs a block before the others.

A failure reaches every rank. A block is three meetings in the store, so no collective's timeout applies: of all ranks
at its entry, of a node's ranks when its first one has done its work, and of all ranks at its end. Outside of a run
its ranks have hearts meanwhile, so that a rank that dies is noticed.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack
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
        outer = _active[-1] if _active else None
        if outer is None or outer.group is None:
            block = Block(self._group, self._scope, self._timeout)
            block.begin()
        elif (self._group or dist.group.WORLD) is outer.group and self._scope == outer.scope:
            block = outer
            _active.append(block)
        else:
            # Ranks that wait at the outer block's entry cannot take part in another order.
            members = dist.get_process_group_ranks(outer.group)
            raise ValueError(
                "A FirstRankPerNode block cannot be inside a block of another group or scope, here of ranks"
                f" {members} with scope={outer.scope!r}: leave that one first, or give both the same."
            )
        return block.is_first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Report how the block ended, and wait until it has ended on all ranks, or one failed."""
        block = _active[-1]
        if _active.count(block) > 1:  # the block around this one goes on
            _active.pop()
        else:
            block.end(error)


class Block:
    """One use of :class:`FirstRankPerNode` on this rank, from :meth:`begin` to :meth:`end`.

    Attributes:
        scope: Who goes first.
        group: Of the ranks that take part; None, once the block has begun, if there is nobody to wait for.
        is_first: Whether this rank goes first.
        members: The ranks that take part, as ranks of the default group.
        peers: Those that wait for the same first rank as this one.
        store: With a prefix that this block has alone.
        heart: That of the run that this process is in, else one for the block.
    """

    members: list[int]
    peers: list[int]
    store: dist.Store
    heart: Heart

    def __init__(self, group: dist.ProcessGroup | None, scope: Scope, timeout: timedelta) -> None:
        self.scope = scope
        self.group = group
        self.is_first = True
        self._timeout = timeout
        self._name = f"FirstRankPerNode(scope={scope!r})"
        self._at_end = ExitStack()

    def begin(self) -> None:
        """Wait until this rank may run the block; raises as :meth:`FirstRankPerNode.__enter__`."""
        with ExitStack() as at_end:
            _active.append(self)
            at_end.callback(_active.remove, self)
            if self._finds_others(at_end):
                self._enter(at_end)
            self._at_end = at_end.pop_all()

    def end(self, error: BaseException | None = None) -> None:
        """Wait until the block has ended on all ranks; or tell them of the ``error`` that has ended it here."""
        with self._at_end:
            if self.group is None:
                return
            if error is not None:
                self._post(error)
                return
            with self._posting():
                if self.is_first:
                    self._meet_after_work()
                at = f"the end of {self._name}"
                self.heart.meet(self.store, at, self.members, limit_s=LONGEST_WORK_S)

    def _finds_others(self, at_end: ExitStack) -> bool:
        """Whether there are others to wait for, in a group that is made where the environment tells of one."""
        makes_group = (
            self.group is None
            and not dist.is_initialized()
            and all(os.environ.get(name) for name in ENVIRONMENT)
            and join.number_in_environment("WORLD_SIZE", at_least=1) != 1
        )
        if makes_group:
            process_group.initialize_distributed("gloo", self._timeout)
            at_end.callback(process_group.destroy_global_state)
        self.group = self.group or dist.group.WORLD
        if self.group is not None and self.group.size() == 1:
            self.group = None
        return self.group is not None

    def _enter(self, at_end: ExitStack) -> None:
        """Wait for all others, and then for the first rank's work. A collective of the group, through the store."""
        assert self.group is not None
        dist.get_rank(self.group)  # raises if the group was destroyed
        rank = dist.get_rank()
        self.members = dist.get_process_group_ranks(self.group)
        # Each member counts its blocks on groups of this name. All enter the same blocks, so the numbers agree. The
        # path holds the lowest rank, since torch may give one name to groups that share no rank.
        path = f"first_rank/{self.group.group_name}.{min(self.members)}"
        path += f"/{process_group.next_number(path)}"
        self.store = dist.PrefixStore(path, process_group.connection(self._timeout))
        self.heart = heart.current() or self._start_heart(rank, at_end)
        at_end.callback(meeting.linger, self.store, "end", rank, self.members, LINGER_S)
        with self._posting():
            at = f"the entry to {self._name}"
            nodes = self.heart.meet(
                self.store, at, self.members, node_of(rank), self._timeout.total_seconds()
            )
            self.peers = peers_of(rank, dict(zip(self.members, nodes, strict=True)), self.scope)
            self.is_first = rank == min(self.peers)
            if not self.is_first:
                self._meet_after_work()

    def _start_heart(self, rank: int, at_end: ExitStack) -> Heart:
        own = Heart(rank, self.members, self.store, self._timeout.total_seconds())
        own.record.where = self._name
        own.start()
        at_end.callback(own.close)
        return own

    def _meet_after_work(self) -> None:
        at = f"the work of rank {min(self.peers)} in {self._name}"
        self.heart.meet(self.store, at, self.peers, limit_s=LONGEST_WORK_S)

    @contextlib.contextmanager
    def _posting(self) -> Iterator[None]:
        """Context in which the others are told of what is raised here."""
        try:
            yield
        except BaseException as error:
            self._post(error)
            raise

    def _post(self, error: BaseException) -> None:
        with contextlib.suppress(dist.DistError, OSError):
            meeting.post(self.store, RankFailure.from_exception(error, self.heart.rank, self._name))


_active: list[Block] = []
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
