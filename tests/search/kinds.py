"""Kinds of user code that meet the strategy's own work: what is drawn, beside what it has no meaning, how it may end.

`user_code.py` holds the code. A case has none of these kinds, one or two.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from tests.search.cases import Case, dropped
from tests.search.user_code import SNIPPETS

_IN_STEP = ("before_forward", "after_forward")
_IN_HOOK = ("after_backward", "before_step", "batch_end", "validation")
_TEACHING = ("data", "mul", "lerp", "foreach", "load")


def _foreign(rng: random.Random) -> tuple[str, ...]:
    drawn = set()
    for _ in range(rng.choice([1, 1, 2])):
        what = rng.choice(["input", "input", "input", "backward", "forward", "head", "parameters"])
        drawn.add(f"{what}@{rng.choice(_IN_STEP + _IN_HOOK)}")
    return tuple(sorted(drawn))


def _write(rng: random.Random) -> tuple[str, ...]:
    what = rng.choice(["normalize", "clamp", "teacher", "teacher", "unit", "unit", "max_norm"])
    if what == "max_norm":
        return (what,)
    if what in ("teacher", "unit"):
        place = rng.choice(["step", "forward", "after_forward", "batch_end"])
        return (f"{what}_{rng.choice(_TEACHING)}@{place}",)
    return (
        f"{what}@{rng.choice(['step', 'forward', 'batch_end', 'block' if what == 'clamp' else 'forward'])}",
    )


def one_of(words: str) -> Callable[[random.Random], str]:
    """A drawn trait that is one of these words."""
    return lambda rng: rng.choice(words.split())


def _crossed(*lists: str) -> Callable[[random.Random], str]:
    return lambda rng: "@".join(rng.choice(words.split()) for words in lists)


KINDS: dict[str, Callable[[random.Random], Any]] = {
    "foreign": _foreign,
    "inner": one_of("fgsm virtual penalty grad_norm cam"),
    "writes": _write,
    "alias": _crossed("dict list closure object", "root unit"),
    "backward": one_of(
        "full_hook_scale full_hook_squash pre_hook_scale pre_hook_squash parameter_hook_scale"
        " parameter_hook_squash function_reverse function_clip"
    ),
    "changed": _crossed("append replace fill", "setup configure_model configure_optimizers train_start"),
    "soft": lambda rng: True,
    "negative": lambda rng: True,
    "over_ranks": lambda rng: True,
    "rows": one_of("slice one narrow view assign index fill mask data noise drawn"),
    "snippet": lambda rng: rng.choice(list(SNIPPETS)),
    "functional": one_of("own made"),
}
"""What a kind becomes when it is drawn."""


def draw_kinds(rng: random.Random, wanted: tuple[str, ...] = ()) -> dict[str, Any]:
    """The kinds of a case: `wanted`, or one or two in half of all cases."""
    names = wanted or (rng.sample(list(KINDS), rng.choice([1, 1, 2])) if rng.random() < 0.5 else ())
    return {name: KINDS[name](rng) for name in names}


# --- What has no meaning ----------------------------------------------------------------------------------------------


def _places(case: Case) -> set[str]:
    return {each.partition("@")[2] for each in case.foreign}


def _without_places(*places: str) -> Callable[[Case], tuple[str, ...]]:
    return lambda case: tuple(each for each in case.foreign if each.partition("@")[2] not in places)


def _teaches(case: Case, place: str = "") -> bool:
    """Whether a teacher is updated, which counts how often it happens."""
    return any(re.match(rf"(teacher|unit)_\w+@{place}", each) for each in case.writes)


_GANS = ("gan", "gan_window")
_SEVERAL_LOSSES = (*_GANS, "two_losses", "chunks")

RULES_BEFORE: list[tuple[Callable[[Case], Any], dict[str, Any]]] = [
    (
        lambda c: c.soft,
        {"task": "rows", "gap": None, "tell": lambda c: "callable" if c.tell == "key" else c.tell},
    ),
    (lambda c: c.soft and c.manual in _GANS, {"manual": "each"}),
    # Labels of floats are counted by their elements, as in a regression.
    (lambda c: c.soft and c.tell == "labels" and c.loss_reduction == "sum", {"tell": "callable"}),
    (
        lambda c: c.negative,
        {
            "tell": "returned_tensor",
            "aux": False,
            "soft": False,
            "strategy": dropped("strategy", "count_window_ahead"),
        },
    ),
    (
        lambda c: c.over_ranks,
        {
            "gap": None,
            "loss_reduction": "mean",
            "aux": False,
            "penalty": None,
            "more_batches": 0,
            "skip": (),
            "manual": lambda c: "each" if c.manual in _SEVERAL_LOSSES else c.manual,
        },
    ),
    (
        lambda c: c.changed is not None,
        {
            "stops": (),
            "schedule": None,
            "callbacks": dropped("callbacks", "finetuning", "swa", "ema"),
            "hooks": dropped("hooks", "warm_up"),
        },
    ),
    (
        lambda c: c.changed is not None and c.changed.endswith("train_start"),
        {"optimizer": "sgd", "thaw": None},
    ),
    (lambda c: c.changed is not None and c.frozen == "biases", {"frozen": None}),
    # It needs weights of an embedding, a head and a gate that all train, and their states.
    (
        lambda c: c.snippet is not None,
        {
            "parts": lambda c: tuple(sorted({*c.parts, "gate"} - {"tied"})),
            "optimizer": "adam",
            "frozen": None,
            "thaw": None,
            "stops": (),
            "experts": 0,
            "alias": None,
            "changed": None,
            "callbacks": dropped("callbacks", "finetuning", "swa"),
        },
    ),
    # It divides by a norm, which is zero where nothing is counted.
    (lambda c: c.snippet == "multiplied by a number that was read", {"gap": None}),
    (lambda c: c.rows is not None, {"parts": dropped("parts", "tied")}),
    (
        lambda c: any(each.startswith("teacher_") for each in c.writes),
        {"parts": lambda c: tuple(sorted({*c.parts, "teacher"}))},
    ),
    # One process would have to write once for several forwards of each rank.
    (
        lambda c: _teaches(c, "forward"),
        {"forwards": 1, "foreign": (), "hooks": dropped("hooks", "swap_in_mid_window")},
    ),
    (lambda c: _teaches(c, "forward") and c.inner in ("fgsm", "virtual"), {"inner": None}),
    (
        lambda c: (_teaches(c, "forward") or _teaches(c, "after_forward")) and c.manual in _SEVERAL_LOSSES,
        {"manual": "each"},
    ),
    # Padding batches pass through the step as well, on ranks that have no data.
    # A resumed window begins anew, with what its first micro-batches have written before.
    (lambda c: _teaches(c), {"more_batches": 0, "stops": ()}),
    # One process raises: the first forward has saved what the second one writes.
    (
        lambda c: "normalize@forward" in c.writes,
        {"forwards": 1, "foreign": _without_places("after_forward")},
    ),
    (
        lambda c: "max_norm" in c.writes,
        {"parts": dropped("parts", "tied"), "hooks": dropped("hooks", "swap_in_mid_window")},
    ),
    (lambda c: c.inner is not None and c.manual in (*_GANS, "chunks"), {"inner": None}),
    (lambda c: c.inner in ("cam", "grad_norm"), {"forwards": 1}),
    (lambda c: c.manual in (*_GANS, "chunks", "two_losses"), {"foreign": _without_places("after_backward")}),
    (lambda c: c.manual is not None, {"foreign": _without_places("after_forward")}),
    # EMA validates with averaged weights, and running statistics are each rank's own.
    (lambda c: {"ema", "swa"} & set(c.callbacks), {"foreign": _without_places("validation")}),
    (
        lambda c: "validation" in _places(c),
        {
            "callbacks": lambda c: tuple(sorted({*c.callbacks, "validate"})),
            "trainer": lambda c: (
                *(each for each in c.trainer if each[0] != "inference_mode"),
                ("inference_mode", False),
            ),
            "norm": lambda c: None if c.norm == "batch" else c.norm,
        },
    ),
    # Running statistics are each rank's own until a validation.
    (lambda c: c.snippet == "state dict" and c.norm == "batch", {"norm": None}),
    # The block would write to rows of the embedding, at another time on each rank, and by `.data`, which
    # nothing counts.
    (lambda c: c.functional == "made" and "clamp@block" in c.writes, {"functional": "own"}),
    # What a block computes again in the backward is no longer inside of the functional call.
    (lambda c: c.functional is not None, {"strategy": dropped("strategy", "activation_checkpointing")}),
    # A block that is a part of a unit cannot be called by itself.
    (
        lambda c: (
            c.functional is not None
            and c.container in ("nested", "groups", "iterated", "indexed", "dict_of_groups")
        ),
        {"container": "list"},
    ),
    # A hook on a module's gradients knows tensors alone.
    (lambda c: c.backward is not None and "hook" in c.backward, {"output": "tensor"}),
    (lambda c: c.backward is not None and c.manual in _SEVERAL_LOSSES, {"manual": "each"}),
    (lambda c: c.backward is not None, {"aux": False, "penalty": None}),
]
"""As `rules.made_valid` applies them, before its own; the order matters."""


# --- What they may end in ---------------------------------------------------------------------------------------------

KIND_REFUSALS: dict[str, Callable[[Case], Any]] = {
    r"embeddings with max_norm, whose forward shortens the rows": lambda c: "max_norm" in c.writes,
    r"was used past the module: sharding has replaced this parameter": lambda c: c.alias,
    r"FSDP2 has freed what it had gathered there, so that the write is lost": lambda c: c.writes,
    # torch's own: a gradient by the module's parameter, where the forward has used the one that was kept
    # past it.
    r"appears to not have been used in the graph": lambda c: c.alias and c.foreign,
    r"have gradient hooks .* which it never calls": lambda c: (
        c.backward and c.backward.startswith("parameter_hook")
    ),
    r"were replaced after the module was distributed": lambda c: (
        c.changed and c.changed.startswith("replace")
    ),
    r"as it was distributed|DistributedDataParallel did not reduce all gradients": lambda c: (
        c.changed and c.changed.startswith(("append", "replace"))
    ),
    r"must be finite and not negative, got -": lambda c: c.negative,
    r"_foreach_.* got mixed torch.Tensor and DTensor": lambda c: c.writes and c.experts > 1,
    r"have gradients of a plain loss.backward\(\), which nobody averages": lambda c: (
        c.engine == "ddp"
        and c.snippet
        and c.snippet.endswith(("with gradient", "by backward", "backward to inputs"))
    ),
    r"torch.func.functional_call puts other tensors in the place": lambda c: c.functional == "made",
}
"""Messages of errors that name the kind, and which cases may end in them."""

KIND_WARNED: dict[str, Callable[[Case], Any]] = {
    r"is gathered from all ranks, with gradients, and each rank's weighs the same": lambda c: c.over_ranks,
    r"backward hook": lambda c: c.backward and "squash" in c.backward,
}
"""Warnings that name the kind, beside which weights may differ, and in which cases."""

DOCUMENTED: dict[str, Callable[[Case], Any]] = {
    "an autograd function that is not linear sees gradients of count x loss": lambda c: (
        c.backward == "function_clip"
    ),
}
"""What differs without a message; `ExactnessCheck` finds it."""
