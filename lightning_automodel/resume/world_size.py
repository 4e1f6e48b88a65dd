"""The state that a rank resumes from: its own, or one for every rank if the number of ranks has changed."""

from collections.abc import Callable
from typing import Any

from lightning_automodel.distributed.mesh import CONTEXT
from lightning_automodel.resume import loops


def position(state: dict[str, Any]) -> loops.Position:
    """The position of the fit in one rank's ``state``."""
    return loops.Position(*(state[name] for name in ("stage", "batches", "epochs", "is_epoch_ending")))


def choose(
    saved: dict[str, Any], sizes: dict[str, int], rank: int, world_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """What ``rank`` resumes from, of the states of all ranks that were ``saved``. Not a collective.

    ``sizes`` are the present ranks along each dimension of the mesh. ``say`` tells the user of a layout that
    changed.
    """
    # Each context peer has its own metrics; tensor-parallel peers have the same.
    is_alike = all(saved["sizes"].get(name, 1) == sizes.get(name, 1) for name in ("data_parallel", CONTEXT))
    own: dict[str, Any]
    if is_alike and len(saved["ranks"]) == world_size:
        own = saved["ranks"][rank]
        return own
    own = carried_over(saved, sizes["data_parallel"])
    say(
        f"The checkpoint was saved with a different world size ({saved['sizes']}, now {sizes}): the data"
        " goes on where it stopped, and each rank's random states, buffers and metrics of the epoch start"
        " afresh. Without a DistributedSampler, samples of this epoch may be left out or used twice."
    )
    extra_states = own.get("extra_states")
    if extra_states:
        say(
            "Extra states of modules (get_extra_state) differed between the ranks that saved the checkpoint,"
            f" and every rank of another layout starts with rank 0's: {', '.join(extra_states)}."
        )
    return own


def carried_over(saved: dict[str, Any], data_parallel: int) -> dict[str, Any]:
    """One state for every rank of the present world size, without what each rank has for itself.

    Within an epoch, the used samples are counted as batches of the present ranks, rounded down: a few are
    used again.
    """
    first = saved["ranks"][0]
    before = saved["sizes"]["data_parallel"]
    loaders = [_carry_loader(loader, before, data_parallel) for loader in first["loaders"]]
    carried = {**first, "random": None, "buffers": {}, "metrics": {}, "loaders": loaders}
    if carried["stage"] != loops.EPOCH:
        carried["batches"] = carried["batches"] * before // data_parallel
    return carried


def _carry_loader(loader: dict[str, Any], before: int, now: int) -> dict[str, Any]:
    """The position of a loader that ``before`` ranks have drawn from, for ``now`` ranks."""
    carried = {**loader, "generators": [], "samplers": []}
    if carried.pop("state", None) is not None:
        carried["kind"] = "no position"  # refused within an epoch
    if "iteration" in loader:
        carried |= {"iteration": (None, 0), "yielded": loader["yielded"] * before // now, "length": None}
    return carried
