"""Ranks with unequally many batches: an error in training that names them, and each sample once in evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_automodel import AutomodelStrategy, dp_eval_sample_shard
from lightning_automodel.data.samplers import check_counted_ranks
from tests.data.plain import loader_of, own_batches
from tests.rank_pool import RankError, RankPool
from tests.trainer.runs import LabelledModule, make_trainer

NUM_BATCHES = (5, 3)


class Evaluated(LabelledModule):
    test_step = predict_step = LabelledModule.validation_step


def _run(
    stage: str, options: dict[str, Any], counts: tuple[int, int], is_stream: bool, settings: Any
) -> None:
    module = Evaluated()
    trainer = make_trainer(AutomodelStrategy(timeout=0.5, **options), **settings)
    getattr(trainer, stage)(module, loader_of(counts, is_stream))


FSDP2: dict[str, Any] = {}
DDP = {"data_parallel": "ddp"}


@pytest.mark.each_value
@pytest.mark.parametrize("is_stream", [False, True], ids=["sized", "stream"])
@pytest.mark.parametrize("options", [FSDP2, DDP], ids=["fsdp2", "ddp"])
def test_training_names_the_rank_whose_data_ends(
    pool2: RankPool, options: dict[str, Any], is_stream: bool
) -> None:
    """On both ranks, before the step that only one of them would finish."""
    with pytest.raises(RankError) as raised:
        pool2.run(_run, "fit", options, NUM_BATCHES, is_stream, {})
    failures = raised.value.failures
    told = "The train data of rank 1 ends with batch 3, and other ranks would go on and wait for more"
    assert f"RuntimeError: {told}" in failures[1]
    assert "Trainer(limit_train_batches=3)" in failures[1]
    assert "RankFailedError: rank 1" in failures[0]
    assert told in failures[0]


@pytest.mark.every_case
@pytest.mark.parametrize("is_stream", [False, True], ids=["sized", "stream"])
def test_what_ends_together_is_left_alone(pool2: RankPool, is_stream: bool) -> None:
    """Equal counts, a limit that makes them equal, and a fit that is over before."""
    for stage, counts, settings in (
        ("fit", (3, 3), {"max_epochs": 2}),
        ("validate", (3, 3), {}),
        ("fit", NUM_BATCHES, {"limit_train_batches": 3}),
        ("predict", NUM_BATCHES, {"limit_predict_batches": 2}),
        ("fit", NUM_BATCHES, {"max_steps": 2}),
    ):
        assert pool2.run(_run, stage, FSDP2, counts, is_stream, settings) == [None, None], stage


# --- Evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True], ids=["sized", "stream"])
def test_a_rank_without_a_batch_is_told(pool2: RankPool, is_stream: bool) -> None:
    with pytest.raises(RankError, match="no batch for rank 1") as raised:
        pool2.run(_run, "validate", FSDP2, (2, 0), is_stream, {})
    assert set(raised.value.failures) == {0, 1}


class Numbers(LabelledModule):
    """Logs the mean of its samples, and predicts them."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("mean", batch.mean(), batch_size=len(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        return batch.int().tolist()


def _evaluate_numbers(
    options: dict[str, Any], sizes: tuple[int, ...], batch_size: int, own: bool
) -> tuple[list[float], list[int], list[int]]:
    """Means of loaders of so many numbers, what is predicted of the first one, and what its sampler draws."""
    trainers = [
        make_trainer(AutomodelStrategy(**options), use_distributed_sampler=not own) for _ in range(2)
    ]
    loaders = []
    for size in sizes:
        numbers = torch.arange(10.0, 10.0 * (size + 1), 10.0)
        sampler = DistributedSampler(numbers, 2, dist.get_rank(), shuffle=False) if own else None
        loaders.append(DataLoader(numbers, batch_size, sampler=sampler))
    found = [value for each in trainers[0].validate(Numbers(), loaders) for value in each.values()]
    predicted = trainers[1].predict(Numbers(), loaders[0])
    return found, [number for batch in predicted for number in batch], list(loaders[0].sampler)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("options", "batch_size", "own"), [(DDP, 1, False), (DDP, 2, True), (FSDP2, 2, True)]
)
def test_no_sample_is_repeated(pool2: RankPool, options: dict[str, Any], batch_size: int, own: bool) -> None:
    """Samplers repeat samples to even the ranks out: 7 of them on 2 ranks have the mean of 8.

    In prediction Lightning puts the batch sampler into another one. The user's own sampler repeats as before.
    """
    results = pool2.run(_evaluate_numbers, options, (7, 4, 3), batch_size, own)
    for found, *_ in results:
        assert found == pytest.approx([40.0, 25.0, 20.0])
    assert [predicted for _, predicted, _ in results] == [[10, 30, 50, 70], [20, 40, 60]]
    if own:
        assert [drawn for *_, drawn in results] == [[0, 2, 4, 6], [1, 3, 5, 0]]


class Aggregated(LabelledModule):
    """Logs metrics, to which values of float64 come."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric()
        self.mean = MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for name in ("largest", "mean"):
            getattr(self, name).update(batch)
            self.log(name, getattr(self, name))


def _aggregate() -> dict[str, float]:
    loader = DataLoader(7.1 - torch.arange(5, dtype=torch.float64), 1)
    trainer = make_trainer(AutomodelStrategy(), use_distributed_sampler=True, precision="64-true")
    return dict(trainer.validate(Aggregated(), loader)[0])


def test_metrics_keep_their_dtype(pool2: RankPool) -> None:
    """Logging makes them float64 from the third batch on, which only one rank has here: gloo aborted."""
    for found in pool2.run(_aggregate):
        assert found == pytest.approx({"largest": 7.1, "mean": 5.1}, rel=1e-12)


class GathersAtTheEnd(Numbers):
    """Gathers what it has predicted in an epoch, as Lightning recommends, or in the way for ragged values."""

    def __init__(self, in_steps: bool, ragged: bool) -> None:
        super().__init__()
        self.in_steps = in_steps
        self.ragged = ragged
        self.kept: list[Tensor] = []
        self.gathered: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.in_steps:
            self.all_gather(batch, sync_grads=True)
        return 0.0 * sum(parameter.sum() for parameter in self.parameters())

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.kept.append(batch)

    def on_validation_epoch_end(self) -> None:
        own = torch.cat(self.kept)
        if self.ragged:
            self.gathered = torch.cat(gather_all_tensors(own)).tolist()
        else:
            self.all_gather(own)


def _gather_at_the_end(ragged: bool, in_steps: bool = False) -> Any:
    module = GathersAtTheEnd(in_steps, ragged)
    loader = DataLoader(torch.arange(7.0 if in_steps else 9.0), 2)
    options: dict[str, Any] = {"data_parallel": "ddp", "per_token_loss": False, "timeout": 0.5}
    trainer = make_trainer(AutomodelStrategy(**options), use_distributed_sampler=True)
    try:
        if in_steps:
            trainer.fit(module, loader)
        else:
            trainer.validate(module, loader)
    except ValueError as error:
        return str(error)
    return sorted(module.gathered)


def test_gathering_what_ranks_have_unequally_many_of(pool2: RankPool) -> None:
    """On each rank an error with the sizes, at an epoch's end and in training; the remedy that it names works."""
    told = "self.all_gather() of tensors of the shapes [(5,), (4,)]"
    assert all(message.startswith(told) for message in pool2.run(_gather_at_the_end, False))
    assert pool2.run(_gather_at_the_end, True) == [list(map(float, range(9)))] * 2
    told = "self.all_gather() of tensors of the shapes [(2,), (1,)]"
    assert all(message.startswith(told) for message in pool2.run(_gather_at_the_end, True, True))


def _stop(*args: Any) -> Any:
    """Draws from an iterator of its own, which ends on rank 1 first."""
    if dist.get_rank() == 1:
        next(iter(()))
    return args[0] if args else None


class StopsInDataset(torch.utils.data.Dataset):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index] if index < 2 else _stop(self.batches[index])


def _stop_by_itself(options: dict[str, Any], where: str, stage: str) -> None:
    """In a hook of the module, or of a callback (``Callback.on_...``), or in the dataset."""
    trainer = make_trainer(AutomodelStrategy(**options), max_epochs=2)
    module = Evaluated()
    loader = loader_of((4, 4))
    if where == "Dataset":
        loader = DataLoader(StopsInDataset(loader.dataset), batch_size=None)
    elif where.startswith("Callback."):
        callback = pl.Callback()
        hook = where.partition(".")[2]
        setattr(callback, hook, lambda trainer, *args: None if trainer.current_epoch else _stop())
        trainer.callbacks.append(callback)
    elif where in ("training_step", "validation_step"):
        setattr(module, where, lambda *args: module(_stop(*args)))
    else:
        setattr(module, where, _stop)
    getattr(trainer, stage)(module, loader)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "where", "stage", "told"),
    [
        (DDP, "training_step", "fit", "training_step raised StopIteration"),
        (FSDP2, "validation_step", "validate", "validation_step raised StopIteration"),
        (
            FSDP2,
            "transfer_batch_to_device",
            "predict",
            "A hook of the transfer of a batch raised StopIteration",
        ),
    ],
)
def test_stop_iteration_of_a_step(
    pool2: RankPool, options: dict[str, Any], where: str, stage: str, told: str
) -> None:
    """Lightning would take it for the end of the data on one rank, and the others would wait for it."""
    with pytest.raises(RankError) as raised:
        pool2.run(_stop_by_itself, options, where, stage)
    assert all(told in failure for failure in raised.value.failures.values())
    assert re.search(r"test_uneven_inputs\.py\", line \d+, in _stop", raised.value.failures[1])
    assert "RankFailedError: rank 1" in raised.value.failures[0]


OTHER_BATCHES = (
    r"different batches, this rank in batch \d of epoch [01]\. A hook, a step or a data set has raised"
)
EVALUATED = r"The ranks have evaluated \[4, \d\] batches"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "where", "stage", "told"),
    [
        (FSDP2, "Callback.on_train_batch_start", "fit", OTHER_BATCHES),
        (DDP, "Dataset", "fit", OTHER_BATCHES),
        # Replicas do not communicate in evaluations, and raise at their end.
        (DDP, "Callback.on_validation_batch_start", "validate", EVALUATED),
        (DDP, "Callback.on_predict_batch_end", "predict", EVALUATED),
    ],
)
def test_an_epoch_that_ends_on_one_rank_alone(
    pool2: RankPool, options: dict[str, Any], where: str, stage: str, told: str
) -> None:
    """Its next window is one of the next epoch: both ranks raise, with the batches."""
    with pytest.raises(RankError) as raised:
        pool2.run(_stop_by_itself, options, where, stage)
    assert all(re.search(told, failure) for failure in raised.value.failures.values())


def _leave_early(options: dict[str, Any], how: str) -> None:
    """After two batches of four, on rank 1."""
    module = Evaluated()
    trainer = make_trainer(AutomodelStrategy(timeout=timedelta(seconds=4), **options))
    leaves = dist.get_rank() == 1
    if how == "should_stop":
        module.on_train_batch_end = lambda output, batch, index: setattr(
            trainer, "should_stop", leaves and index == 1
        )
    else:
        module.on_train_batch_start = lambda batch, index: -1 if leaves and index == 2 else None
    loader = loader_of((4, 4))
    world = dist.group.WORLD
    assert world is not None
    world.set_timeout(timedelta(seconds=4))  # the pool's group, which the strategy has not made
    try:
        trainer.fit(module, loader, loader)
    finally:
        world.set_timeout(timedelta(minutes=30))


@pytest.mark.every_case
@pytest.mark.parametrize(("options", "how"), [(DDP, "should_stop"), (FSDP2, "-1")], ids=["ddp", "fsdp2"])
def test_a_rank_that_leaves_early(pool2: RankPool, options: dict[str, Any], how: str) -> None:
    """It waits in its validation or at the end, and does not communicate with the other one's training step."""
    with pytest.raises(RankError) as raised:
        pool2.run(_leave_early, options, how)
    said = {"should_stop": "began a validation after training step 2", "-1": "ended its run after"}
    for failure in raised.value.failures.values():
        assert said[how] in failure
        assert "set trainer.should_stop on all of them or on none" in failure
        assert "the process died" not in failure


class Leaving(DataLoader):
    def __init__(self, batches: list[Any], number: int) -> None:
        super().__init__(batches, batch_size=None)
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(super().__iter__()):
            if index < self.number:
                yield batch


class Estimating(Sampler[int]):
    """Estimates its length, as samplers do that fill batches up to a number of tokens."""

    def __init__(self, length: int, number: int) -> None:
        self.length = length
        self.number = number

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.number)


def _leave_out(what: str, stage: str, counts: tuple[int, int], **options: Any) -> tuple[int, int]:
    """How many batches and steps there were. The module has a buffer, which rank 0 broadcasts before a forward."""
    module = Evaluated()
    module.register_buffer("seen", torch.zeros(1))
    trainer = make_trainer(AutomodelStrategy(**options), max_epochs=2)
    batches = own_batches((4, 4))
    number = counts[dist.get_rank()]
    loader: DataLoader[Any] = Leaving(batches, number)
    if what == "sampler":
        loader = DataLoader(batches, batch_size=None, sampler=Estimating(4, number))
    if stage == "validate":
        trainer.validate(module, loader, verbose=False)
    else:
        trainer.fit(module, loader, loader if stage == "val in fit" else None)
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1, trainer.global_step


@pytest.mark.every_case
@pytest.mark.parametrize(("what", "stage"), [("loader", "val in fit"), ("sampler", "train")])
def test_length_that_says_nothing(pool2: RankPool, what: str, stage: str) -> None:
    """A loader leaves batches out, or a sampler estimates: unequal ranks are told so, equal ones train.

    Padding and evaluation go on. What comes next is sent before the forward's first collective.
    """
    with pytest.raises(RankError) as raised:
        pool2.run(_leave_out, what, stage, (4, 2), timeout_s=30)
    for failure in raised.value.failures.values():
        assert "The train data of rank 1 ends with batch 2, and other ranks would go on and wait" in failure
    assert pool2.run(_leave_out, what, "train", (3, 3)) == [(6, 6)] * 2
    if what == "loader":
        assert pool2.run(_leave_out, what, "train", (4, 2), uneven_inputs="pad") == [(8, 8)] * 2
        pool2.run(_leave_out, what, "validate", (4, 2))


# --- Which ranks may evaluate different samples -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", AutomodelStrategy(data_parallel="ddp"), DDPStrategy()])
def test_whole_models_take_different_samples(strategy: Any) -> None:
    """With the model on every rank, each goes at its own pace."""
    assert [dp_eval_sample_shard(strategy, rank, 3) for rank in range(3)] == [(0, 3), (1, 3), (2, 3)]
    assert dp_eval_sample_shard(distributed_config=strategy, dp_rank=1, dp_size=3) == (1, 3)
    assert dp_eval_sample_shard(strategy, 0, 1) is None


@pytest.mark.parametrize(
    "strategy", ["fsdp2", AutomodelStrategy(), ModelParallelStrategy(), "unknown", None]
)
def test_sharded_models_stay_in_lockstep(strategy: Any) -> None:
    """Where a forward gathers parameters, or nobody knows, all ranks see the same samples."""
    assert dp_eval_sample_shard(strategy, 1, 3) is None


@pytest.mark.parametrize(("dp_rank", "dp_size"), [(3, 3), (-1, 2), (0, 0)])
def test_rank_outside_of_the_group(dp_rank: int, dp_size: int) -> None:
    """A global rank in the place of the group's is refused, whatever the strategy."""
    with pytest.raises(ValueError, match="is not in range") as raised:
        dp_eval_sample_shard("fsdp2", dp_rank, dp_size)
    assert str(raised.value) == (
        f"dp_rank={dp_rank} is not in range(dp_size={dp_size}); pass the rank within the dp group."
    )


# --- Data sets that share their rows out by themselves ----------------------------------------------------------------


def loader_counting(rank: int, size: int) -> SimpleNamespace:
    """A loader whose data set counts ranks as litdata's do."""
    return SimpleNamespace(
        dataset=SimpleNamespace(distributed_env=SimpleNamespace(global_rank=rank, world_size=size))
    )


def test_made_before_the_ranks_have_started() -> None:
    """Each rank then takes itself for the only one, and reads all rows."""
    check_counted_ranks(loader_counting(1, 2), 1, 2)
    check_counted_ranks([1, 2, 3], 1, 2)
    with pytest.raises(ValueError, match=r"counts this rank as \(0, 1\), and the run as \(1, 2\)"):
        check_counted_ranks(loader_counting(0, 1), 1, 2)
