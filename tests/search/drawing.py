"""A draw of a case by seed and number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.search.cases import Case
from tests.search.kinds import draw_kinds
from tests.search.rules import made_valid

VALUES: dict[str, Callable[[random.Random], Any]] = {
    "engine": lambda rng: rng.choice(["ddp", "ddp", "ddp", "ddp", "ddp", "ddp", "hsdp"]),
    "task": lambda rng: "rows",
    "container": lambda rng: rng.choice(
        [
            "sequential",
            "groups",
            "iterated",
            "indexed",
            "dict",
            "nested",
            "reused",
            "dict_of_groups",
            "direct",
        ]
    ),
    "output": lambda rng: rng.choice(["tuple", "dict"]),
    "norm": lambda rng: rng.choice(["layer", "batch"]),
    "parts": lambda rng: _some(
        rng, ["tied", "scalar", "vector", "gate", "unused", "sometimes", "empty", "teacher"]
    ),
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
        [
            "each",
            "window",
            "unclosed",
            "add",
            "two_losses",
            "gan",
            "gan_window",
            "two_optimizers",
            "chunks",
            "closure",
        ]
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


EXPERTS = "experts"
"""Among the kinds of a search: experts are spread wherever they can be."""


def _some(rng: random.Random, values: list[str]) -> tuple[str, ...]:
    return tuple(sorted(rng.sample(values, rng.choice([1, 1, 2, 3]))))


def _options(rng: random.Random, values: dict[str, list[Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, rng.choice(values[name])) for name in _some(rng, list(values)))


def _fits(rng: random.Random) -> tuple[str, ...]:
    if rng.random() < 0.6:
        return ()
    return tuple(rng.choice(["nothing", "nothing", "gradients", "all"]) for _ in range(3))


def _experts(rng: random.Random, wanted: bool) -> int:
    return rng.choice([2, 2, 4]) if wanted or rng.random() < 0.2 else 0


def draw_case(seed: int, number: int, kinds: tuple[str, ...] = ()) -> Case:
    """The case of this number.

    Args:
        seed: Of the search.
        number: Of the case.
        kinds: Kinds of user code (`kinds.KINDS`) that it has; by default the number decides. "experts" are
            no user code: with it, experts are spread unless the engine is DDP.
    """
    rng = random.Random(f"{seed}-{number}")
    density = rng.choice([0.1, 0.2, 0.3])
    drawn = {name: value(rng) for name, value in VALUES.items() if rng.random() < density}
    if rng.random() < 0.5 and "accumulation" not in drawn:
        drawn["accumulation"] = VALUES["accumulation"](rng)
    if "more_batches" in drawn and rng.random() < 0.85:
        drawn["strategy"] = (*drawn.get("strategy", ()), ("uneven_inputs", "pad"))
    if rng.random() < 0.8:
        drawn.pop("skip", None)  # Lightning refuses it on several ranks
    case = Case(
        seed=rng.randrange(10**6),
        num_batches=rng.randint(2, 5),
        **drawn,
        # Drawn apart, so that a number has the same other traits with and without these.
        fits=_fits(random.Random(f"{seed}-{number}-fits")),
        experts=_experts(random.Random(f"{seed}-{number}-experts"), EXPERTS in kinds),
        manual_clip=random.Random(f"{seed}-{number}-clip").choice([None, "strategy", "self", "torch"]),
        **draw_kinds(
            random.Random(f"{seed}-{number}-kinds"), tuple(kind for kind in kinds if kind != EXPERTS)
        ),
    )
    return made_valid(case)
