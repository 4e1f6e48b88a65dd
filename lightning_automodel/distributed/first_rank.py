"""First-rank blocks: the first rank of each node goes first, and a failure reaches every rank.

Everything travels through the store channel: no group is made and no collective is called, so nothing is created late
and no collective's timeout applies. Within a run that is the run's channel, else one for the outermost block. Below
``first_rank/<group>/<number of the block>`` the store holds

    here/<rank>, arrived, places    where each rank is, and when all have told, all of it
    outcome/<rank>                  how the block ended there; blocks inside it go below <group>.<number>
    num_left, all_left              it ended well on all ranks
    failure, known                  the first failure that left it, and how many ranks know it or the good end

A wait at an entry is for a lower rank, and only outermost blocks wait at their exit, by when no rank needs this one at
an entry any more: so blocks that all ranks enter in the same order cannot deadlock, whatever their scopes.
"""

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ContextDecorator
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, get_args

import torch.distributed as dist

from lightning_automodel.distributed import process_group, rendezvous
from lightning_automodel.distributed.failures import RankFailedError, RankFailure, failure_of
from lightning_automodel.distributed.process_group import parse_timeout
from lightning_automodel.distributed.store_channel import LINGER_S, StoreChannel, post_failure

Scope = Literal["node", "global"]

KEYS = "first_rank"
DONE = b"done"
LONGEST_WORK_S = 24 * 3600.0


class FirstRankPerNode(ContextDecorator):
    """Run a block on the first rank of each node, then on its other ranks, which find the work done.

    A context manager, whose ``with ... as is_first`` tells whether this rank goes first, and a decorator of functions.
    One object serves any number of blocks, also nested ones. All ranks of the group must enter the same blocks in the
    same order, from one thread. Ranks outside the group take no part; there is no collective in it.

    An outermost block starts when all ranks have come, within ``timeout`` of each other. The others wait as long as the
    first rank works, then run the same block. It ends when it has ended on all ranks; blocks inside another block wait
    at their entry only, for their first rank. An exception (``KeyboardInterrupt`` and ``SystemExit`` count) leaves the
    block unchanged where it was raised, and every other rank raises ``RankFailedError``: at the entry, without running
    the block, if it waits there, else at the exit of the outermost block. One that is caught inside an outer block
    concerns only ranks that wait for the failed rank at the inner one.

    Without a process group the block just runs. With ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in
    the environment and more than one rank, a gloo group is made for the block and destroyed after it.

    Ranks are on one node if they have the same host name and the same number by the first of these that is set:
    ``LOCAL_RANK`` (the ranks of a node are consecutive), ``GROUP_RANK``, ``NODE_RANK``, ``SLURM_NODEID``,
    ``LOCAL_WORLD_SIZE`` (so many consecutive ranks on each node).

    Args:
        group: Ranks that take part, None for the default group. Inside another block, a part of that block's ranks.
        scope: Who goes first: the lowest rank of the group on each ``"node"`` (for local disks), or the lowest rank of
            the group, ``"global"`` (for a shared file system).
        timeout: Within which all ranks come to an outermost block, and how long a rank that others wait for, or the
            store, may miss heartbeats: a ``timedelta`` or minutes. It bounds no work: a rank inside a block sends
            heartbeats as long as its threads can run, and is waited for up to a day. An outermost block's holds for
            the blocks inside it too.

    Raises:
        ValueError: If ``scope`` is neither, ``timeout`` is not positive, or this rank is not in ``group``.
        TypeError: If ``group`` is no process group, or ``timeout`` neither a ``timedelta`` nor a number.
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
        """Wait for this rank's turn.

        Returns:
            Whether this rank is the first of its node, or of the group for scope ``"global"``.

        Raises:
            RankFailedError: If another rank failed, a rank that is waited for was silent, or the store was lost.
            RuntimeError: If the first rank left a block around this one without entering it, or if ranks did not come
                to the group that is made from the environment: who, where, and how long was waited.
            ValueError: If the group was destroyed, or has ranks that the enclosing block has not.
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
        """Tell the others how the block ended; after an outermost one, wait until it has ended everywhere.

        Raises:
            RankFailedError: As on entering; not if the block itself raised.
        """
        block = _active_blocks().pop()
        if block is not None:
            block.leave(error)

    def _open(self) -> "_Block | None":
        """The block to enter; None if there is nobody to wait for."""
        made_group = self._group is None and _make_group_from_environment(self._timeout)
        try:
            group = self._find_group()
            if group is None or group.size() == 1:
                return None
            where = f"FirstRankPerNode(scope={self._scope!r})"
            enclosing = next((block for block in reversed(_active_blocks()) if block is not None), None)
            if enclosing is not None:
                return enclosing.open_inner(group, self._scope, where)
            return _open_outermost(group, self._scope, self._timeout, where, made_group)
        except BaseException:
            if made_group:
                process_group.destroy_global_state()
            raise

    def _find_group(self) -> dist.ProcessGroup | None:
        if self._group is None:
            return dist.group.WORLD if dist.is_initialized() else None
        group = self._group()
        if group is None or not _is_alive(group):
            raise ValueError("The group of this FirstRankPerNode was destroyed; make a new one, or pass group=None.")
        return group


def _checked(group: object) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"Rank {dist.get_rank()} is not in the group that FirstRankPerNode was given; let only its members enter."
        )
    raise TypeError(f"group must be a ProcessGroup or None, got {group!r}.")


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        return dist.is_initialized() and dist.get_rank(group) >= 0
    except ValueError:
        return False


# --- Opening a block --------------------------------------------------------------------------------------------------

_this_thread = threading.local()


def _active_blocks() -> "list[_Block | None]":
    """Blocks that this thread is in, outermost first."""
    if not hasattr(_this_thread, "blocks"):
        _this_thread.blocks = []
    blocks: list[_Block | None] = _this_thread.blocks
    return blocks


def _open_outermost(
    group: dist.ProcessGroup, scope: Scope, timeout: timedelta, where: str, made_group: bool
) -> "_OutermostBlock":
    members = dist.get_process_group_ranks(group)
    # Every member counts its blocks on this group, and all enter the same ones.
    _num_blocks[group] = _num_blocks.get(group, 0) + 1
    path = f"{KEYS}/{_name_of(group)}/{_num_blocks[group]}"
    own = None
    if run_channel is None or run_channel.has_ended.is_set():
        own = StoreChannel(f"lightning_automodel/{path}", timeout.total_seconds(), lambda: where)
    channel = own or run_channel
    assert channel is not None
    channel.watch(path)
    if own is not None:
        own.start()
    try:
        places = _meet(channel, path, members, timeout.total_seconds(), where)
        return _OutermostBlock(channel, places, path, members, scope, where, own is not None, made_group)
    except BaseException:
        if channel.rank == 0:
            # The store may end with this process: the others poll it for the cause.
            time.sleep(2 * channel.interval_s)
        channel.stop_watching(path)
        if own is not None:
            own.close()
        raise


run_channel: StoreChannel | None = None
"""Channel of the run that this process is in; its owner sets it."""

_num_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _name_of(group: dist.ProcessGroup) -> str:
    """The group's name and lowest rank, as torch may give one name to groups that share no rank."""
    return f"{group.group_name}.{min(dist.get_process_group_ranks(group))}"


# --- Who is on which node ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a rank is, as it tells the others.

    Attributes:
        host: Name of its machine.
        node: Tells its node from others with the same host name.
        problem: Why it cannot tell, if it cannot.
    """

    host: str
    node: str
    problem: str = ""


def first_rank(members: Sequence[int], rank: int, places: dict[int, Place], scope: Scope) -> int:
    """The lowest of ``members`` that is on the node of ``rank``, or of all for scope ``"global"``."""
    if scope == "global":
        return min(members)
    here = (places[rank].host, places[rank].node)
    return min(member for member in members if (places[member].host, places[member].node) == here)


def node_of(rank: int) -> str:
    """Which node this process is on, among those with its host name; only ranks of one node say the same.

    ``LOCAL_RANK`` counts first, since a node's first rank means local rank 0; where it is set, the ranks of a node are
    taken to be consecutive. Then ``GROUP_RANK``, ``NODE_RANK`` and ``SLURM_NODEID``, then ``LOCAL_WORLD_SIZE``.

    Raises:
        ValueError: If the one that counts is no number.
    """
    if (local_rank := rendezvous.number_in_environment("LOCAL_RANK")) is not None:
        return str(rank - local_rank)
    for name in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID"):
        if (node := rendezvous.number_in_environment(name)) is not None:
            return str(node)
    num_local = rendezvous.number_in_environment("LOCAL_WORLD_SIZE", at_least=1)
    return "" if num_local is None else str(rank // num_local)


def _meet(channel: StoreChannel, path: str, members: Sequence[int], timeout_s: float, where: str) -> dict[int, Place]:
    """Wait until all have come to a block and told where they are."""
    try:
        mine = Place(channel.host, node_of(channel.rank))
    except ValueError as error:
        mine = Place(channel.host, "", problem=str(error))
    keys = {rank: f"{path}/here/{rank}" for rank in members}

    def arrive(store: dist.Store) -> None:
        store.set(keys[channel.rank], json.dumps(asdict(mine)))
        if store.add(f"{path}/arrived", 1) == len(members):
            told = dict(zip(members, map(json.loads, store.multi_get(list(keys.values()))), strict=True))
            store.set(f"{path}/places", json.dumps(told))

    def look(store: dist.Store) -> dict[str, Any] | None:
        found: dict[str, Any] | None = (
            json.loads(store.get(f"{path}/places")) if store.check([f"{path}/places"]) else None
        )
        return found

    def absent(store: dist.Store) -> list[int]:
        return [rank for rank, key in keys.items() if not store.check([key])]

    try:
        channel.call(arrive)
        told = channel.wait_for(look, absent, path, limit_s=timeout_s)
    except RankFailedError as error:
        failure = error.failure
        with contextlib.suppress(RankFailedError):
            # Who comes too late is told that it was missed, in place of waiting for those that have left.
            channel.call(lambda store: post_failure(store, path, failure), LINGER_S)
        raise
    places = {int(rank): Place(**place) for rank, place in told.items()}
    if mine.problem:
        raise ValueError(mine.problem)
    for rank, place in places.items():
        if place.problem:
            raise RankFailedError(RankFailure(rank, place.host, where, "ValueError", place.problem))
    return places


# --- Blocks -----------------------------------------------------------------------------------------------------------


class _Block:
    """One use of :class:`FirstRankPerNode`, as this rank sees it.

    Args:
        channel: Connection to the store.
        places: Where the members are.
        path: Below which the block's keys are; the same on all members.
        members: Ranks of the default group that enter it.
        scope: Who goes first.
        where: How failures call it.
        enclosing: The block that it is in.
    """

    def __init__(
        self,
        channel: StoreChannel,
        places: dict[int, Place],
        path: str,
        members: Sequence[int],
        scope: Scope,
        where: str,
        enclosing: "_Block | None" = None,
    ) -> None:
        self._channel = channel
        self._places = places
        self._path = path
        self._members = members
        self._where = where
        self._enclosing = enclosing
        # Failures are posted where all ranks of the outermost block look.
        self._watched: str = path if enclosing is None else enclosing._watched
        self._first = first_rank(members, channel.rank, places, scope)
        self._num_inner: Counter[str] = Counter()

    def open_inner(self, group: dist.ProcessGroup, scope: Scope, where: str) -> "_Block":
        """The next block in this one, counted for each group, as other groups' blocks may be on some ranks only."""
        members = dist.get_process_group_ranks(group)
        if unknown := sorted(set(members) - set(self._members)):
            raise ValueError(
                f"A FirstRankPerNode block within another one of ranks {list(self._members)} cannot wait for ranks "
                f"{unknown}; let the block of the larger group be the outer one."
            )
        name = _name_of(group)
        path = f"{self._path}/{name}.{self._num_inner[name]}"
        self._num_inner[name] += 1
        return _Block(self._channel, self._places, path, members, scope, where, enclosing=self)

    def enter(self) -> bool:
        """Wait until the first rank has left the block, and return False; on that rank return True at once."""
        if self._channel.rank == self._first:
            self._channel.raise_failure(self._watched)
            return True
        outcome, was_inside = self._channel.wait_for(
            self._look_at_first_rank, lambda store: [self._first], self._watched, LONGEST_WORK_S
        )
        if outcome != DONE:
            raise RankFailedError(RankFailure.from_bytes(outcome))
        if not was_inside:
            raise RuntimeError(
                f"Rank {self._first} has left a block around this {self._where} without entering it; all ranks must "
                "enter the same blocks in the same order."
            )
        return False

    def leave(self, error: BaseException | None) -> None:
        """Post how the block ended on this rank."""
        if error is None:
            self._channel.call(lambda store: self._post(store, DONE))
            return
        failure = failure_of(error, self._channel.rank, self._where)
        with contextlib.suppress(RankFailedError):
            self._channel.call(lambda store: self._post(store, failure.to_bytes()), LINGER_S)

    def _post(self, store: dist.Store, outcome: bytes) -> None:
        store.set(self._outcome_key(self._channel.rank), outcome.decode())

    def _outcome_key(self, rank: int) -> str:
        return f"{self._path}/outcome/{rank}"

    def _look_at_first_rank(self, store: dist.Store) -> tuple[bytes, bool] | None:
        """How the first rank left this block, or else a block around it; and whether it was this one."""
        block: _Block | None = self
        around = []
        while block is not None:
            around.append(block._outcome_key(self._first))
            block = block._enclosing
        # That rank posts the innermost outcome first, so the innermost is looked at last, and counts.
        posted = [key for key in reversed(around) if store.check([key])]
        return (store.get(posted[-1]), posted[-1] == around[0]) if posted else None


class _OutermostBlock(_Block):
    """A block within no other: it ends when it has ended on all ranks, and frees what was made for it."""

    def __init__(
        self,
        channel: StoreChannel,
        places: dict[int, Place],
        path: str,
        members: Sequence[int],
        scope: Scope,
        where: str,
        owns_channel: bool,
        made_group: bool,
    ) -> None:
        super().__init__(channel, places, path, members, scope, where)
        self._owns_channel, self._made_group = owns_channel, made_group

    def leave(self, error: BaseException | None) -> None:
        """Post how the block ended on this rank, wait until it has on all, and free what it used."""
        try:
            if error is None:
                self._channel.call(lambda store: self._post(store, DONE))
                self._channel.wait_for(self._all_have_left, self._still_inside, self._path, LONGEST_WORK_S)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._close(error)

    def _post(self, store: dist.Store, outcome: bytes) -> None:
        super()._post(store, outcome)
        if outcome == DONE and store.add(f"{self._path}/num_left", 1) == len(self._members):
            store.set(f"{self._path}/all_left", "")

    def _all_have_left(self, store: dist.Store) -> Literal[True] | None:
        return True if store.check([f"{self._path}/all_left"]) else None

    def _still_inside(self, store: dist.Store) -> list[int]:
        return [rank for rank in self._members if not store.check([self._outcome_key(rank)])]

    def _close(self, error: BaseException | None) -> None:
        try:
            with contextlib.suppress(RankFailedError):
                self._tell_end(error)
        finally:
            self._channel.stop_watching(self._path)
            if self._owns_channel:
                self._channel.close()
            if self._made_group:
                _leave_made_group()

    def _tell_end(self, error: BaseException | None) -> None:
        """Post a failure, say that the end is known, and on rank 0, which may host the store, wait for the others."""
        channel = self._channel
        if error is not None:
            failure = failure_of(error, channel.rank, self._where)
            channel.call(lambda store: post_failure(store, self._path, failure), LINGER_S)
            channel.call(lambda store: self._post(store, failure.to_bytes()), LINGER_S)
            channel.call(channel.read_failures, LINGER_S)
        else:
            channel.call(lambda store: store.add(f"{self._path}/known", 1), LINGER_S)
        if channel.rank == 0:
            channel.wait_until_known(self._path, len(self._members))


# --- A group for one block --------------------------------------------------------------------------------------------

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _make_group_from_environment(timeout: timedelta) -> bool:
    """Make the default group, over gloo, if there is none and the environment tells of more than one rank."""
    if dist.is_initialized() or not all(os.environ.get(name) for name in ENVIRONMENT):
        return False
    if rendezvous.number_in_environment("WORLD_SIZE", at_least=1) == 1:
        return False
    process_group.initialize_distributed("gloo", timeout)
    return True


def _leave_made_group() -> None:
    """Destroy the group; then wait some seconds for the store that rank 0 hosts to end, unless a launcher has it.

    A rank that came back for the next group too early would meet the old store just before it ends.
    """
    connection = None
    if dist.get_rank() != 0 and not rendezvous.launcher_hosts_store():
        with contextlib.suppress(OSError):
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            connection = socket.create_connection(address, timeout=LINGER_S)
    process_group.destroy_global_state()
    if connection is not None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1)
