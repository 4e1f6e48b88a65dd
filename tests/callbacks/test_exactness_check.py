"""ExactnessCheck reports what is wrong, reports nothing else, and leaves no trace in the training."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_automodel import ExactnessCheck
from lightning_automodel.callbacks.exactness import replay
from lightning_automodel.callbacks.exactness.module_state import snapshot_of, starting_from
from lightning_automodel.distributed import collectives
from tests.callbacks.exactness import (
    SLICED,
    TRAININGS,
    WORDS,
    Attending,
    Training,
    Within,
    Writer,
    bits_of,
    run,
    sentences,
    verdict_of,
)
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import SILENT
from tests.trainer.runs import make_trainer


@pytest.mark.every_case
@pytest.mark.parametrize("name", TRAININGS)
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
        "states",
        "fsdp2",
        "half precision",
        "lightning",
        "overrides",
        "slices, random numbers",
        "manual, by hand",
        "gan, accumulated",
    ],
)
def test_training_has_the_same_bits(name: str, pool2: RankPool) -> None:
    """Weights and random states, with the callback and without it."""
    assert pool2.run(bits_of, name, True) == pool2.run(bits_of, name, False)


def test_what_a_replay_draws_and_registers_is_put_back() -> None:
    """Whatever else is put back later."""
    module = nn.Module()
    module.register_buffer("made", None)
    before = torch.get_rng_state()
    cpu = torch.device("cpu")
    with starting_from(snapshot_of(module, cpu), module, cpu):
        module.made = torch.rand(1)
        module.register_buffer("new", torch.ones(1))
    assert torch.equal(before, torch.get_rng_state())
    assert (module.made, hasattr(module, "new")) == (None, False)


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


def raise_within() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_TIME_AFTER_ERROR", timedelta(seconds=1))  # 20, which would all be waited
        run(Training(Within, options={"auto_wrap_policy": {nn.Linear}}))


def test_a_rank_that_raises_within_a_forward(pool2: RankPool) -> None:
    """The others wait for a unit of it, and can only end with it: none hangs, and the error is the rank's own."""
    with pytest.raises(
        RankError, match="OSError: this rank's disk is full, on this rank alone and within a forward"
    ):
        pool2.run(raise_within)


def test_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """The report is logged, and attributes have the numbers of each step. A short window comes later, unseen."""
    check = ExactnessCheck(steps=2)
    settings = {**SILENT, "callbacks": [check], "accumulate_grad_batches": 2}
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=4, **settings)
    trainer.fit(Writer(), DataLoader(sentences(0)[:1] * 5, batch_size=None))
    assert check.report in caplog.text
    assert "EXACT but for the last window of each epoch, which has 1 of 2 micro-batches" in check.report
    assert (check.verdict, len(check.results)) == ("exact", 2)


def train_on(same: bool) -> str:
    """The report of a fit whose loader nobody has shared out, on this rank's sentences or on rank 0's."""
    check = ExactnessCheck(steps=1)
    trainer = make_trainer("ddp", max_steps=1, callbacks=[check])
    trainer.fit(Writer(), DataLoader(sentences(0 if same else dist.get_rank()), batch_size=None))
    return check.report


@pytest.mark.every_case
@pytest.mark.parametrize("same", [True, False])
def test_ranks_with_the_same_batches(pool2: RankPool, same: bool) -> None:
    for report in pool2.run(train_on, same):
        assert ("All ranks had the same batches" in report) == same


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


# --- Random trainings -------------------------------------------------------------------------------------------------

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
STRATEGIES = ("fsdp2", "ddp", "lightning")


class RandomNet(LightningModule):
    """Of random width and depth, with an attention whose key bias has no gradient but rounding."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        draw = random.Random(number)
        width = draw.choice([5, 16, 33, 64])
        dropout = draw.choice([0.0, 0.0, 0.2])
        self.is_residual = draw.random() < 0.6
        self.embedding = nn.Embedding(WORDS, width)
        self.head = nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(draw.choice([1, 3, 8]))
        )
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        scale = draw.choice([0.5, 1.0, 3.0])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(scale)
        self.embedding.weight.requires_grad_(draw.random() < 0.8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        states = self.embedding(batch["input_ids"])
        for layer in self.layers:
            states = states + layer(states) if self.is_residual else layer(states)
        scores = self.query(states) @ self.key(states).mT / states.shape[-1] ** 0.5
        logits = self.head(torch.softmax(scores, dim=-1) @ states + states)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])


def random_training(number: int, strategy: str, precision: str, equal: bool = False) -> Training:
    draw = random.Random(-number)
    accumulate = draw.choice([1, 2, 3, 4])
    rows = draw.choice([1, 2, 3])
    return Training(
        lambda: RandomNet(number),
        data=lambda rank: sentences(1000 * rank + number, 3 * accumulate, rows, equal),
        strategy=strategy,
        options={"auto_wrap_policy": {RandomNet}} if strategy == "fsdp2" and draw.random() < 0.3 else {},
        trainer={
            "max_steps": 1,
            "precision": precision,
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": draw.choice([None, None, 0.1, 1.0]),
        },
    )


def random_verdicts(numbers: list[int], *training: Any) -> list[tuple[int, str | None, str]]:
    """The number, the verdict and the report of each."""
    found = []
    for number in numbers:
        check, _ = run(random_training(number, *training))
        found.append((number, check.verdict, check.report))
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("numbers", [[0], pytest.param([1, 2], marks=pytest.mark.sweep)])
def test_no_false_alarm(strategy: str, precision: str, numbers: list[int], pool2: RankPool) -> None:
    """What is right is called exact, under Lightning's ddp where micro-batches have equal counts."""
    training = (strategy, precision, strategy == "lightning")
    found = pool2.run(random_verdicts, numbers, *training, timeout_s=300)[0]
    assert [each for each in found if each[1] != "exact"] == []
