"""What can be used of a resume state that was saved with a different world size."""

from typing import Any

from lightning_automodel.resume import loops


def carried_over(state: dict[str, Any], data_parallel: int) -> dict[str, Any]:
    """One state for every rank of the present world size, without what was each rank's own.

    Within an epoch, the used samples are counted as batches of the present ranks, rounded down: a few are used again.
    """
    carried, then = state["ranks"][0], state["sizes"]["data_parallel"]
    loaders = []
    for at in carried["loaders"]:
        scaled = {name: at[name] for name in ("kind", "seed") if name in at} | {"generators": [], "samplers": []}
        if "iteration" in at:
            scaled |= {"iteration": (None, 0), "yielded": at["yielded"] * then // data_parallel, "length": None}
        if "state" in at:
            scaled["kind"] = "no position"  # refused within an epoch
        loaders.append(scaled)
    own = {**carried["own"], "engine": {}}
    carried = {**carried, "random": None, "buffers": {}, "metrics": {}, "own": own, "loaders": loaders}
    if carried["stage"] != loops.EPOCH:
        carried["batches"] = carried["batches"] * then // data_parallel
    return carried
