"""The space of training runs that the search draws from, and a draw by seed and number.

A case is small: `as_dict` holds only what differs from the defaults, and `Case(**that)` is the case again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. The defaults are the simplest run there is.

    Attributes:
        seed: Of the initial weights and of the data.
        engine: "fsdp2", "ddp", or "hsdp" on four ranks.
        task: What is predicted, "tokens" or "rows".
        container: How the module holds its blocks, and how it calls them.
        output: What a block returns.
        norm: Normalisation in front of the head; "batch" is one of micro-batches.
        parts: Extra parameters: see `Net`.
        counter: A buffer that counts forwards and scales the output: "persistent" or "transient".
        frozen: What is not trained: "embedding", "block" or "biases".
        thaw: When a part that was frozen is unfrozen, or the other way round: "epoch", "window" or "mid_window".
        penalty: A loss on weights in `training_step`: "full_tensor".
        batch: What a batch looks like.
        num_batches: Micro-batches of an epoch on each rank.
        more_batches: Batches that rank 0 has more than the others.
        stream: The loader does not know its length.
        gap: What has no label token: some "micro_batches", one "rank" or one "window".
        epochs: Of the fit.
        accumulation: Micro-batches a window; several: a `GradientAccumulationScheduler`.
        tell: How the strategy learns the count. "equal" is `per_token_loss=False`.
        weighted: The loss has class weights, and the count is their sum.
        loss_reduction: What `training_step` returns.
        label_shift: Leading label positions that the loss drops.
        aux: The loss holds a part that is no token loss.
        forwards: Forwards of the module for one loss.
        optimizer: "sgd", "groups" of parameters, "adam" or "nesterov".
        schedule: A learning rate schedule, by "step" or "epoch".
        clip: The Trainer's clipping, "norm" or "value".
        hooks: What the module's hooks do: see `Hooks` in `ranks.py`.
        skip: Indices of batches whose `training_step` returns None.
        manual: Manual optimization, see `reference.py`; None is automatic.
        manual_clip: How it clips: "strategy", "self" or "torch".
        callbacks: Callbacks of the Trainer.
        stops: Micro-batches after which the fit is stopped and resumed.
        strategy: More options of the strategy.
        trainer: More options of the Trainer.
    """

    seed: int = 0
    engine: str = "fsdp2"
    task: str = "tokens"
    container: str = "list"
    output: str = "tensor"
    norm: str | None = None
    parts: tuple[str, ...] = ()
    counter: str | None = None
    frozen: str | None = None
    thaw: str | None = None
    penalty: str | None = None
    batch: str = "dict"
    num_batches: int = 3
    more_batches: int = 0
    stream: bool = False
    gap: str | None = None
    epochs: int = 1
    accumulation: tuple[int, ...] = (1,)
    tell: str = "labels"
    weighted: bool = False
    loss_reduction: str = "mean"
    label_shift: int = 0
    aux: bool = False
    forwards: int = 1
    optimizer: str = "sgd"
    schedule: str | None = None
    clip: str | None = None
    hooks: tuple[str, ...] = ()
    skip: tuple[int, ...] = ()
    manual: str | None = None
    manual_clip: str | None = None
    callbacks: tuple[str, ...] = ()
    stops: tuple[int, ...] = ()
    strategy: tuple[tuple[str, Any], ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Processes, each with its own data."""
        return 4 if self.engine == "hsdp" else 2

    def accumulates(self, epoch: int) -> int:
        """Micro-batches of a window in this epoch."""
        return self.accumulation[min(epoch, len(self.accumulation) - 1)]

    def num_batches_of(self, rank: int) -> int:
        """Micro-batches of an epoch on a rank."""
        return self.num_batches + (self.more_batches if rank == 0 else 0)

    def as_dict(self) -> dict[str, Any]:
        """What differs from the defaults."""
        default = type(self)()
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }


KNOWN: tuple[str, ...] = (
    "full_tensor",
    "mid_window",
    "containers",
    "recomputed_buffers",
    "samples",
    "chunks",
    "resumed_twice",
)
"""Traits that a search can leave out."""

VALUES: dict[str, Callable[[random.Random], Any]] = {
    "engine": lambda rng: rng.choice(["ddp", "ddp", "ddp", "ddp", "ddp", "ddp", "hsdp"]),
    "task": lambda rng: "rows",
    "container": lambda rng: rng.choice(
        ["sequential", "groups", "iterated", "indexed", "dict", "nested", "reused", "dict_of_groups", "direct"]
    ),
    "output": lambda rng: rng.choice(["tuple", "dict"]),
    "norm": lambda rng: rng.choice(["layer", "batch"]),
    "parts": lambda rng: _some(rng, ["tied", "scalar", "vector", "gate", "unused", "sometimes", "empty", "teacher"]),
    "counter": lambda rng: rng.choice(["persistent", "transient"]),
    "frozen": lambda rng: rng.choice(["embedding", "block", "biases"]),
    "thaw": lambda rng: rng.choice(["epoch", "window", "mid_window"]),
    "penalty": lambda rng: "full_tensor",
    "batch": lambda rng: rng.choice(["tuple", "list", "nested", "beside", "object"]),
    "more_batches": lambda rng: rng.randint(1, 3),
    "stream": lambda rng: True,
    "gap": lambda rng: rng.choice(["micro_batches", "micro_batches", "rank", "window"]),
    "epochs": lambda rng: rng.choice([2, 2, 3]),
    "accumulation": lambda rng: rng.choice([(2,), (2,), (3,), (4,), (2, 3), (1, 2), (3, 1)]),
    "tell": lambda rng: rng.choice(
        ["key", "callable", "callable_tensor", "returned", "returned_tensor", "equal", "samples"]
    ),
    "weighted": lambda rng: True,
    "loss_reduction": lambda rng: "sum",
    "label_shift": lambda rng: 1,
    "aux": lambda rng: True,
    "forwards": lambda rng: 2,
    "optimizer": lambda rng: rng.choice(["groups", "adam", "nesterov"]),
    "schedule": lambda rng: rng.choice(["step", "epoch"]),
    "clip": lambda rng: rng.choice(["norm", "norm", "value"]),
    "hooks": lambda rng: _some(
        rng,
        [
            "scale_before_step",
            "decay_before_step",
            "clamp_before_step",
            "penalty_before_step",
            "double_after_backward",
            "drop_after_backward",
            "norm_after_backward",
            "own_clipping",
            "clip_by_own_rule",
            "warm_up",
            "zero_in_mid_window",
            "zero_set_to_zero",
            "norm_before_step",
            "swap_in_mid_window",
        ],
    ),
    "skip": lambda rng: tuple(sorted(rng.sample(range(4), rng.choice([1, 1, 2])))),
    "manual": lambda rng: rng.choice(
        ["each", "window", "unclosed", "add", "two_losses", "gan", "gan_window", "two_optimizers", "chunks", "closure"]
    ),
    "callbacks": lambda rng: _some(
        rng, ["checkpoint", "save_in_mid_window", "ema", "swa", "monitor", "early", "finetuning", "validate"]
    ),
    "stops": lambda rng: tuple(sorted(rng.sample(range(1, 6), rng.choice([1, 1, 2])))),
    "strategy": lambda rng: _options(
        rng,
        {
            "reshard_during_accumulation": [True, False],
            "reshard_after_forward": [False],
            "defer_fsdp_grad_sync": [False, "all_reduce"],
            "count_window_ahead": [True],
            "activation_checkpointing": [True, "selective"],
            "cpu_offload": [True],
            "prefetch": [1, 2],
            "track_grad_norm": [True],
            "error_if_nonfinite": [True],
            "save_distributed_checkpoint": [True, False],
            "ddp_kwargs": [(("find_unused_parameters", True),), (("gradient_as_bucket_view", True),)],
        },
    ),
    "trainer": lambda rng: _options(
        rng,
        {
            "max_steps": [2, 3],
            "limit_train_batches": [2],
            "num_sanity_val_steps": [1],
            "precision": ["32-true"],
            "reload_dataloaders_every_n_epochs": [1],
            "detect_anomaly": [True],
            "log_every_n_steps": [1],
            "inference_mode": [False],
        },
    ),
}
"""What a trait becomes when it is drawn. Those that are not drawn stay at their defaults."""


def _some(rng: random.Random, values: list[str]) -> tuple[str, ...]:
    return tuple(sorted(rng.sample(values, rng.choice([1, 1, 2, 3]))))


def _options(rng: random.Random, values: dict[str, list[Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, rng.choice(values[name])) for name in _some(rng, list(values)))


def draw_case(seed: int, number: int, without: frozenset[str] = frozenset()) -> Case:
    """The case of this number; `without` names traits of `KNOWN` to leave out."""
    rng = random.Random(f"{seed}-{number}")
    density = rng.choice([0.1, 0.2, 0.3])
    drawn = {name: value(rng) for name, value in VALUES.items() if rng.random() < density}
    if rng.random() < 0.5 and "accumulation" not in drawn:
        drawn["accumulation"] = VALUES["accumulation"](rng)
    if "more_batches" in drawn and rng.random() < 0.85:
        drawn["strategy"] = (*drawn.get("strategy", ()), ("uneven_inputs", "pad"))
    if rng.random() < 0.8:
        drawn.pop("skip", None)  # Lightning refuses it on several ranks
    case = Case(seed=rng.randrange(10**6), num_batches=rng.randint(2, 5), **drawn)
    return made_valid(case, without)


def made_valid(case: Case, without: frozenset[str] = frozenset()) -> Case:
    """The case without what has no meaning beside the rest of it; the order of the rules matters."""
    changes: dict[str, Any] = {}
    for applies, values in _RULES:
        if applies(case, without):
            changes = {name: value(case) if callable(value) else value for name, value in values.items()}
            case = replace(case, **changes)
    return case


def _without(name: str, *values: str) -> Callable[[Case], tuple[Any, ...]]:
    """A function of a case: what it has under this name, without these values."""

    def kept(case: Case) -> tuple[Any, ...]:
        return tuple(
            value for value in getattr(case, name) if (value[0] if isinstance(value, tuple) else value) not in values
        )

    return kept


def has(case: Case, option: str, *values: Any) -> bool:
    """Whether the strategy or the Trainer is given this option (with one of these values)."""
    given = {**dict(case.strategy), **dict(case.trainer)}
    return option in given and (not values or given[option] in values)


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
                "hooks", "own_clipping", "clip_by_own_rule", "warm_up", "zero_in_mid_window", "swap_in_mid_window"
            ),
            "trainer": _without("trainer", "max_steps"),
            "callbacks": _without("callbacks", "finetuning", "swa"),
            "thaw": None,
            "stops": (),
        },
    ),
    (lambda c, out: c.manual in ("gan", "gan_window", "two_optimizers"), {"callbacks": _without("callbacks", "swa")}),
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
    (lambda c, out: "warm_up" in c.hooks, {"schedule": None, "callbacks": _without("callbacks", "swa", "finetuning")}),
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
    (lambda c, out: has(c, "count_window_ahead"), {"skip": (), "hooks": _without("hooks", "zero_in_mid_window")}),
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
        {"hooks": _without("hooks", "swap_in_mid_window"), "thaw": lambda c: None if c.thaw != "epoch" else c.thaw},
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
            "strategy": _without(
                "strategy",
                "reshard_during_accumulation",
                "reshard_after_forward",
                "defer_fsdp_grad_sync",
                "cpu_offload",
                "prefetch",
            )
        },
    ),
    (lambda c, out: c.engine != "ddp", {"strategy": _without("strategy", "ddp_kwargs")}),
    (
        lambda c, out: c.engine != "hsdp" and has(c, "defer_fsdp_grad_sync", "all_reduce"),
        {"strategy": _without("strategy", "defer_fsdp_grad_sync")},
    ),
    (
        lambda c, out: (
            c.engine == "ddp"
            and not has(c, "ddp_kwargs")
            and (
                {"unused", "sometimes"} & set(c.parts) or c.thaw or c.manual is not None or "finetuning" in c.callbacks
            )
        ),
        {"strategy": lambda c: (*c.strategy, ("ddp_kwargs", (("find_unused_parameters", True),)))},
    ),
    (lambda c, out: c.num_ranks == 4, {"stops": ()}),
    (lambda c, out: len(c.accumulation) > 1, {"epochs": lambda c: max(c.epochs, 2)}),
    (lambda c, out: c.stops, {"stops": lambda c: tuple(s for s in c.stops if s < c.epochs * c.num_batches)}),
    (
        lambda c, out: c.stops,
        {"callbacks": _without("callbacks", "early"), "trainer": _without("trainer", "max_steps")},
    ),
]
