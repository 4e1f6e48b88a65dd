"""What is left of a resume state that was saved with a different world size."""

from typing import Any

from lightning_automodel.resume import loops


def carried_over(state: dict[str, Any], data_parallel: int) -> dict[str, Any]:
    """One rank's state for ranks that are others: what was every rank's own is left out.

    Within an epoch, the batches that count as used are those that as many samples make on the ranks there are now; a
    part of one is used again.

    Args:
        state: What a checkpoint holds.
        data_parallel: Ranks that hold different data, now.
    """
    plan, then = state["ranks"][0], state["sizes"]["data_parallel"]
    plan = {
        **plan,
        "random": None,
        "generators": [],
        "buffers": {},
        "metrics": {},
        "own": {**plan["own"], "engine": {}},
    }
    if plan["stage"] != loops.EPOCH:
        plan["batches"] = plan["batches"] * then // data_parallel
    plan["loaders"] = [_scaled(at, then, data_parallel) for at in plan["loaders"]]
    if plan["stage"] != loops.EPOCH:
        plan["is_drawn"] = any("iteration" not in at or at.get("is_stream") for at in plan["loaders"])
    return plan


def _scaled(at: dict[str, Any], then: int, now: int) -> dict[str, Any]:
    scaled = {name: value for name, value in at.items() if name in ("seed", "is_stream")}
    scaled |= {"generators": [], "samplers": []}
    if "iteration" in at:
        scaled |= {"iteration": (None, None, 0), "yielded": at["yielded"] * then // now, "length": None}
    return scaled
