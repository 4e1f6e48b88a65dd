"""Which rank reads all records and decides: the first to ask, or another one once that is silent."""

import torch.distributed as dist

from lightning_automodel.distributed.board import NONE, Board


def holds_lease(board: Board, store: dist.Store, key: str, value: bytes, silence_s: float) -> bool:
    """Whether this rank is to read for all; called with each heartbeat, on the board's thread.

    Args:
        board: This rank's board.
        store: Its store.
        key: Of the lease, one for each question that a rank may decide.
        value: The key's newest value: who holds it.
        silence_s: For how long the holder may be silent.
    """
    if value != NONE and int(value) != board.rank:
        holder = int(value)
        # Its record is read with each heartbeat from now on.
        board.watch(holder)
        seen = board.seen.get(holder)
        if seen is None or not seen.is_silent(board.clock(), min(silence_s, board.timeout_s)):
            return False
    if value == NONE or int(value) != board.rank:
        value = store.compare_set(key, value.decode(), str(board.rank))
    return int(value) == board.rank
