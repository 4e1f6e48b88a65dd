"""What is left of a resume state where the ranks are not those that wrote it."""

from typing import Any

from lightning_automodel.resume.loops import AFTER_BATCH, BATCH_END, WITHIN_EPOCH


def carried_over(state: dict[str, Any], data_parallel: int) -> dict[str, Any]:
    """One rank's state for ranks that are others: what was every rank's own is left out.

    Within an epoch, the batches that count as used are those that as many samples make on the ranks there are now; a
    part of one is used again.

    Args:
        state: What ``Resume.state`` returned.
        data_parallel: Ranks that hold different data, now.
    """
    saved = state["ranks"][0]
    plan = {**saved, "random": None, "buffers": {}, "own": {**saved["own"], "engine": {}}}
    plan["metrics"] = {**saved["metrics"], "results": {}, "objects": {}}
    if saved["next"] in WITHIN_EPOCH:
        then = state["sizes"]["data_parallel"]
        plan["progress"] = _scaled_progress(saved["progress"], then, data_parallel)
        plan["next"] = AFTER_BATCH if saved["next"] == BATCH_END else saved["next"]
    if saved["position"] is not None:
        plan["position"] = _scaled_position(saved["position"], state["sizes"]["data_parallel"], data_parallel)
    return plan


def _scaled_progress(progress: dict[str, Any], then: int, now: int) -> dict[str, Any]:
    batches = progress["epoch_loop.batch_progress"]
    begun, total = batches["current"]["ready"], batches["total"]["ready"]
    current = begun * then // now
    counts = {
        "current": dict.fromkeys(batches["current"], current),
        "total": dict.fromkeys(batches["total"], total - begun + current),
    }
    return {**progress, "epoch_loop.batch_progress": {**batches, **counts}}


def _scaled_position(position: dict[str, Any], then: int, now: int) -> dict[str, Any]:
    loaders = [
        {**at, "made": None, "first": None, "yielded": at["yielded"] * then // now, "length": None}
        if at is not None and "made" in at
        else None
        for at in position["loaders"]
    ]
    scaled = {name: position[name] * then // now for name in ("consumed", "index")}
    return {**position, **scaled, "started": None, "ahead": None, "loaders": loaders}
