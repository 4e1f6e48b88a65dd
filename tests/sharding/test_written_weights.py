"""What user code writes to weights is never lost, as in one process, whether they are gathered at that time or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding.shards import Shard
from tests.rank_pool import RankPool
from tests.sharding.writers import (
    PLACES,
    UPDATES,
    AveragesByTorch,
    AveragesIntoBuffers,
    Block,
    Clamps,
    Freezes,
    InForward,
    Normalises,
    StepsBetweenForwards,
    Teaches,
    TeachesInParallel,
    WassersteinGAN,
    Writer,
    WritesHeld,
    WritesUncounted,
    WritesUntrained,
    fit,
    fit_plainly,
    rows,
)
from tests.trainer.exactness import Outcome, assert_exact, weight_error
from tests.trainer.runs import STRATEGIES, TOLERANCE, make_trainer

CASES: dict[str, tuple[Callable[..., Writer], tuple[Any, ...]]] = {
    **{f"teacher-{update}-{place}": (Teaches, (update, place)) for update in UPDATES for place in PLACES},
    "teacher-averaged-by-torch": (AveragesByTorch, ()),
    **{
        f"normalised-{how}": (Normalises, (how,))
        for how in ("swav", "data", "unit", "vector", "reset", "between")
    },
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
    "slices-counted": (WritesUncounted, ("counted", "end")),
    "reads": (Normalises, ("read",)),
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
    ("resharded", "teacher-dino_update_momentum-middle"),
    ("resharded", "teacher-lightly_update_momentum-end"),
    ("resharded", "normalised-swav"),
    ("resharded", "normalised-vector"),
    ("undeferred", "wgan-step"),
    ("undeferred", "wgan-start"),
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


def _combinations() -> list[Any]:
    found = []
    for engine in ENGINES:
        keeps = engine not in ("resharded", "ddp", "whole", "no prefetch", "recomputed", "hybrid resharded")
        for case in CASES:
            if case == "normalised-in-forward" and not (keeps or engine == "ddp"):
                continue  # refused, see below
            if case == "wgan-forward" and engine not in ("kept", "offloaded", "ddp"):
                continue  # refused, see below
            if case in WRITTEN_IN_STEP and not keeps and engine not in ("ddp", "whole"):
                continue  # refused, see below
            if case in WRITTEN_IN_HOOKS and engine != "ddp":
                continue  # refused, see below
            if case in STATE_DICTS_AT_START and engine != "ddp":
                continue  # refused, see below
            marks = [] if (engine, case) in ALWAYS else [pytest.mark.sweep]
            found.append(pytest.param(engine, case, marks=marks, id=f"{engine}-{case}"))
    return found


def _error(pool: RankPool, options: dict[str, Any], case: str, **kwargs: Any) -> float:
    make, args = CASES[case]
    if case.startswith(("wgan", "freezes", "untrained")) and "data_parallel" in options:
        options = {**options, "ddp_kwargs": {"find_unused_parameters": True}}
    expected = fit_plainly(make, args, **kwargs)
    kwargs.pop("num_ranks", None)
    return max(weight_error(Outcome(w), expected) for w in pool.run(fit, options, make, args, **kwargs))


@pytest.mark.every_case
@pytest.mark.parametrize(("engine", "case"), _combinations())
def test_written_weights(request: pytest.FixtureRequest, engine: str, case: str) -> None:
    """The weights of student and teacher are those of one process."""
    num_ranks = 4 if engine.startswith("hybrid") else 2
    pool = request.getfixturevalue(f"pool{num_ranks}")
    assert _error(pool, ENGINES[engine], case, num_ranks=num_ranks) <= TOLERANCE


@pytest.mark.parametrize("update", [name for name in UPDATES if name not in IN_LISTS])
def test_tensor_parallel_layers(pool4: RankPool, update: str) -> None:
    """Gathered copies are DTensors there."""
    args = (update, "start")
    expected = fit_plainly(TeachesInParallel, args)
    options = {"tensor_parallel_size": 2, "reshard_during_accumulation": False}
    assert_exact(pool4.run(fit, options, TeachesInParallel, args), expected)


@pytest.mark.parametrize("case", STATE_DICTS_AT_START)
def test_steps_do_not_go_on_with_what_a_state_dict_has_freed(pool2: RankPool, case: str) -> None:
    for message in pool2.run(_refusal, STRATEGIES["kept"], case, "64-true"):
        assert "A step that takes a state dict uses shards after it: take it in a hook" in message


def _refusal(options: dict[str, Any], case: str, precision: str) -> str:
    make, args = CASES.get(case, (WritesHeld, ()))
    try:
        fit(options, make, args, precision=precision)
    except RuntimeError as error:
        return str(error)
    return "nothing was refused"


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
    batches = [rows(dist.get_rank(), step) for step in range(2)]
    make_trainer(AutomodelStrategy(), max_steps=1).fit(module, DataLoader(batches, batch_size=None))
    return module.kinds


def test_checkpoints_in_a_step_hold_shards(pool2: RankPool) -> None:
    """So does a module's own state dict, after which the step goes on."""
    assert pool2.run(_kinds_in_step) == [[Shard, Shard]] * 2


@pytest.mark.parametrize("engine", ["resharded", "recomputed"])
def test_what_fsdp2_frees(pool2: RankPool, engine: str) -> None:
    """A unit's own forward writes to what FSDP2 frees after it, before the strategy can carry it into the shards."""
    for message in pool2.run(_refusal, ENGINES[engine], "normalised-in-forward", "64-true"):
        assert "was written within a step or a forward, and FSDP2 has freed what it had gathered" in message


def test_held_shards_are_not_written_in_a_step(pool2: RankPool) -> None:
    """What the step computes with are copies, which would not follow."""
    for message in pool2.run(_refusal, {}, "held", "64-true"):
        assert "was written while it was gathered, as a list or an optimizer holds its shard" in message


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        *(("resharded", case) for case in WRITTEN_IN_STEP),
        *((engine, case) for engine in ("kept", "resharded") for case in WRITTEN_IN_HOOKS),
    ],
)
def test_values_for_a_backward(pool2: RankPool, engine: str, case: str) -> None:
    """FSDP2 has the values of the forward or new ones; one process has those that how they are written demands."""
    for message in pool2.run(_refusal, ENGINES[engine], case, "64-true"):
        assert "was written between a forward and its backward" in message


@pytest.mark.parametrize("engine", ["kept", "resharded", "offloaded"])
@pytest.mark.parametrize("how", ["slice", "function", "array"])
@pytest.mark.parametrize("place", ["start", "end"])
def test_uncounted_writes(pool2: RankPool, engine: str, how: str, place: str) -> None:
    """A copy that differs from its shard in the first steps is refused: the write would be lost."""
    for message in pool2.run(_uncounted, ENGINES[engine], (how, place)):
        assert message.startswith("student.head.weight was written within a step or a forward in a way that")


def _uncounted(options: dict[str, Any], args: tuple[str, str]) -> str:
    with pytest.raises(RuntimeError) as raised:
        fit(options, WritesUncounted, args)
    return str(raised.value)


@pytest.mark.every_case
@pytest.mark.parametrize("case", ["normalised-swav", "clamped-start", "teacher-dino_update_momentum-start"])
def test_half_precision(pool2: RankPool, case: str) -> None:
    """What is written to a copy in bfloat16 would be rounded."""
    for message in pool2.run(_refusal, STRATEGIES["kept"], case, "bf16-mixed"):
        assert "where FSDP2 has gathered it in torch.bfloat16, which rounds what is written" in message


def test_half_precision_between_steps(pool2: RankPool) -> None:
    """The recipe: shards are written in their own dtype. A step that only reads `.data` is not refused either."""
    for case in ("clamped-batch_start", "reads"):
        for message in pool2.run(_refusal, STRATEGIES["kept"], case, "bf16-mixed"):
            assert message == "nothing was refused"
