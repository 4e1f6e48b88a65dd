"""What user code writes to weights is never lost, as in one process, whether they are gathered at that time or not.

Parameters that sharding has replaced, reached past the module, and parameters that no module knows are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Rows
from torch.distributed.tensor import distribute_tensor

from lightning_automodel.gradients.rank_agreement import fingerprint
from lightning_automodel.sharding.replaced import Replaced
from lightning_automodel.sharding.shards import Shard, make_shard
from tests.rank_pool import RankError, RankPool
from tests.sharding import writers
from tests.trainer.exactness import assert_exact
from tests.trainer.runs import STRATEGIES, first_by_default

CASES: dict[str, tuple[Callable[..., writers.Writer], tuple[Any, ...]]] = {
    **{
        f"teacher-{update}-{place}": (writers.Teaches, (update, place))
        for update in writers.UPDATES
        for place in writers.PLACES
    },
    "normalised-swav": (writers.WritesHead, ("swav", "start")),
    "normalised-in-forward": (writers.InForward, ()),
    "averaged-into-buffers": (writers.AveragesIntoBuffers, ("recipe",)),
    "averages-shards-into-buffers": (writers.AveragesIntoBuffers, ("shards",)),
    **{
        f"clamped-{place}": (writers.Clamps, (place,))
        for place in ("start", "end", "batch_start", "batch_end", "before_zero_grad", "before_hooks_forward")
    },
    **{f"untrained-{what}": (writers.WritesUntrained, (what,)) for what in ("teacher", "frozen")},
    "steps-between-forwards": (writers.StepsBetweenForwards, ()),
    "slices-counted": (writers.WritesHead, ("counted", "end")),
    "reads": (writers.WritesHead, ("read", "start")),
    **{f"wgan-{place}": (writers.WassersteinGAN, (place,)) for place in ("forward", "step")},
}
ENGINES = {
    **STRATEGIES,
    "whole": {"auto_wrap_policy": set()},
    "offloaded": {"cpu_offload": True, "reshard_during_accumulation": False},
    "recomputed": {"activation_checkpointing": {writers.Block}, "reshard_during_accumulation": True},
}
RIGHT = (
    ("kept", "teacher-hard_update-end"),
    ("kept", "teacher-timm_ema-middle"),
    ("resharded", "teacher-timm_ema-middle"),
    ("kept", "clamped-batch_end"),
    ("kept", "teacher-swap-start"),
    ("resharded", "teacher-swap-batch_end"),
    ("kept", "teacher-swap-middle"),
    ("kept", "teacher-swap-end"),
    ("kept", "slices-counted"),
    ("kept", "normalised-in-forward"),
    ("kept", "averaged-into-buffers"),
    ("resharded", "normalised-swav"),
    ("undeferred", "wgan-step"),
    ("whole", "teacher-dino_update_momentum-middle"),
    ("kept", "averages-shards-into-buffers"),
    ("kept", "teacher-dino_update_momentum-middle"),
    ("offloaded", "clamped-start"),
    ("ddp", "clamped-before_zero_grad"),
    ("kept", "untrained-teacher"),
    ("kept", "untrained-frozen"),
    ("kept", "steps-between-forwards"),
)
"""One for each way of writing, and for each state in which weights are written; `tests/search` draws more."""


@pytest.mark.every_case
@pytest.mark.parametrize(("engine", "case"), RIGHT)
def test_written_weights(pool2: RankPool, engine: str, case: str) -> None:
    """The weights of student and teacher are those of one process."""
    make, args = CASES[case]
    assert_exact(pool2.run(writers.fit, ENGINES[engine], make, args), writers.fit_plainly(make, args))


FOUR_RANKS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "parallel": ({"tensor_parallel_size": 2, **STRATEGIES["kept"]}, writers.TeachesInParallel, "start"),
    "in pairs": ({"reshard_after_forward": 2, **STRATEGIES["resharded"]}, writers.Teaches, "end"),
}


@pytest.mark.every_case
@pytest.mark.parametrize(("options", "make", "place"), FOUR_RANKS.values(), ids=FOUR_RANKS)
def test_four_ranks(pool4: RankPool, options: dict[str, Any], make: Any, place: str) -> None:
    """Gathered copies are DTensors, or shards over two ranks are left by a forward."""
    args = ("dino_update_momentum", place)
    expected = writers.fit_plainly(make, args, num_ranks=4 // options.get("tensor_parallel_size", 1))
    assert_exact(pool4.run(writers.fit, options, make, args), expected)


class SavesInStep(writers.Writer):
    """Takes the state dict of a checkpoint at the end of its step, and that of a module."""

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.distance(batch)
        shown = self.student.head.state_dict()["weight"]
        saved = self.trainer.strategy.lightning_module_state_dict()["student.head.weight"]
        self.kinds = [type(shown), type(saved)]
        return loss


def _kinds_in_step() -> list[type]:
    module = SavesInStep()
    writers.train(module, {}, accumulate=1, max_steps=1)
    return module.kinds


def test_checkpoints_in_a_step_hold_shards(pool2: RankPool) -> None:
    """So does a module's own state dict, after which the step goes on."""
    assert pool2.run(_kinds_in_step) == [[Shard, Shard]] * 2


class Initialises(writers.Writer):
    """Takes a bias from the rows of each rank, as data-dependent initialisation does."""

    def on_train_start(self) -> None:
        self.rows = torch.full((1, writers.WIDTH), float(dist.get_rank()))
        self.reach("before the first window")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.rows = batch

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            write = OWN_VALUES.get(self.place, lambda *_: None)
            write(self.student.blocks[0].linear.bias, self.rows.mean(0))
            if self.place == "to another parameter":
                list(self.student.parameters())[dist.get_rank()].mul_(0.5)

    def on_train_epoch_end(self) -> None:
        self.reach("after the last window")

    def write(self) -> None:
        with torch.no_grad():
            self.student.blocks[0].linear.bias.copy_(self.rows.mean(0))


OWN_VALUES: dict[str, Callable[[Any, Tensor], Any]] = {
    "copied": lambda bias, own: bias.copy_(own),
    "assigned": lambda bias, own: setattr(bias, "data", own),
    "averaged": lambda bias, own: bias.data.lerp_(own, 0.1),
    "partly": lambda bias, own: bias[1:].copy_(own[1:]),
    "scaled": lambda bias, own: bias.data.mul_(float(own.norm())),
    "on one rank": lambda bias, own: dist.get_rank() or bias.clamp_(-0.1, 0.1),
    "gradient": lambda bias, own: bias.grad.add_(own),
    "many": lambda bias, own: torch._foreach_mul_([bias], [own]),
}
OWN_PLACES = ("start", "before the first window", "after the last window", "to another parameter")
INITIALISED = {f"initialised-{how}": (Initialises, (how,)) for how in (*OWN_PLACES, *OWN_VALUES)}
STATE_DICTS_AT_START = ("teacher-timm_ema-start", "teacher-hard_update-start")
# By a step, to what stays gathered for the backward or not; and by hooks, to shards.
WRITTEN_IN_STEP = ["teacher-swap-middle", "teacher-swap-end", "clamped-end", "wgan-forward"]
WRITTEN_IN_HOOKS = [
    "teacher-swap-before_zero_grad",
    "clamped-before_zero_grad",
    "clamped-before_hooks_forward",
]
UNCOUNTED = {
    f"uncounted-{how}-{place}": (writers.WritesHead, (how, place))
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
    "student.head.weight was used past the module": ("64-true", ["kept"], ["view"]),
    # FSDP2 has the values of the forward or new ones; one process has those that how they are written demands.
    "was written between a forward and its backward": (
        *("64-true", ["resharded", "kept"]),
        [*WRITTEN_IN_STEP, *WRITTEN_IN_HOOKS],
    ),
    "student.head.weight was written within a step or a forward in a way that": (
        *("64-true", ["kept", "resharded", "offloaded"]),
        UNCOUNTED,
    ),
    # Each rank would keep its part of other values.
    "Forwards, steps or hooks have written other values to parameters or gradients on": (
        *("64-true", ["kept", "offloaded"]),
        INITIALISED,
    ),
    "An array of .numpy() shares memory": ("64-true", ["kept"], ["array"]),
    # What is written to a copy in bfloat16 would be rounded.
    "where FSDP2 has gathered it in torch.bfloat16, which rounds what is written": (
        *("bf16-mixed", ["kept"]),
        ["normalised-swav", "clamped-start", "teacher-dino_update_momentum-start"],
    ),
    # The recipe: shards are written in their own dtype. A step that only reads `.data` is not refused either.
    "nothing was refused": ("bf16-mixed", ["kept"], ["clamped-batch_start", "reads"]),
}
READ: dict[str, Any] = {"array": (writers.WritesHead, ("read as an array", "start"))}
MAKERS = {
    **CASES,
    **UNCOUNTED,
    **INITIALISED,
    **READ,
    "held": (writers.WritesHeld, ()),
    "view": (writers.KeepsView, ()),
}


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
                    writers.fit(ENGINES[engine], make, args, precision=precision)
                    found[sentence, engine, case] = "nothing was refused"
                except RuntimeError as error:
                    found[sentence, engine, case] = str(error)
    return found


@pytest.mark.parametrize("every", first_by_default([False, True]))
def test_what_would_be_lost_is_refused(pool2: RankPool, every: bool) -> None:
    for messages in pool2.run(_refused, every, timeout_s=200):
        for (sentence, *case), message in messages.items():
            assert sentence in message, case


@pytest.mark.parametrize("row", [0, 1, 16383])
def test_each_row_tells_ranks_apart(row: int) -> None:
    values = torch.ones(16384, 8)
    values[row] = 2
    assert abs(fingerprint(values) - fingerprint(torch.ones(16384, 8))) > 1e-4


# --- Past the module --------------------------------------------------------------------------------------------------


USES: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda old: old.T,
    "data": lambda old: old.data,
    "product": lambda old: 2 * old,
    "written": lambda old: old.mul_(2),
    "sum": torch.sum,
    "in a list": lambda old: torch.stack([torch.ones(0), old]),
    "size": lambda old: old.numel(),  # it would be 0
    "shape": lambda old: old.shape,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_raises(use: str) -> None:
    """But as a key, and to be shown."""
    old: Any = nn.Parameter(torch.zeros(0))
    old.parameter_name = "weight"
    old.__class__ = Replaced
    assert {old: 1}[old] == 1
    assert repr(old) == "<weight, which a shard has replaced>"
    with pytest.raises(RuntimeError, match="weight was used past the module"):
        USES[use](old)


def _beside_a_shard() -> None:
    shard = make_shard(distribute_tensor(torch.ones(3, 1), init_device_mesh("cpu", (2,)), [Rows(0)]))
    old: Any = nn.Parameter(torch.zeros(0))
    old.parameter_name = "weight"
    old.__class__ = Replaced
    (shard * old).sum()


def test_use_beside_a_shard_raises(pool2: RankPool) -> None:
    """An empty tensor would broadcast."""
    with pytest.raises(RankError, match="was used past the module"):
        pool2.run(_beside_a_shard)
