"""What user code writes to weights is never lost, as in one process, whether they are gathered at that time or not.

Parameters that sharding has replaced, reached past the module, and parameters that no module knows are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Rows
from torch.distributed.tensor import distribute_tensor

from lightning_automodel.sharding.replaced import Replaced
from lightning_automodel.sharding.shards import Shard, make_shard
from tests.rank_pool import RankError, RankPool
from tests.sharding.writers import (
    PLACES,
    UPDATES,
    AveragesByTorch,
    AveragesIntoBuffers,
    Block,
    Clamps,
    Freezes,
    InForward,
    NormalisesUnits,
    StepsBetweenForwards,
    Teaches,
    TeachesInParallel,
    WassersteinGAN,
    Writer,
    WritesHead,
    WritesHeld,
    WritesUntrained,
    fit,
    fit_or_refusal,
    fit_plainly,
    train,
)
from tests.trainer.exactness import assert_exact
from tests.trainer.runs import STRATEGIES, first_by_default

CASES: dict[str, tuple[Callable[..., Writer], tuple[Any, ...]]] = {
    **{f"teacher-{update}-{place}": (Teaches, (update, place)) for update in UPDATES for place in PLACES},
    "teacher-averaged-by-torch": (AveragesByTorch, ()),
    **{f"normalised-{way}": (WritesHead, (way, "start")) for way in ("swav", "data", "vector", "reset")},
    "normalised-unit": (NormalisesUnits, ("start",)),
    "normalised-between": (WritesHead, ("shrunk", "end")),
    "normalised-in-forward": (InForward, ()),
    "freezes": (Freezes, ()),
    "averaged-into-buffers": (AveragesIntoBuffers, ("recipe",)),
    "averages-shards-into-buffers": (AveragesIntoBuffers, ("shards",)),
    **{
        f"clamped-{place}": (Clamps, (place,))
        for place in ("start", "end", "batch_start", "batch_end", "before_zero_grad", "before_hooks_forward")
    },
    **{f"untrained-{what}": (WritesUntrained, (what,)) for what in ("teacher", "frozen")},
    "steps-between-forwards": (StepsBetweenForwards, ()),
    "slices-counted": (WritesHead, ("counted", "end")),
    "reads": (WritesHead, ("read", "start")),
    **{f"wgan-{place}": (WassersteinGAN, (place,)) for place in ("start", "forward", "step")},
}


ENGINES = {
    **STRATEGIES,
    "whole": {"auto_wrap_policy": set()},
    "hybrid": {"data_parallel_replicate_size": 2},
    "hybrid resharded": {"data_parallel_replicate_size": 2, "reshard_during_accumulation": True},
    "offloaded": {"cpu_offload": True, "reshard_during_accumulation": False},
    "recomputed": {"activation_checkpointing": {Block}, "reshard_during_accumulation": True},
    "no prefetch": {"prefetch": 0, "reshard_during_accumulation": True},
}
FINDS_UNUSED = {**STRATEGIES["ddp"], "ddp_kwargs": {"find_unused_parameters": True}}
ALWAYS = (  # one for each way of writing, and for each state in which weights are written
    ("kept", "teacher-lightly_update_momentum-start"),
    ("kept", "teacher-hard_update-end"),
    ("kept", "teacher-timm_ema-middle"),
    ("resharded", "teacher-timm_ema-middle"),
    ("kept", "teacher-foreach_mul_add-start"),
    ("kept", "clamped-batch_end"),
    ("kept", "teacher-swap-start"),
    ("resharded", "teacher-swap-batch_end"),
    ("kept", "teacher-swap-middle"),
    ("kept", "teacher-swap-end"),
    ("kept", "slices-counted"),
    ("kept", "normalised-in-forward"),
    ("kept", "freezes"),
    ("kept", "averaged-into-buffers"),
    ("resharded", "freezes"),
    ("resharded", "normalised-swav"),
    ("resharded", "normalised-vector"),
    ("undeferred", "wgan-step"),
    ("whole", "teacher-dino_update_momentum-middle"),
    ("kept", "averages-shards-into-buffers"),
    ("kept", "teacher-dino_update_momentum-middle"),
    ("offloaded", "clamped-start"),
    ("ddp", "clamped-before_zero_grad"),
    ("kept", "teacher-polyak-before_zero_grad"),
    ("kept", "untrained-teacher"),
    ("kept", "untrained-frozen"),
    ("kept", "steps-between-forwards"),
)
IN_LISTS = ("timm_ema", "hard_update", "foreach_mul_add")  # of state dicts, or whole parameters beside parts


STATE_DICTS_AT_START = ("teacher-timm_ema-start", "teacher-hard_update-start")
# By a step, to what stays gathered for the backward or not; and by hooks, to shards.
WRITTEN_IN_STEP = ["teacher-swap-middle", "teacher-swap-end", "clamped-end", "wgan-forward"]
WRITTEN_IN_HOOKS = [
    "teacher-swap-before_zero_grad",
    "clamped-before_zero_grad",
    "clamped-before_hooks_forward",
]


def _is_refused(engine: str, case: str) -> bool:
    """See `REFUSED`."""
    keeps = engine in ("kept", "undeferred", "hybrid", "offloaded")
    if engine == "ddp":
        return False
    if case in WRITTEN_IN_HOOKS or case in STATE_DICTS_AT_START:
        return True
    if case == "wgan-forward":
        return engine not in ("kept", "offloaded")
    if case == "normalised-in-forward":
        return not keeps
    return case in WRITTEN_IN_STEP and not keeps and engine != "whole"


def _combinations() -> list[Any]:
    pairs = [(engine, case) for engine in ENGINES for case in CASES if not _is_refused(engine, case)]
    return [
        pytest.param(*pair, marks=[] if pair in ALWAYS else [pytest.mark.sweep], id="-".join(pair))
        for pair in pairs
    ]


@pytest.mark.every_case
@pytest.mark.parametrize(("engine", "case"), _combinations())
def test_written_weights(request: pytest.FixtureRequest, engine: str, case: str) -> None:
    """The weights of student and teacher are those of one process."""
    num_ranks = 4 if engine.startswith("hybrid") else 2
    pool = request.getfixturevalue(f"pool{num_ranks}")
    make, args = CASES[case]
    options = ENGINES[engine]
    if case.startswith(("wgan", "freezes", "untrained")) and engine == "ddp":
        options = FINDS_UNUSED
    assert_exact(pool.run(fit, options, make, args), fit_plainly(make, args, num_ranks))


@pytest.mark.parametrize("update", [name for name in UPDATES if name not in IN_LISTS])
def test_tensor_parallel_layers(pool4: RankPool, update: str) -> None:
    """Gathered copies are DTensors there."""
    args = (update, "start")
    expected = fit_plainly(TeachesInParallel, args)
    options = {"tensor_parallel_size": 2, "reshard_during_accumulation": False}
    assert_exact(pool4.run(fit, options, TeachesInParallel, args), expected)


class SavesInStep(Writer):
    """Takes the state dict of a checkpoint at the end of its step, and that of a module."""

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.distance(batch)
        shown = self.student.head.state_dict()["weight"]
        saved = self.trainer.strategy.lightning_module_state_dict()["student.head.weight"]
        self.kinds = [type(shown), type(saved)]
        return loss


def _kinds_in_step() -> list[type]:
    module = SavesInStep()
    train(module, {}, accumulate=1, max_steps=1)
    return module.kinds


def test_checkpoints_in_a_step_hold_shards(pool2: RankPool) -> None:
    """So does a module's own state dict, after which the step goes on."""
    assert pool2.run(_kinds_in_step) == [[Shard, Shard]] * 2


UNCOUNTED = {
    f"uncounted-{how}-{place}": (WritesHead, (how, place))
    for how in ("slice", "function", "array")
    for place in ("start", "end")
}
"""A copy that differs from its shard in the first steps: the write would be lost."""
REFUSED: dict[str, tuple[str, list[str], Iterable[str]]] = {
    # The precision of the fit, its engines, what it writes.
    "A step that takes a state dict uses shards after it: take it in a hook": (
        *("64-true", ["kept"]),
        STATE_DICTS_AT_START,
    ),
    # By a unit's own forward, before the strategy can carry it into the shards.
    "was written within a step or a forward, and FSDP2 has freed what it had gathered": (
        *("64-true", ["resharded", "recomputed"]),
        ["normalised-in-forward"],
    ),
    # What the step computes with are copies, which would not follow.
    "was written while it was gathered, as a list or an optimizer holds its shard": (
        *("64-true", ["kept"]),
        ["held"],
    ),
    # FSDP2 has the values of the forward or new ones; one process has those that how they are written demands.
    "was written between a forward and its backward": (
        *("64-true", ["resharded", "kept"]),
        [*WRITTEN_IN_STEP, *WRITTEN_IN_HOOKS],
    ),
    "student.head.weight was written within a step or a forward in a way that": (
        *("64-true", ["kept", "resharded", "offloaded"]),
        UNCOUNTED,
    ),
    # What is written to a copy in bfloat16 would be rounded.
    "where FSDP2 has gathered it in torch.bfloat16, which rounds what is written": (
        *("bf16-mixed", ["kept"]),
        ["normalised-swav", "clamped-start", "teacher-dino_update_momentum-start"],
    ),
    # The recipe: shards are written in their own dtype. A step that only reads `.data` is not refused either.
    "nothing was refused": ("bf16-mixed", ["kept"], ["clamped-batch_start", "reads"]),
}
MAKERS = {**CASES, **UNCOUNTED, "held": (WritesHeld, ())}


def _refused(every: bool) -> dict[tuple[str, str, str], str]:
    """What is said of each, by what is to be said; some without `every`."""
    found = {}
    for sentence, (precision, engines, cases) in REFUSED.items():
        for engine in engines if every else engines[:1]:
            for case in cases if every or precision != "64-true" else list(cases)[:1]:
                if engine == "kept" and case in WRITTEN_IN_STEP:
                    continue  # right
                make, args = MAKERS[case]
                try:
                    fit(ENGINES[engine], make, args, precision=precision)
                    found[sentence, engine, case] = "nothing was refused"
                except RuntimeError as error:
                    found[sentence, engine, case] = str(error)
    return found


@pytest.mark.parametrize("every", first_by_default([False, True]))
def test_what_would_be_lost_is_refused(pool2: RankPool, every: bool) -> None:
    for messages in pool2.run(_refused, every, timeout_s=200):
        for (sentence, *case), message in messages.items():
            assert sentence in message, case


# --- Past the module --------------------------------------------------------------------------------------------------


class HoldsParameter(Writer):
    """Reads or writes a parameter of its own past the module tree."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.viscosity = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.how = how
        self.unknowns = {"viscosity": self.viscosity}
        self.teachers = list(self.teacher.parameters())

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.distance(batch)
        if self.how == "dict":
            return loss * self.unknowns["viscosity"]
        if self.how == "module":
            return loss * self.viscosity
        with torch.no_grad():
            for s, t in zip(self.student.parameters(), self.teachers, strict=True):
                if self.how == "written":
                    t.mul_(0.9)
                else:
                    t.data = t.data * 0.9 + s.data * 0.1
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.student.parameters(), self.viscosity], lr=0.1)


HELD = {
    "dict": "viscosity",
    "written": "teacher.blocks.0.linear.weight",
    "data": "teacher.blocks.0.linear.weight",
}


def _held() -> dict[str, Any]:
    return {how: fit_or_refusal(STRATEGIES["kept"], HoldsParameter, how) for how in HELD}


def test_parameters_that_sharding_has_replaced(pool2: RankPool) -> None:
    """The parameter is named."""
    for messages in pool2.run(_held):
        for how, name in HELD.items():
            assert str(messages[how]).startswith(f"{name} was used past the module"), how


@pytest.mark.parametrize(("engine", "how"), [("ddp", "dict"), ("ddp", "data"), ("kept", "module")])
@pytest.mark.every_case
def test_what_the_message_advises(pool2: RankPool, engine: str, how: str) -> None:
    """It is exact; that somebody holds the parameter besides is nobody's business."""
    options = FINDS_UNUSED if engine == "ddp" else STRATEGIES[engine]
    assert_exact(pool2.run(fit, options, HoldsParameter, (how,)), fit_plainly(HoldsParameter, (how,)))


class Unregistered(Writer):
    """Trains a parameter that the module does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.unknowns = {"viscosity": nn.Parameter(torch.ones(1, dtype=torch.float64))}

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.distance(batch) * self.unknowns["viscosity"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.student.parameters(), *self.unknowns.values()], lr=0.1)


@pytest.mark.parametrize("options", [STRATEGIES["ddp"], STRATEGIES["kept"]])
def test_parameters_that_are_not_registered(pool2: RankPool, options: dict[str, Any]) -> None:
    for message in pool2.run(fit_or_refusal, options, Unregistered):
        assert message.startswith("1 parameters of SGD are not those of Unregistered")
        assert "(self.x = nn.Parameter(...), an nn.ParameterDict or an nn.ParameterList)" in message


class ReplacedWeight(Replaced):
    parameter_name = "weight"


USES: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda old: old.T,
    "data": lambda old: old.data,
    "product": lambda old: 2 * old,
    "sum": torch.sum,
    "in a list": lambda old: torch.stack([torch.ones(0), old]),
    "size": lambda old: old.numel(),  # it would be 0
    "shape": lambda old: old.shape,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_raises(use: str) -> None:
    """But as a key, and to be shown."""
    old: Any = nn.Parameter(torch.zeros(0))
    old.__class__ = ReplacedWeight
    assert {old: 1}[old] == 1
    assert repr(old) == "<weight, which a shard has replaced>"
    with pytest.raises(RuntimeError, match="weight was used past the module"):
        USES[use](old)


def _beside_a_shard() -> None:
    shard = make_shard(distribute_tensor(torch.ones(3, 1), init_device_mesh("cpu", (2,)), [Rows(0)]))
    old: Any = nn.Parameter(torch.zeros(0))
    old.__class__ = ReplacedWeight
    (shard * old).sum()


def test_use_beside_a_shard_raises(pool2: RankPool) -> None:
    """An empty tensor would broadcast."""
    with pytest.raises(RankError, match="was used past the module"):
        pool2.run(_beside_a_shard)
