"""The state that a rank resumes from: its own, or one for every rank if the number of ranks has changed."""

from collections.abc import Callable
from typing import Any

from lightning_automodel.distributed.mesh import CONTEXT
from lightning_automodel.resume import loops


def choose(
    saved: dict[str, Any], sizes: dict[str, int], rank: int, world_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """What ``rank`` resumes from, of the states of all ranks that were ``saved``. Not a collective.

    ``sizes`` are the present ranks along each dimension of the mesh. ``say`` tells the user of a layout that
    changed. Raises ValueError if a checkpoint from within an epoch, or with extra states that differ between
    ranks, was saved in another layout.
    """
    # Each context peer has its own metrics; tensor-parallel peers have the same.
    is_alike = all(saved["sizes"].get(name, 1) == sizes.get(name, 1) for name in ("data_parallel", CONTEXT))
    ranks: list[dict[str, Any]] = saved["ranks"]
    if is_alike and len(ranks) == world_size:
        return ranks[rank]
    first = ranks[0]
    layouts = f"The checkpoint was saved with a different world size ({saved['sizes']}, now {sizes})"
    if first["stage"] != loops.EPOCH or first.get("extra_states"):
        raise ValueError(
            f"{layouts}, within an epoch or with extra states of modules (get_extra_state) that differed between"
            " the ranks: resume on as many ranks as have saved it, or from the end of an epoch, or take only its"
            " weights (load_from_checkpoint)."
        )
    say(f"{layouts}: each rank's random states, buffers and metrics start afresh.")
    return {**first, "random": None, "buffers": {}, "metrics": {}, "loaders": []}
