"""Run cases, judge what comes of them, and make a finding small."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning_automodel
from tests.rank_pool import RankError, RankPool
from tests.search.cases import Case, has
from tests.search.drawing import draw_case
from tests.search.kinds import DOCUMENTED, KIND_REFUSALS, KIND_WARNED
from tests.search.ranks import in_folder, train
from tests.search.reference import Outcome, Reference
from tests.search.rules import made_valid
from tests.trainer.exactness import relative_error

TOLERANCE = 1e-12
ROUNDING = 1e-9
"""What may be rounding that a chaotic run has made larger; anything above it is wrong."""
TIMEOUT_S = 120.0
PACKAGE = str(Path(lightning_automodel.__file__).parent)

REFUSALS: dict[str, Callable[[Case], Any]] = {
    r"The train data of .* ends with batch": lambda c: c.more_batches and not has(c, "uneven_inputs"),
    r"DistributedDataParallel did not reduce all gradients": lambda c: (
        {"empty", "unused", "sometimes"} & set(c.parts) or c.manual in ("gan", "gan_window")
    ),
    r"Gradients were zeroed in the middle of an accumulation window": lambda c: (
        c.engine == "ddp"
        and (
            ("sometimes" in c.parts and "zero_in_mid_window" in c.hooks)
            # Lightning zeroes gradients before it validates.
            or ("validate" in c.callbacks and c.manual == "gan_window")
        )
    ),
    r"activation_checkpointing=.* finds no blocks": lambda c: (
        c.container in ("direct", "dict", "dict_of_groups")
    ),
    r"got a gradient that it does not reduce": lambda c: (
        c.engine != "ddp"
        and (
            c.penalty == "full_tensor"
            or c.container in ("iterated", "indexed")
            # Which takes a state dict.
            or any(write.startswith(("teacher_load@", "unit_load@")) for write in c.writes)
        )
    ),
    r"Selective activation checkpointing recomputes a block for one backward alone": lambda c: (
        has(c, "activation_checkpointing") and c.inner
    ),
    r"manual_backward is called again for the same batch": lambda c: c.manual == "chunks",
    # Torch's own: the option leaves what an evaluation in mid-window has gathered, and the hook writes to
    # that.
    r"copy_.default got mixed torch.Tensor and DTensor": lambda c: (
        "swap_in_mid_window" in c.hooks and has(c, "reshard_after_forward")
    ),
    r"Gradients of experts that are spread over ranks": lambda c: (
        c.experts and any(each.startswith("parameters@") for each in c.foreign)
    ),
    # Lightning's own.
    r"Skipping the `training_step` by returning None in distributed": lambda c: c.skip,
    **KIND_REFUSALS,
}
"""Messages of errors that a case may end in, and which cases may."""

WARNED: dict[str, Callable[[Case], Any]] = {
    r"Lightning zeroes gradients before it validates": lambda c: (
        "validate" in c.callbacks and c.manual in ("add", "window", "unclosed", "gan_window")
    ),
    **KIND_WARNED,
}
"""Warnings beside which weights may differ, and in which cases."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a case.

    Attributes:
        kind: "differs", "foreign", "not_everywhere", "unexpected", "hangs", "accepted".
        text: The rest of the story.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What came of a case: "exact", the pattern of a message, what is documented, or a finding."""

    what: str
    finding: Finding | None = None


def judge(pool: RankPool, case: Case, run: Callable[[Case, str], Outcome] = train) -> Verdict:
    """Run a case on ranks and in one process."""
    try:
        with in_folder() as folder:
            outcomes = pool.run(run, case, folder, timeout_s=TIMEOUT_S)
    except TimeoutError as error:
        return Verdict("", Finding("hangs", str(error)))
    except RankError as error:
        return _judge_failure(case, error)
    expected = Reference(case).run()
    messages = [message for outcome in outcomes for message in outcome.warnings]
    for rank, outcome in enumerate(outcomes):
        wrong = "; ".join(differences(case, outcome, expected, rank))
        if wrong and not any(differences(case, outcome, expected, rank, ROUNDING)):
            # Chaotic, as a GAN may be: how far apart are two single processes that begin a rounding error
            # apart?
            disturbed = Reference(case, disturbance=1e-15).run()
            apart = max(
                relative_error(disturbed.weights[name], weight)
                for name, weight in expected.weights.items()
                if weight.numel()
            )
            wrong = "; ".join(differences(case, outcome, expected, rank, max(TOLERANCE, 10 * apart)))
        if wrong:
            for pattern, applies in WARNED.items():
                if applies(case) and any(re.search(pattern, message) for message in messages):
                    return Verdict(pattern)
            for reason, applies in DOCUMENTED.items():
                if applies(case):
                    return Verdict(reason)
            return Verdict("", Finding("differs", f"rank {rank}: {wrong}"))
    return Verdict("exact")


def differences(
    case: Case, outcome: Outcome, expected: Outcome, rank: int, tolerance: float = TOLERANCE
) -> Iterator[str]:
    """What differs from the reference."""
    if outcome.weights.keys() != expected.weights.keys():
        yield f"weights of {outcome.weights.keys() ^ expected.weights.keys()}"
        return
    for name, weight in expected.weights.items():
        if weight.numel() and (error := relative_error(outcome.weights[name], weight)) > tolerance:
            yield f"{name} {error:.1e}"
    for name, buffer in expected.buffers[rank].items():
        if name.endswith("num_forwards") and relative_error(outcome.buffers[name], buffer) > tolerance:
            yield f"{name} is {float(outcome.buffers[name]):g} instead of {float(buffer):g}"
    if len(outcome.norms) != len(expected.norms):
        yield f"{len(outcome.norms)} norms instead of {len(expected.norms)}"
    elif _largest_error(outcome.norms, expected.norms) > 10 * tolerance:
        yield f"norms {outcome.norms} instead of {expected.norms}"
    # A rank without data has padding batches, whose gradients nobody asks for.
    if not case.more_batches:
        # Since it was resumed.
        own = expected.foreign[rank][-len(outcome.foreign) :] if outcome.foreign else []
        if len(own) != len(outcome.foreign) or (own == [] and expected.foreign[rank] and not case.stops):
            yield f"{len(outcome.foreign)} foreign gradients instead of {len(expected.foreign[rank])}"
        largest = max((norm for of_rank in expected.foreign for norm in of_rank), default=0.0)
        error = _largest_error(outcome.foreign, own, floor=1e-3 * largest)
        if error > 10 * tolerance:
            yield f"foreign gradients {error:.1e}"
    if case.manual is None and not case.stops:
        yield from _differences_of_report(case, outcome, expected)


def _largest_error(actual: list[float], expected: list[float], floor: float = 0.0) -> float:
    """The largest relative error of norms; infinite for a NaN.

    A norm that should be zero is rounding, below 1e-12: BatchNorm of one row takes all gradients of a rank, or of all
    ranks. Norms of these networks are otherwise far above 1e-5.
    """
    floor = max(floor, 1e-5)
    pairs = [(a, b) for a, b in zip(actual, expected, strict=False) if not max(a, b) < 1e-12]
    errors = [abs(a - b) / max(b, floor) for a, b in pairs]
    return max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)


def _differences_of_report(case: Case, outcome: Outcome, expected: Outcome) -> Iterator[str]:
    if outcome.last is None or expected.last is None:
        if outcome.last != expected.last:
            yield f"last_step {outcome.last} instead of {expected.last}"
        return
    names = ("num_label_tokens", "num_micro_batches", "loss")
    for name, actual, right in zip(names, outcome.last, expected.last, strict=True):
        if name == "num_label_tokens" and (case.tell == "equal" or (case.soft and case.tell == "labels")):
            continue
        if name == "loss" and (case.aux or not expected.last[0]):
            continue
        if case.weighted and name == "num_label_tokens" and abs(actual - right) < 1:
            continue  # the report's count is an integer
        # Sums over ranks may be float32.
        if relative_error(actual, right) > 1e-6:
            yield f"last_step.{name} {actual} instead of {right}"


def _judge_failure(case: Case, error: RankError) -> Verdict:
    if "hang" in str(error).partition("\n")[0]:
        return Verdict("", Finding("hangs", str(error)))
    if len(error.failures) < case.num_ranks:
        return Verdict("", Finding("not_everywhere", str(error)))
    messages = [_raised(text) for text in error.failures.values()]
    causes = [(place, line) for place, line in messages if not line.startswith("RankFailedError")]
    for _, line in causes or messages:
        for pattern, applies in REFUSALS.items():
            if re.search(pattern, line, re.DOTALL) and applies(case):
                return Verdict(pattern)
    for place, line in messages:
        if not place.startswith(PACKAGE):
            return Verdict("", Finding("foreign", f"{line}\n{error}"))
    return Verdict("", Finding("unexpected", f"{(causes or messages)[0][1]}\n{error}"))


def _raised(text: str) -> tuple[str, str]:
    """File that has raised the last exception of a traceback, and the exception's text."""
    last = text.rpartition("Traceback (most recent call last):")[2]
    places = list(re.finditer(r'^  File "([^"]+)", line \d+.*$', last, re.MULTILINE))
    if not places:
        return "", text.strip()[-300:]
    body = last[places[-1].end() :]
    found = re.search(
        r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Stop\w*)\b.*", body, re.MULTILINE | re.DOTALL
    )
    line = found[0].strip() if found else body.strip()
    return places[-1][1], line.rpartition(".")[2] if line.count(":") == 0 else line


@dataclass
class Search:
    """A search over cases by number.

    Args:
        pools: By number of ranks.
        seed: Of all cases.
        kinds: Names of `KINDS` that every case has.
    """

    pools: Callable[[int], RankPool]
    seed: int
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.tally: Counter[str] = Counter()

    def judge(self, number: int) -> tuple[Case, Verdict]:
        """The case of a number and what came of it."""
        case = draw_case(self.seed, number, self.kinds)
        verdict = judge(self.pools(case.num_ranks), case)
        self.tally[verdict.what or "finding"] += 1
        return case, verdict

    def smaller(self, case: Case, finding: Finding, seconds: float = 60.0) -> Case:
        """A case with fewer traits and the same kind of finding."""
        deadline = time.monotonic() + seconds
        shrunk = True
        while shrunk and time.monotonic() < deadline:
            shrunk = False
            for candidate in _smaller(case):
                if time.monotonic() > deadline:
                    break
                found = judge(self.pools(candidate.num_ranks), candidate).finding
                if found is not None and found.kind == finding.kind and _same(found, finding):
                    case = candidate
                    shrunk = True
                    break
        return case


def _same(one: Finding, other: Finding) -> bool:
    """Whether two findings are one, as far as can be told."""
    if one.kind in ("foreign", "unexpected"):
        return one.text[:60] == other.text[:60]
    return True


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one trait less, or a smaller one."""
    default = Case()
    for name, value in case.as_dict().items():
        if name in ("seed", "num_batches"):
            continue
        smaller: list[Any] = [getattr(default, name)]
        if isinstance(value, tuple) and len(value) > 1:
            smaller += [tuple(x for x in value if x is not left) for left in value]
        if name == "epochs" and value > 2:
            smaller.append(2)
        for each in smaller:
            candidate = made_valid(replace(case, **{name: each}))
            if candidate != case and len(repr(candidate.as_dict())) < len(repr(case.as_dict())):
                yield candidate
    for num_batches in range(1, case.num_batches):
        yield made_valid(replace(case, num_batches=num_batches))
