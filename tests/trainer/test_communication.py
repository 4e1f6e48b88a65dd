"""Collectives of one steady optimizer step, counted at the dispatcher; `tests/second_device` counts host reads.

The module has U FSDP units: its blocks, and the root with what is left. Lightning's own broadcasts of its
SIGTERM flag are not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel import AutomodelStrategy
from tests.free_memory import pretended
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.runs import LabelledModule, loader, make_trainer

NUM_UNITS = 3  # two blocks and the root
CASE = Case(seed=2, telling="labels", num_batches=15)

GATHER = "_allgather_base_"
SCATTER = "_reduce_scatter_base_"
REDUCE = "allreduce_"


class OpCounts(TorchDispatchMode):
    """Counts operators by name, and all collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # `all_gather_object` of torch 2.15 runs the operator that gathers weights, on bytes and their
        # numbers.
        if name != GATHER or args[0].is_floating_point():
            self.ops[name] += 1
        if func.namespace in ("c10d", "_c10d_functional") and name != "broadcast_":
            self.ops["collectives"] += 1
        return func(*args, **(kwargs or {}))


class CountsWindow(Callback):
    """Counts what runs during the third window, drawing its batches too: DDP settles its buckets in the second."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.counts = OpCounts()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * self.accumulate:
            self.counts.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 3 * self.accumulate - 1:
            self.counts.__exit__(None, None, None)


def _count(options: dict[str, Any], accumulate: int, **trainer_options: Any) -> Counter[str]:
    counter = CountsWindow(accumulate)
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=accumulate,
        callbacks=[counter],
        **trainer_options,
    )
    trainer.fit(LabelledModule(CASE.seed), loader(CASE))
    return counter.counts.ops


@pytest.mark.parametrize("accumulate", [2, 1])
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(pool2: RankPool, reshard: bool, defer: bool, accumulate: int) -> None:
    """Deferred: one reduce-scatter a unit. Kept: one all-gather a unit. And one all-reduce for the token count."""
    options = {"reshard_during_accumulation": reshard, "defer_fsdp_grad_sync": defer}
    # Resharded units are gathered for forward and again for backward, the root once.
    gathers = (2 * NUM_UNITS - 1) * accumulate if reshard else NUM_UNITS
    scatters = NUM_UNITS if defer else NUM_UNITS * accumulate
    for ops in pool2.run(_count, options, accumulate):
        assert (ops[GATHER], ops[SCATTER], ops[REDUCE]) == (gathers, scatters, 1)
        assert ops["collectives"] == gathers + scatters + 1


def _count_by_default() -> list[Counter[str]]:
    """Where nothing fits beside the shards, and where everything does."""
    with pretended(lambda needed: 0.0):
        nothing = _count({}, 2)
    return [nothing, _count({}, 2)]


def test_what_does_not_fit_is_neither_deferred_nor_kept(pool2: RankPool) -> None:
    """The defaults communicate as with `defer_fsdp_grad_sync=False` and `reshard_during_accumulation=True`."""
    for nothing, everything in pool2.run(_count_by_default):
        found = (nothing[GATHER], nothing[SCATTER], nothing[REDUCE])
        assert found == ((2 * NUM_UNITS - 1) * 2, NUM_UNITS * 2, 1)
        assert (everything[GATHER], everything[SCATTER], everything[REDUCE]) == (NUM_UNITS, NUM_UNITS, 1)


@pytest.mark.parametrize(
    ("options", "clip", "all_reduces"),
    [
        ({"track_grad_norm": True, "error_if_nonfinite": True}, 0.1, 3),
        ({}, 0.1, 2),
        ({"track_grad_norm": True}, None, 2),
    ],
)
def test_norm_costs_one_all_reduce(
    pool2: RankPool, options: dict[str, Any], clip: float | None, all_reduces: int
) -> None:
    """The norm is reduced where something asks for it, and once however many ask; that it is finite is agreed on."""
    for ops in pool2.run(_count, options, 3, gradient_clip_val=clip):
        assert ops[REDUCE] == all_reduces


def test_ddp(pool2: RankPool) -> None:
    """One all-reduce for the only bucket, one for the token count."""
    for ops in pool2.run(_count, {"data_parallel": "ddp"}, 5):
        assert ops["collectives"] == ops[REDUCE] == 2
