"""A draw of a case by seed and number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.search.cases import Case
from tests.search.kinds import draw_kinds, one_of
from tests.search.rules import made_valid


def _some(words: str) -> Callable[[random.Random], tuple[str, ...]]:
    """A drawn trait that is some of these words."""
    return lambda rng: _sample(rng, words.split())


def _sample(rng: random.Random, values: list[str]) -> tuple[str, ...]:
    return tuple(sorted(rng.sample(values, rng.choice([1, 1, 2, 3]))))


def _options(values: dict[str, list[Any]]) -> Callable[[random.Random], tuple[tuple[str, Any], ...]]:
    return lambda rng: tuple((name, rng.choice(values[name])) for name in _sample(rng, list(values)))


STRATEGY_OPTIONS: dict[str, list[Any]] = {
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
}
TRAINER_OPTIONS: dict[str, list[Any]] = {
    "max_steps": [2, 3],
    "limit_train_batches": [2],
    "num_sanity_val_steps": [1],
    "precision": ["32-true"],
    "reload_dataloaders_every_n_epochs": [1],
    "detect_anomaly": [True],
    "log_every_n_steps": [1],
    "inference_mode": [False],
}
VALUES: dict[str, Callable[[random.Random], Any]] = {
    "engine": one_of("ddp ddp ddp ddp ddp ddp hsdp"),
    "task": lambda rng: "rows",
    "container": one_of("sequential groups iterated indexed dict nested reused dict_of_groups direct"),
    "output": one_of("tuple dict"),
    "norm": one_of("layer batch"),
    "parts": _some("tied scalar vector gate unused sometimes empty teacher"),
    "counter": one_of("persistent transient"),
    "frozen": one_of("embedding block biases"),
    "thaw": one_of("epoch window mid_window"),
    "penalty": lambda rng: "full_tensor",
    "batch": one_of("tuple list nested beside object"),
    "more_batches": lambda rng: rng.randint(1, 3),
    "stream": lambda rng: True,
    "gap": one_of("micro_batches micro_batches rank window"),
    "epochs": lambda rng: rng.choice([2, 2, 3]),
    "accumulation": lambda rng: rng.choice([(2,), (2,), (3,), (4,), (2, 3), (1, 2), (3, 1)]),
    "tell": one_of("key callable callable_tensor returned returned_tensor equal samples"),
    "weighted": lambda rng: True,
    "loss_reduction": lambda rng: "sum",
    "label_shift": lambda rng: 1,
    "aux": lambda rng: True,
    "forwards": lambda rng: 2,
    "optimizer": one_of("groups adam nesterov"),
    "schedule": one_of("step epoch"),
    "clip": one_of("norm norm value"),
    "hooks": _some(
        "scale_before_step decay_before_step clamp_before_step penalty_before_step double_after_backward"
        " drop_after_backward norm_after_backward own_clipping clip_by_own_rule warm_up zero_in_mid_window"
        " zero_set_to_zero norm_before_step swap_in_mid_window"
    ),
    "skip": lambda rng: tuple(sorted(rng.sample(range(4), rng.choice([1, 1, 2])))),
    "manual": one_of("each window unclosed add two_losses gan gan_window two_optimizers chunks closure"),
    "callbacks": _some("checkpoint save_in_mid_window ema swa monitor early finetuning validate"),
    "stops": lambda rng: tuple(sorted(rng.sample(range(1, 6), rng.choice([1, 1, 2])))),
    "strategy": _options(STRATEGY_OPTIONS),
    "trainer": _options(TRAINER_OPTIONS),
}
"""What a trait becomes when it is drawn. Those that are not drawn stay at their defaults."""


EXPERTS = "experts"
"""Among the kinds of a search: experts are spread wherever they can be."""


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
