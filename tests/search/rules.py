"""Which traits of a case have no meaning beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.search.cases import Case, has
from tests.search.kinds import RULES_BEFORE


def made_valid(case: Case, without: frozenset[str] = frozenset()) -> Case:
    """The case without what has no meaning beside the rest of it; the order of the rules matters."""
    changes: dict[str, Any] = {}
    rules = [(lambda c, out, applies=applies: applies(c), values) for applies, values in RULES_BEFORE]
    for applies, values in (*rules, *_RULES):
        if applies(case, without):
            changes = {name: value(case) if callable(value) else value for name, value in values.items()}
            case = replace(case, **changes)
    return case


def _without(name: str, *values: str) -> Callable[[Case], tuple[Any, ...]]:
    """A function of a case: what it has under this name, without these values."""

    def kept(case: Case) -> tuple[Any, ...]:
        return tuple(
            value
            for value in getattr(case, name)
            if (value[0] if isinstance(value, tuple) else value) not in values
        )

    return kept


def _window_ends(case: Case) -> tuple[int, ...]:
    """The ends of the windows of the micro-batches after which a case stops."""
    ends: list[int] = []
    for stop in case.stops:
        epoch, index = divmod(stop - 1, case.num_batches)
        length = case.num_batches
        if case.manual in ("unclosed", "add"):  # whose windows go on in the next epoch
            epoch = 0
            index = stop - 1
            length = case.epochs * case.num_batches
        accumulate = case.accumulates(epoch)
        end = min((index // accumulate + 1) * accumulate, length)
        ends.append(epoch * case.num_batches + end)
    return tuple(sorted(set(ends)))


Rule = tuple[Callable[[Case, frozenset[str]], Any], dict[str, Any]]
_MAPPINGS = ("dict", "beside")
_RULES: list[Rule] = [
    # What was known to be wrong.
    (lambda c, out: "full_tensor" in out, {"penalty": None}),
    (lambda c, out: c.thaw == "mid_window" and "mid_window" in out, {"thaw": "window"}),
    (lambda c, out: c.container in ("iterated", "indexed") and "containers" in out, {"container": "groups"}),
    (
        lambda c, out: c.counter and "recomputed_buffers" in out,
        {"strategy": _without("strategy", "activation_checkpointing")},
    ),
    (lambda c, out: c.manual == "chunks" and "chunks" in out, {"manual": "each"}),
    (lambda c, out: "resumed_twice" in out, {"stops": lambda c: c.stops[:1]}),
    # What has no meaning.
    (lambda c, out: c.engine == "ddp" or (c.engine == "hsdp" and c.experts == 4), {"experts": 0}),
    # It looks for NaN by an operator that DTensors lack.
    (lambda c, out: c.experts, {"trainer": _without("trainer", "detect_anomaly")}),
    (
        lambda c, out: c.manual is not None,
        {
            "accumulation": lambda c: c.accumulation[:1],
            "clip": None,
            "skip": (),
            "schedule": None,
            "aux": False,
            "strategy": _without("strategy", "count_window_ahead"),
            "hooks": _without(
                "hooks",
                "own_clipping",
                "clip_by_own_rule",
                "warm_up",
                "zero_in_mid_window",
                "swap_in_mid_window",
            ),
            "trainer": _without("trainer", "max_steps"),
            "callbacks": _without("callbacks", "finetuning", "swa"),
            "thaw": None,
            "stops": (),
        },
    ),
    (
        lambda c, out: c.manual in ("gan", "gan_window", "two_optimizers"),
        {"callbacks": _without("callbacks", "swa")},
    ),
    # It would end before the stop.
    (lambda c, out: has(c, "limit_train_batches"), {"stops": ()}),
    # The penalty of a parameter that is frozen again has no gradient.
    (lambda c, out: c.thaw == "mid_window", {"hooks": _without("hooks", "penalty_before_step")}),
    (lambda c, out: c.manual is None, {"manual_clip": None}),
    (lambda c, out: c.tell == "samples", {"task": "rows", "gap": None, "weighted": False}),
    (lambda c, out: c.batch == "beside" and c.tell == "samples" and "samples" in out, {"batch": "dict"}),
    (lambda c, out: c.task == "rows", {"label_shift": 0, "forwards": 1}),
    (lambda c, out: c.manual in ("gan", "gan_window"), {"weighted": False, "forwards": 1}),
    (lambda c, out: c.manual == "chunks", {"tell": "labels", "batch": "dict", "forwards": 1}),
    (lambda c, out: "own_clipping" in c.hooks or "clip_by_own_rule" in c.hooks, {"clip": None}),
    (
        lambda c, out: "warm_up" in c.hooks,
        {"schedule": None, "callbacks": _without("callbacks", "swa", "finetuning")},
    ),
    (lambda c, out: "zero_set_to_zero" in c.hooks, {"hooks": _without("hooks", "norm_after_backward")}),
    (lambda c, out: c.counter is not None, {"more_batches": 0, "callbacks": _without("callbacks", "ema")}),
    (lambda c, out: c.stops, {"hooks": _without("hooks", "norm_after_backward", "norm_before_step")}),
    # torch's anomaly mode looks for NaN in gradients by an operator that DTensors lack.
    (lambda c, out: has(c, "detect_anomaly"), {"hooks": _without("hooks", "penalty_before_step")}),
    # A checkpoint holds no gradients, so that those which are zero instead of None are None after resuming.
    (lambda c, out: c.stops, {"hooks": _without("hooks", "zero_set_to_zero")}),
    # Nor where a stream without a state is.
    (lambda c, out: c.stream, {"stops": ()}),
    (lambda c, out: c.penalty and c.aux, {"penalty": None}),
    (lambda c, out: c.weighted and c.tell not in ("returned", "returned_tensor"), {"tell": "returned"}),
    (lambda c, out: c.tell == "equal", {"gap": None, "loss_reduction": "mean", "weighted": False}),
    (lambda c, out: c.tell in ("labels", "key") and c.batch not in _MAPPINGS, {"tell": "callable"}),
    (
        lambda c, out: c.tell.startswith("returned") and has(c, "count_window_ahead"),
        {"strategy": _without("strategy", "count_window_ahead")},
    ),
    (
        lambda c, out: c.aux and c.tell.startswith("returned"),
        {"tell": "callable", "weighted": False},
    ),
    (
        lambda c, out: c.aux and not has(c, "count_window_ahead") and c.tell != "equal",
        {"strategy": lambda c: (*c.strategy, ("count_window_ahead", True))},
    ),
    (lambda c, out: c.aux and c.loss_reduction == "sum", {"aux": False}),
    (
        lambda c, out: has(c, "count_window_ahead"),
        {"skip": (), "hooks": _without("hooks", "zero_in_mid_window")},
    ),
    (lambda c, out: c.gap == "rank" and c.tell == "equal", {"gap": None}),
    (lambda c, out: c.thaw is not None, {"frozen": None, "callbacks": _without("callbacks", "finetuning")}),
    (lambda c, out: "finetuning" in c.callbacks, {"frozen": None, "optimizer": "sgd", "schedule": None}),
    (lambda c, out: c.frozen == "embedding", {"parts": _without("parts", "tied")}),
    (
        lambda c, out: "swa" in c.callbacks,
        {
            "callbacks": _without("callbacks", "ema", "finetuning"),
            "schedule": None,
            "optimizer": "sgd",
            "norm": lambda c: None if c.norm == "batch" else c.norm,
            "epochs": lambda c: max(c.epochs, 2),
            "trainer": _without("trainer", "max_steps"),
            "stops": (),
        },
    ),
    (lambda c, out: "early" in c.callbacks, {"callbacks": _without("callbacks", "swa"), "stops": ()}),
    (lambda c, out: "early" in c.callbacks, {"epochs": lambda c: max(c.epochs, 2)}),
    (lambda c, out: "ema" in c.callbacks and c.stops, {"stops": ()}),
    (
        lambda c, out: c.more_batches > 0,
        {"trainer": _without("trainer", "limit_train_batches"), "stops": (), "skip": ()},
    ),
    (lambda c, out: c.more_batches > 0 and c.norm == "batch", {"norm": "layer"}),
    (
        lambda c, out: c.more_batches > 0 and has(c, "uneven_inputs"),
        {
            "hooks": _without("hooks", "swap_in_mid_window"),
            "thaw": lambda c: None if c.thaw != "epoch" else c.thaw,
        },
    ),
    (lambda c, out: c.stream, {"trainer": _without("trainer", "limit_train_batches")}),
    (
        lambda c, out: c.stream and "swa" in c.callbacks,
        {"stream": False},
    ),
    (lambda c, out: c.skip and any(s >= c.num_batches for s in c.skip), {"skip": ()}),
    (lambda c, out: c.skip, {"stops": ()}),
    (
        lambda c, out: c.engine == "ddp",
        {
            "fits": (),
            "strategy": _without(
                "strategy",
                "reshard_during_accumulation",
                "reshard_after_forward",
                "defer_fsdp_grad_sync",
                "cpu_offload",
                "prefetch",
            ),
        },
    ),
    (lambda c, out: c.engine != "ddp", {"strategy": _without("strategy", "ddp_kwargs")}),
    (lambda c, out: c.fits, {"strategy": _without("strategy", "defer_fsdp_grad_sync")}),
    (
        lambda c, out: c.engine != "hsdp" and has(c, "defer_fsdp_grad_sync", "all_reduce"),
        {"strategy": _without("strategy", "defer_fsdp_grad_sync")},
    ),
    (
        lambda c, out: (
            c.engine == "ddp"
            and not has(c, "ddp_kwargs")
            and (
                {"unused", "sometimes"} & set(c.parts)
                or c.thaw
                or c.manual is not None
                or "finetuning" in c.callbacks
            )
        ),
        {"strategy": lambda c: (*c.strategy, ("ddp_kwargs", (("find_unused_parameters", True),)))},
    ),
    (lambda c, out: c.num_ranks == 4, {"stops": ()}),
    (lambda c, out: len(c.accumulation) > 1, {"epochs": lambda c: max(c.epochs, 2)}),
    # A window that a stop leaves open begins again, with what its forwards have counted: `tests.resume.search`
    # stops there.
    (lambda c, out: c.stops, {"stops": lambda c: _window_ends(c)}),
    (lambda c, out: c.stops, {"stops": lambda c: tuple(s for s in c.stops if s < c.epochs * c.num_batches)}),
    (
        lambda c, out: c.stops,
        {"callbacks": _without("callbacks", "early"), "trainer": _without("trainer", "max_steps")},
    ),
]
