"""The state that a rank resumes from: its own, or one for every rank if the number of ranks has changed."""

from collections.abc import Callable
from typing import Any

from lightning_automodel.distributed.mesh import CONTEXT
from lightning_automodel.resume import loops
from lightning_automodel.resume.dataloaders import NOTHING, STATE


def choose(
    saved: dict[str, Any], sizes: dict[str, int], rank: int, world_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """What ``rank`` resumes from, of the states of all ranks that were ``saved``. Not a collective.

    ``sizes`` are the present ranks along each dimension of the mesh. ``say`` tells the user of a layout that
    changed. Raises ValueError if a checkpoint whose extra states differ between ranks was saved in another
    layout.
    """
    # Each context peer has its own metrics; tensor-parallel peers have the same.
    is_alike = all(saved["sizes"].get(name, 1) == sizes.get(name, 1) for name in ("data_parallel", CONTEXT))
    ranks: list[dict[str, Any]] = saved["ranks"]
    if is_alike and len(ranks) == world_size:
        return ranks[rank]
    if ranks[0]["extra_states"]:
        raise ValueError(
            f"Extra states of modules (get_extra_state) differed between the {len(ranks)} ranks that saved the"
            f" checkpoint ({saved['sizes']}, now {sizes}): resume on as many ranks, or take only its weights"
            " (load_from_checkpoint)."
        )
    say(
        f"The checkpoint holds the states of {len(ranks)} ranks, saved in a run of {saved['sizes']}, and this run has"
        f" {world_size} of {sizes} (after an error, one rank saves alone): the data goes on where it stopped, and"
        " each rank's random states, buffers and metrics of the epoch start afresh. Without a DistributedSampler,"
        " samples of this epoch may be left out or used twice."
    )
    return carried_over(saved, sizes["data_parallel"])


def carried_over(saved: dict[str, Any], data_parallel: int) -> dict[str, Any]:
    """One state for every rank of the present world size, without what each rank has for itself.

    Within an epoch, the used samples are counted as batches of the present ranks, rounded down: a few are
    used again.
    """
    first = saved["ranks"][0]
    loaders = []
    for loader in first["loaders"]:
        kind, _, batch_size = loader["by"]
        if kind == STATE:
            kind = NOTHING  # refused within an epoch
        carried = {**loader, "by": (kind, None, batch_size), "generators": [], "samplers": []}
        carried.pop("state", None)
        if "iteration" in carried:
            carried["iteration"] = (None, 0)
        loaders.append(carried)
    at = dict(first["at"])
    if at["stage"] != loops.EPOCH:
        at["batches"] = at["batches"] * saved["sizes"]["data_parallel"] // data_parallel
    return {**first, "random": None, "buffers": {}, "metrics": {}, "loaders": loaders, "at": at}
