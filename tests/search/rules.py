"""Which traits of a case have no meaning beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.search.cases import Case, dropped, has
from tests.search.kinds import RULES_BEFORE


def made_valid(case: Case) -> Case:
    """The case without what has no meaning beside the rest of it; the order of the rules matters."""
    for applies, values in (*RULES_BEFORE, *_RULES):
        if applies(case):
            case = replace(
                case, **{n: value(case) if callable(value) else value for n, value in values.items()}
            )
    return case


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


_MAPPINGS = ("dict", "beside")
_RULES: list[tuple[Callable[[Case], Any], dict[str, Any]]] = [
    (lambda c: c.engine == "ddp" or (c.engine == "hsdp" and c.experts == 4), {"experts": 0}),
    (
        lambda c: c.manual is not None,
        {
            "accumulation": lambda c: c.accumulation[:1],
            "clip": None,
            "skip": (),
            "schedule": None,
            "aux": False,
            "strategy": dropped("strategy", "count_window_ahead"),
            "hooks": dropped(
                "hooks",
                "own_clipping",
                "clip_by_own_rule",
                "warm_up",
                "zero_in_mid_window",
                "swap_in_mid_window",
            ),
            "trainer": dropped("trainer", "max_steps"),
            "callbacks": dropped("callbacks", "finetuning", "swa"),
            "thaw": None,
            "stops": (),
        },
    ),
    (
        lambda c: c.manual in ("gan", "gan_window", "two_optimizers"),
        {"callbacks": dropped("callbacks", "swa")},
    ),
    # It would end before the stop.
    (lambda c: has(c, "limit_train_batches"), {"stops": ()}),
    # The penalty of a parameter that is frozen again has no gradient.
    (lambda c: c.thaw == "mid_window", {"hooks": dropped("hooks", "penalty_before_step")}),
    (lambda c: c.manual is None, {"manual_clip": None}),
    (lambda c: c.tell == "samples", {"task": "rows", "gap": None, "weighted": False}),
    (lambda c: c.task == "rows", {"label_shift": 0, "forwards": 1}),
    (lambda c: c.manual in ("gan", "gan_window"), {"weighted": False, "forwards": 1}),
    (lambda c: c.manual == "chunks", {"tell": "labels", "batch": "dict", "forwards": 1}),
    (lambda c: "own_clipping" in c.hooks or "clip_by_own_rule" in c.hooks, {"clip": None}),
    (
        lambda c: "warm_up" in c.hooks,
        {"schedule": None, "callbacks": dropped("callbacks", "swa", "finetuning")},
    ),
    (lambda c: "zero_set_to_zero" in c.hooks, {"hooks": dropped("hooks", "norm_after_backward")}),
    (lambda c: c.snippet == "states loaded", {"counter": None}),  # the reference loads no buffers of ranks
    (lambda c: c.counter is not None, {"more_batches": 0, "callbacks": dropped("callbacks", "ema")}),
    (lambda c: c.stops, {"hooks": dropped("hooks", "norm_after_backward", "norm_before_step")}),
    # A checkpoint holds no gradients, so that those which are zero instead of None are None after resuming.
    (lambda c: c.stops, {"hooks": dropped("hooks", "zero_set_to_zero")}),
    # Nor where a stream without a state is.
    (lambda c: c.stream, {"stops": ()}),
    (lambda c: c.penalty and c.aux, {"penalty": None}),
    (lambda c: c.weighted and c.tell not in ("returned", "returned_tensor"), {"tell": "returned"}),
    (lambda c: c.tell == "equal", {"gap": None, "loss_reduction": "mean", "weighted": False}),
    (lambda c: c.tell in ("labels", "key") and c.batch not in _MAPPINGS, {"tell": "callable"}),
    (
        lambda c: c.tell.startswith("returned") and has(c, "count_window_ahead"),
        {"strategy": dropped("strategy", "count_window_ahead")},
    ),
    (lambda c: c.aux and c.tell.startswith("returned"), {"tell": "callable", "weighted": False}),
    (
        lambda c: c.aux and not has(c, "count_window_ahead") and c.tell != "equal",
        {"strategy": lambda c: (*c.strategy, ("count_window_ahead", True))},
    ),
    (lambda c: c.aux and c.loss_reduction == "sum", {"aux": False}),
    (lambda c: has(c, "count_window_ahead"), {"skip": (), "hooks": dropped("hooks", "zero_in_mid_window")}),
    (lambda c: c.gap == "rank" and c.tell == "equal", {"gap": None}),
    (lambda c: c.thaw is not None, {"frozen": None, "callbacks": dropped("callbacks", "finetuning")}),
    (lambda c: "finetuning" in c.callbacks, {"frozen": None, "optimizer": "sgd", "schedule": None}),
    (lambda c: c.frozen == "embedding", {"parts": dropped("parts", "tied")}),
    (
        lambda c: "swa" in c.callbacks,
        {
            "callbacks": dropped("callbacks", "ema", "finetuning"),
            "schedule": None,
            "optimizer": "sgd",
            "norm": lambda c: None if c.norm == "batch" else c.norm,
            "epochs": lambda c: max(c.epochs, 2),
            "trainer": dropped("trainer", "max_steps"),
            "stops": (),
        },
    ),
    (lambda c: "early" in c.callbacks, {"callbacks": dropped("callbacks", "swa"), "stops": ()}),
    (lambda c: "early" in c.callbacks, {"epochs": lambda c: max(c.epochs, 2)}),
    (lambda c: "ema" in c.callbacks and c.stops, {"stops": ()}),
    (
        lambda c: c.more_batches > 0,
        {"trainer": dropped("trainer", "limit_train_batches"), "stops": (), "skip": ()},
    ),
    (lambda c: c.more_batches > 0 and c.norm == "batch", {"norm": "layer"}),
    (
        lambda c: c.more_batches > 0 and has(c, "uneven_inputs"),
        {
            "hooks": dropped("hooks", "swap_in_mid_window"),
            "thaw": lambda c: None if c.thaw != "epoch" else c.thaw,
        },
    ),
    (lambda c: c.stream, {"trainer": dropped("trainer", "limit_train_batches")}),
    (lambda c: c.stream and "swa" in c.callbacks, {"stream": False}),
    (lambda c: c.skip and any(s >= c.num_batches for s in c.skip), {"skip": ()}),
    (lambda c: c.skip, {"stops": ()}),
    (
        lambda c: c.engine == "ddp",
        {
            "fits": (),
            "strategy": dropped(
                "strategy",
                "reshard_during_accumulation",
                "reshard_after_forward",
                "defer_fsdp_grad_sync",
                "cpu_offload",
                "prefetch",
            ),
        },
    ),
    (lambda c: c.engine != "ddp", {"strategy": dropped("strategy", "ddp_kwargs")}),
    (lambda c: c.fits, {"strategy": dropped("strategy", "defer_fsdp_grad_sync")}),
    (
        lambda c: c.engine != "hsdp" and has(c, "defer_fsdp_grad_sync", "all_reduce"),
        {"strategy": dropped("strategy", "defer_fsdp_grad_sync")},
    ),
    (
        lambda c: (
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
    (lambda c: c.num_ranks == 4, {"stops": ()}),
    (lambda c: len(c.accumulation) > 1, {"epochs": lambda c: max(c.epochs, 2)}),
    # A window that a stop leaves open begins again, with what its forwards have counted: `tests.resume.search`
    # stops there.
    (lambda c: c.stops, {"stops": _window_ends}),
    (lambda c: c.stops, {"stops": lambda c: tuple(s for s in c.stops if s < c.epochs * c.num_batches)}),
    (
        lambda c: c.stops,
        {"callbacks": dropped("callbacks", "early"), "trainer": dropped("trainer", "max_steps")},
    ),
]
