"""First-rank blocks: the first rank of each node runs a block before the others, and a failure reaches every rank.

The ranks communicate through the board: no group is made and no collective is called, so nothing is created late and
no collective's timeout applies. Within a run it is the run's board, else one made for the outermost block. Below
``first_rank/<group>/<number of the block>`` the store holds

    node/...          the node of each rank
    outcome/<rank>    how the block ended on the rank; an inner block's key is below the inner block's number
    left/...          the ranks that left the block without an error
    verdict, known    the first failure that left the block, and how many ranks know of it or of the good end

At an entry a rank waits only for a lower rank. Only outermost blocks wait at their exit, where no rank waits for this
one at an entry any more. So blocks that all ranks enter in the same order cannot deadlock, whatever their scopes.
"""

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Literal, get_args

import torch.distributed as dist

from lightning_automodel.distributed import process_group, rendezvous
from lightning_automodel.distributed.board import LINGER_S, NONE, Board
from lightning_automodel.distributed.failures import RankFailedError, RankFailure, failure_of
from lightning_automodel.distributed.process_group import parse_timeout

Scope = Literal["node", "global"]

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DONE = b"done"
LONGEST_WORK_S = 24 * 3600.0


class FirstRankPerNode(ContextDecorator):
    """Run a block on the first rank of each node, then on its other ranks, which find the work done.

    A context manager and a decorator. ``with ... as is_first`` tells whether this rank goes first. One object serves
    any number of blocks, also nested ones. All ranks of the group must enter the same blocks in the same order, from
    one thread. Ranks outside the group take no part. It calls no collective.

    An outermost block starts when all ranks have entered it, and ends when it has ended on all ranks. An inner block
    waits only at its entry, for its first rank. An exception leaves the block unchanged on the rank that raised it.
    Every other rank raises ``RankFailedError``: at the entry, without running the block, if it waits there, else at the
    exit of the outermost block.

    Without a process group the block just runs. With ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in
    the environment and more than one rank, a gloo group is made for the block and destroyed after it.

    Args:
        group: Group of the ranks that take part; None is the default group. An inner block has the outer one's group.
        scope: Who goes first: the lowest rank of the group on each ``"node"`` (for local disks), or the lowest rank of
            the group, ``"global"`` (for a shared file system).
        timeout: Within which all ranks must enter an outermost block, and how long a rank that others wait for may miss
            heartbeats: a ``timedelta`` or minutes. It does not limit the work, for which the others wait up to a day.

    Raises:
        ValueError: If ``scope`` is neither value, ``timeout`` is not positive, or this rank is not in ``group``.
        TypeError: If ``group`` is not a process group, or ``timeout`` neither a ``timedelta`` nor a number.
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
        self._scope = scope
        self._timeout = parse_timeout(timeout)
        # Weak: a decorated function lives as long as its module, and must not keep a destroyed group's connections.
        self._group = None if group is None else weakref.ref(_checked(group))

    def __enter__(self) -> bool:
        """Wait until this rank may run the block.

        Returns:
            Whether this rank is the first of its node, or of the group for scope ``"global"``.

        Raises:
            RankFailedError: If another rank failed, a rank that is waited for was silent, or the store was lost.
            RuntimeError: If the first rank left an outer block without entering this one, or ranks did not join the
                group that is made from the environment: the message names ranks, address and waiting time.
            ValueError: If the group was destroyed, or is not the enclosing block's group.
        """
        block = self._open()
        stack = _active_blocks()
        stack.append(block)
        if block is None:
            return True
        try:
            return block.enter()
        except BaseException as error:
            stack.pop()
            block.leave(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Report how the block ended; after an outermost one, wait until it has ended on all ranks, or one failed."""
        block = _active_blocks().pop()
        if block is not None:
            block.leave(error)

    def _open(self) -> "_Block | None":
        """The block to enter; None if there is nobody to wait for."""
        made_group = self._group is None and _make_group_from_environment(self._timeout)
        group = self._find_group()
        if group is None or group.size() == 1:
            return None
        where = f"FirstRankPerNode(scope={self._scope!r})"
        outer = next((block for block in reversed(_active_blocks()) if block is not None), None)
        if outer is None:
            meeting = _Meeting(group, self._timeout.total_seconds(), where, made_group)
            return _Block(meeting, self._scope, where, [meeting.path])
        if group is not outer.meeting.group:
            raise ValueError(
                f"A FirstRankPerNode block for ranks {dist.get_process_group_ranks(group)} cannot be inside a block of "
                f"another group, for ranks {outer.meeting.members}; leave that one first, or give both the same group."
            )
        outer.num_inner += 1
        return _Block(outer.meeting, self._scope, where, [f"{outer.paths[0]}/{outer.num_inner}", *outer.paths])

    def _find_group(self) -> dist.ProcessGroup | None:
        if self._group is None:
            return dist.group.WORLD if dist.is_initialized() else None
        group = self._group()
        with contextlib.suppress(ValueError):
            if group is not None and dist.is_initialized() and dist.get_rank(group) >= 0:
                return group
        raise ValueError("The group of this FirstRankPerNode was destroyed; make a new one, or pass group=None.")


def _checked(group: object) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"Rank {dist.get_rank()} is not in the group that FirstRankPerNode was given; let only its members enter."
        )
    raise TypeError(f"group must be a ProcessGroup or None, got {group!r}.")


def _make_group_from_environment(timeout: timedelta) -> bool:
    """Join a gloo default group if there is none and the environment has several ranks; return whether it did."""
    if dist.is_initialized() or not all(os.environ.get(name) for name in ENVIRONMENT):
        return False
    if rendezvous.number_in_environment("WORLD_SIZE", at_least=1) == 1:
        return False
    process_group.initialize_distributed("gloo", timeout)
    return True


run_board: Board | None = None
"""Board of the run that this process is in; the run's supervisor sets it."""

_num_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_this_thread = threading.local()


def _active_blocks() -> "list[_Block | None]":
    """Blocks that this thread is in, outermost first."""
    blocks: list[_Block | None] = _this_thread.__dict__.setdefault("blocks", [])
    return blocks


# --- Who is on which node ---------------------------------------------------------------------------------------------


def node_of(rank: int) -> str:
    """Name of this process's node: its host, and the rank of its first process, as ranks of a node are consecutive."""
    local_rank = rendezvous.number_in_environment("LOCAL_RANK")
    return socket.gethostname() + ("" if local_rank is None else f" from rank {rank - local_rank}")


def first_rank(rank: int, nodes: dict[int, str], scope: Scope) -> int:
    """The lowest rank on the node of ``rank``, or of all ranks for scope ``"global"``; ``nodes`` by rank."""
    return min(other for other, node in nodes.items() if scope == "global" or node == nodes[rank])


# --- Blocks -----------------------------------------------------------------------------------------------------------


class _Meeting:
    """The ranks of a group in an outermost block, and what they share until it has ended on all of them."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, where: str, made_group: bool) -> None:
        self.group, self.members = group, dist.get_process_group_ranks(group)
        self._where, self._made_group = where, made_group
        # Each member counts its blocks on this group; all enter the same blocks, so the numbers agree. The lowest rank
        # is in the path, as torch may give one name to groups that share no rank.
        _num_blocks[group] = _num_blocks.get(group, 0) + 1
        self.path = f"first_rank/{group.group_name}.{min(self.members)}/{_num_blocks[group]}"
        self._own_board = None
        if run_board is None or run_board.has_ended.is_set():
            prefix, describe = f"lightning_automodel/{self.path}", {"where": where}
            self._own_board = Board(prefix, self.path, self.members, timeout_s, lambda: describe)
            self._own_board.start()
        board = self._own_board or run_board
        assert board is not None
        self.board = board
        board.verdicts[self.path] = None
        try:
            mine = node_of(board.rank)
            nodes = board.gather(f"{self.path}/node", self.members, mine, self.path, timeout_s)
        except BaseException as error:
            # A rank that comes too late then reads the failure, and does not wait for ranks that have left.
            self.end(error, 2 * board.interval_s)
            raise
        self.nodes = dict(zip(self.members, nodes, strict=True))

    def end(self, error: BaseException | None, linger_s: float = LINGER_S) -> None:
        """Report how the block ended on this rank, and free what was made for it. Rank 0, the store's host, waits."""
        board = self.board
        try:
            with contextlib.suppress(RankFailedError):
                if error is None:
                    board.call(lambda store: store.add(f"{self.path}/known", 1), LINGER_S)
                else:
                    failure = failure_of(error, board.rank, self._where)
                    board.call(lambda store: board.post(store, self.path, failure), LINGER_S)
                    board.call(board.read, LINGER_S)
                if board.rank == 0:
                    board.wait_until_known(self.path, len(self.members), linger_s)
        finally:
            if self._own_board is not None:
                self._own_board.close()
            else:
                del board.verdicts[self.path]
            if self._made_group:
                process_group.destroy_global_state()


@dataclass
class _Block:
    """One use of :class:`FirstRankPerNode`, as this rank sees it; ``paths`` has its key prefix and those around it."""

    meeting: _Meeting
    scope: Scope
    where: str
    paths: list[str]
    num_inner: int = 0

    def enter(self) -> bool:
        """Wait until the first rank has left the block, and return False; on that rank return True at once."""
        meeting, board = self.meeting, self.meeting.board
        first = first_rank(board.rank, meeting.nodes, self.scope)
        if board.rank == first:
            board.raise_verdict(meeting.path)
            return True
        # The first rank posts inner outcomes first. Inner keys are read last, so none is missed in between.
        keys = [f"{path}/outcome/{first}" for path in reversed(self.paths)]

        def find(values: Sequence[bytes]) -> tuple[bytes, bool] | None:
            """How the first rank left this block, or else a block around it; and whether it was this one."""
            posted = [index for index, value in enumerate(values) if value != NONE]
            return (values[posted[-1]], posted[-1] == len(keys) - 1) if posted else None

        explain = partial(board.explain_missing, f"{self.paths[0]}/outcome", [first])
        outcome, was_inside = board.wait_for(keys, find, meeting.path, LONGEST_WORK_S, explain)
        if outcome != DONE:
            raise RankFailedError(RankFailure.from_bytes(outcome))
        if not was_inside:
            raise RuntimeError(
                f"Rank {first} has left a block around this {self.where} without entering it; all ranks must enter the "
                "same blocks in the same order."
            )
        return False

    def leave(self, error: BaseException | None) -> None:
        """Post how the block ended on this rank; if it is the outermost, wait until it has ended on all ranks."""
        meeting, board = self.meeting, self.meeting.board
        is_outermost = len(self.paths) == 1
        outcome = DONE if error is None else failure_of(error, board.rank, self.where).to_bytes()

        def post(store: dist.Store) -> None:
            store.set(f"{self.paths[0]}/outcome/{board.rank}", outcome.decode())

        try:
            if error is None:
                board.call(post)
            elif not is_outermost:
                with contextlib.suppress(RankFailedError):
                    board.call(post, LINGER_S)
            if error is None and is_outermost:
                board.gather(f"{meeting.path}/left", meeting.members, "", meeting.path, LONGEST_WORK_S)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if is_outermost:
                meeting.end(error)
