"""ExactnessCheck reports what is wrong, reports nothing else, and leaves no trace in the training."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_automodel import ExactnessCheck
from lightning_automodel.callbacks.exactness.moment import leaving_no_trace, moment_of, restore
from lightning_automodel.distributed import collectives
from tests.callbacks import random_trainings
from tests.callbacks.exactness import (
    LIKE_OTHERS,
    SLICED,
    TRAININGS,
    Attending,
    Training,
    Writer,
    bits_of,
    run,
    sentences,
    verdict_of,
)
from tests.processes import run_anew
from tests.rank_pool import RankPool
from tests.trainer.exactness import SILENT


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.sweep] if name in LIKE_OTHERS else []) for name in TRAININGS],
)
def test_verdicts(name: str, pool2: RankPool, pool1: RankPool) -> None:
    """What is wrong is reported with its reason; what is right, never; what cannot be checked, as not checked."""
    training = TRAININGS[name]
    pool = pool1 if training.strategy == "one" else pool2
    for verdict, report in pool.run(verdict_of, name):
        assert verdict == training.verdict, report
        assert training.says in report


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2",
        "random numbers",
        "half precision",
        "a scheduler in the step",
        "lightning",
        "contrastive",
        "a hidden state",
        "states",
        "overrides",
        "overrides, one process",
        "slices, random numbers",
        "manual, by hand",
        "gan, accumulated",
        "gan, generator first",
        "gan, not toggled",
    ],
)
def test_training_has_the_same_bits(name: str, pool2: RankPool) -> None:
    """Weights and random states, with the callback and without it."""
    assert pool2.run(bits_of, name, True) == pool2.run(bits_of, name, False)


class Holding(nn.Module):
    """Two modules that share a value, beside values that cannot be pickled whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = [0]
        self.inner = nn.Module()
        for owner in (self, self.inner):
            owner.kept = {"first": self.first, "text": "of no other attribute", "calls": 1}
            owner.lost = [("written before it raises", Lock()), self.first]
        self.last = [self.first, self.inner.kept, "of no other attribute"]


def test_values_stay_shared() -> None:
    """Also after a value that could be pickled in part."""
    module = Holding()
    moment = moment_of(module, torch.device("cpu"))
    lost = module.lost
    module.first[0] = 5
    module.later = "a cache"
    module.inner.register_buffer("made", torch.ones(1))
    restore(moment, module, torch.device("cpu"))
    assert not hasattr(module, "later")
    assert not hasattr(module.inner, "made")
    assert module.first == [0]
    assert module.lost is lost
    assert module.last[0] is module.first is module.kept["first"] is module.inner.kept["first"]
    assert module.last[1] is module.inner.kept


def test_random_states_are_put_back_first() -> None:
    """And hidden modules are not registered, arrays that are read-only not written to, whatever else is put back."""
    module = nn.Module()
    module.__dict__["teacher"] = nn.Linear(1, 1)
    module.constants = np.frombuffer(bytes(8))
    module.register_buffer("made", None)
    before = torch.get_rng_state()
    with leaving_no_trace(module, torch.device("cpu")):
        torch.rand(1)
        module.made = torch.ones(1)
        module.register_buffer("new", torch.ones(1))
    assert torch.equal(before, torch.get_rng_state())
    assert list(module.state_dict()) == []
    assert module.made is None
    assert not hasattr(module, "new")
    assert list(module.children()) == []


class Gradients(Callback):
    """Keeps the whole gradients of the first step."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        whole = {
            n: collectives.full(p.grad).clone()
            for n, p in pl_module.named_parameters()
            if p.grad is not None
        }
        self.first = self.first or whole


def distance_from_a_single_batch(strategy: str) -> tuple[float, float]:
    """What the callback says of the first step, and the same from all rows of the window in one batch."""
    kept = Gradients()
    training = Training(strategy=strategy, trainer={"precision": "64-true"}, callbacks=lambda: [kept])
    check, _ = run(training)
    batches = [batch for rank in range(dist.get_world_size()) for batch in sentences(rank)[:2]]
    together = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    module = Writer().double()
    module.loss(together).backward()
    truth = {name: parameter.grad for name, parameter in module.named_parameters()}
    off = sum(float((kept.first[name] - gradient).square().sum()) for name, gradient in truth.items())
    size = sum(float(gradient.square().sum()) for gradient in truth.values())
    return (check.results[0].gradient_error if check.results else 0.0), (off / size) ** 0.5


@pytest.mark.every_case
@pytest.mark.parametrize("strategy", ["fsdp2", "lightning"])
def test_a_true_single_batch(strategy: str, pool2: RankPool) -> None:
    """The replay trusts the count; this does not. All rows of a window are one batch here."""
    said, expected = pool2.run(distance_from_a_single_batch, strategy)[0]
    assert said == pytest.approx(expected, rel=1e-9, abs=1e-14)
    assert (expected > 0.1) == (strategy == "lightning")


def four_ranks() -> list[tuple[str | None, str]]:
    """Replicas of shards, tensor and context parallelism beside sharding, another strategy with sharded parameters."""
    plain = Training(trainer={"accumulate_grad_batches": 1})
    wide = replace(plain, data=lambda rank: sentences(rank // 2), module=ByColumns)
    trainings = [
        replace(plain, options={"data_parallel_replicate_size": 2}),
        replace(wide, options={"tensor_parallel_size": 2}),
        replace(wide, module=Attending, options=SLICED),
        replace(plain, module=ShardedByHand, strategy="sharded by hand", check={"raises": False}),
    ]
    checks = [run(training)[0] for training in trainings]
    return [(check.verdict, check.report) for check in checks]


class ByColumns(Writer):
    def configure_model(self) -> None:
        if not isinstance(self.net.head.weight, DTensor):
            plan = {"head": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


class ShardedByHand(Writer):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def test_four_ranks(pool4: RankPool) -> None:
    """Ranks that share their data count once; ModelParallelStrategy weighs micro-batches alike."""
    for found in pool4.run(four_ranks):
        verdicts = [verdict for verdict, _ in found]
        assert verdicts == ["exact", "exact", "exact", "wrong"], found
        assert "Micro-batches weigh 25 % in the gradients, where" in found[3][1]


def raise_if_wrong() -> str:
    with pytest.raises(RuntimeError, match="ExactnessCheck: WRONG") as raised:
        run(replace(TRAININGS["lightning"], check={"raises": True}))
    return str(raised.value)


def test_raises(pool2: RankPool) -> None:
    """On all ranks, with the report."""
    first, second = pool2.run(raise_if_wrong)
    seconds = re.compile(r"in [\d.]+ s\.")
    assert seconds.sub("", first) == seconds.sub("", second) != first
    assert "Micro-batches weigh 25 % in the gradients, where" in first


RAISES_WITHIN = """
import lightning as L
from torch import nn
from torch.utils.data import DataLoader
from lightning_automodel import AutomodelStrategy, ExactnessCheck
from tests.callbacks.exactness import Within, sentences

strategy = AutomodelStrategy(auto_wrap_policy={nn.Linear})
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, callbacks=[ExactnessCheck()], max_steps=1,
    accumulate_grad_batches=2, **options
)
trainer.fit(Within(), DataLoader(sentences(0), batch_size=None))
"""


@pytest.mark.sweep
def test_a_rank_that_raises_within_a_forward(tmp_path: Path) -> None:
    """The others wait for a unit of it, and can only end with it: none hangs, and the error is the rank's own."""
    script = tmp_path / "script.py"
    script.write_text(RAISES_WITHIN)
    status, printed = run_anew([sys.executable, str(script)], tmp_path, timeout_s=55)
    assert status != 0
    assert "OSError: this rank's disk is full, on this rank alone and within a forward" in printed


def test_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """The report is logged, and attributes have the numbers of each step."""
    check = ExactnessCheck(steps=2)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=4, **{**SILENT, "callbacks": [check]})
    trainer.fit(Writer(), DataLoader(sentences(0), batch_size=None))
    assert check.report in caplog.text
    assert check.verdict == "exact"
    assert len(check.results) == 2
    assert all(step.gradient_error < 1e-6 for step in check.results)


def refused() -> str:
    with pytest.raises(ValueError, match="ExactnessCheck") as raised:
        run(Training(check={"count": "samples"}))
    return str(raised.value)


def test_options(pool1: RankPool) -> None:
    """A strategy that counts has its own."""
    assert "pass them to AutomodelStrategy alone" in pool1.run(refused)[0]


def test_on_a_command_line() -> None:
    """By its name, as any callback."""
    arguments = [
        "--trainer.callbacks+=lightning_automodel.ExactnessCheck",
        "--trainer.callbacks.count=samples",
    ]
    cli = LightningCLI(
        Writer, args=[*arguments, "--trainer.logger=false"], run=False, save_config_callback=None
    )
    assert any(isinstance(callback, ExactnessCheck) for callback in cli.trainer.callbacks)


@pytest.mark.each_value
@pytest.mark.parametrize("precision", random_trainings.PRECISIONS)
@pytest.mark.parametrize("strategy", random_trainings.STRATEGIES)
@pytest.mark.parametrize("numbers", [[0], pytest.param([1, 2], marks=pytest.mark.sweep)])
def test_no_false_alarm(strategy: str, precision: str, numbers: list[int], pool2: RankPool) -> None:
    """Random trainings that are right are called exact, a few of those that were tried."""
    found = random_trainings.right(pool2, numbers, strategy, precision)
    assert [each for each in found if each[1] != "exact"] == []


@pytest.mark.parametrize("precision", random_trainings.PRECISIONS)
def test_power(precision: str, pool2: RankPool) -> None:
    """The same under Lightning's ddp on unequal counts, which are wrong, are called that."""
    found = random_trainings.wrong(pool2, [0, 1, 2], precision)
    assert len(found) > 1
    assert [each for each in found if each[1] != "wrong"] == []
