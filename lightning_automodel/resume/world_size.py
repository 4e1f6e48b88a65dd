"""The state that a rank resumes from: its own, or one for every rank if the number of ranks has changed."""

from collections.abc import Callable
from typing import Any

from lightning_automodel.distributed.mesh import CONTEXT
from lightning_automodel.resume import loops
from lightning_automodel.resume.dataloaders import NOTHING


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
    ranks: list[dict[str, Any]] = saved["ranks"]
    if is_alike and len(ranks) == world_size:
        return ranks[rank]
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
    loaders = []
    for loader in first["loaders"]:
        carried = {**loader, "generators": [], "samplers": []}
        if carried.pop("state", None) is not None:
            carried["kind"] = NOTHING  # refused within an epoch
        if "iteration" in loader:
            yielded = loader["yielded"] * before // data_parallel
            carried |= {"iteration": (None, 0), "yielded": yielded, "length": None}
        loaders.append(carried)
    batches = first["batches"]
    if first["stage"] != loops.EPOCH:
        batches = batches * before // data_parallel
    without: dict[str, Any] = {"random": None, "buffers": {}, "metrics": {}}
    return {**first, **without, "loaders": loaders, "batches": batches}
