"""What can be used of a resume state that was saved with a different world size."""

from typing import Any

from lightning_automodel.resume import loops


def carried_over(state: dict[str, Any], data_parallel: int) -> dict[str, Any]:
    """One state for every rank of the present world size, without what was each rank's own.

    Within an epoch, the used samples are counted as batches of the present ranks, rounded down: a few are used again.

    Args:
        state: What a checkpoint holds.
        data_parallel: Present number of ranks that hold different data.
    """
    carried, then = state["ranks"][0], state["sizes"]["data_parallel"]
    carried = {**carried, "random": None, "generators": [], "buffers": {}, "metrics": {}}
    carried["loaders"] = [_scaled(at, then, data_parallel) for at in carried["loaders"]]
    if carried["stage"] != loops.EPOCH:
        carried["batches"] = carried["batches"] * then // data_parallel
        carried["is_drawn"] = any("iteration" not in at or at.get("is_stream") for at in carried["loaders"])
    return carried


def _scaled(at: dict[str, Any], then: int, now: int) -> dict[str, Any]:
    scaled = {"generators": [], "samplers": []} | {name: at[name] for name in ("seed", "is_stream") if name in at}
    if "iteration" in at:
        scaled |= {"iteration": (None, None, 0), "yielded": at["yielded"] * then // now, "length": None}
    return scaled
