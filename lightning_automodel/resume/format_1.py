"""Resume states of format 1, as earlier versions wrote them."""

from typing import Any

from lightning_automodel.resume import loops

_STAGES = {
    "run start": loops.EPOCH,
    "epoch start": loops.EPOCH,
    "batch": loops.BATCH,
    "batch end": loops.STEP,
    "after batch": loops.STEP,
    "after validation": loops.VALIDATION,
    "epoch end": loops.EPOCH,
}


def upgraded(old: dict[str, Any]) -> dict[str, Any]:
    """One rank's state in the present format; ``progress`` holds counters of the loops, which only format 1 kept."""
    stage, progress, random = _STAGES[old["next"]], old["progress"], old["random"]
    position = old["position"]
    logged = progress["epoch_loop.state_dict"]["_batches_that_stepped"]
    metrics = old["metrics"]["objects"].items()
    return {
        "progress": progress,
        "stage": stage,
        "batches": progress["epoch_loop.batch_progress"]["current"]["ready"],
        "epochs": progress["epoch_progress"]["current"]["processed"],
        "is_epoch_ending": old["next"] == "epoch end",
        "is_iterated": position is not None,
        "logged": logged + 1 if stage in (loops.STEP, loops.VALIDATION) else logged,
        "random": random["global"],
        "generators": random["module"],
        "loaders": _loaders(position, random),
        "is_drawn": stage != loops.EPOCH
        and any("iteration" not in at and "state" not in at for at in _loaders(position, random)),
        "buffers": {
            name.removeprefix("module."): value for name, value in old["buffers"].items() if name.startswith("module.")
        },
        "metrics": {name: {"count": state["count"], "states": state["states"]} for name, state in metrics},
        "flags": old["switches"],
        "seen": old["metrics"]["seen"]["_callback_metrics"],
        "own": old["own"],
    }


def _loaders(position: dict[str, Any] | None, random: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"generators": states, "samplers": []} for states in random["training"]]
    if len(found) == 1:
        found[0]["samplers"] = random["samplers"]
    for at, then in zip(found, position["loaders"] if position is not None else [], strict=False):
        if then is not None and "made" in then:
            assert position is not None
            start = position["consumed"] - then["yielded"]
            at |= {
                "iteration": (then["made"], then["first"], start),
                "yielded": then["yielded"],
                "length": then["length"],
            }
        elif then is not None:
            at |= then
    return found
