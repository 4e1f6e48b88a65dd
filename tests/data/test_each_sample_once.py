"""Lightning's sampler repeats samples to make ranks even. Here each is trained on once, with default options."""

from __future__ import annotations

from collections.abc import Callable as Function
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
    random_split,
)
from torchmetrics import MeanMetric

from lightning_automodel import AutomodelStrategy, ExactnessCheck
from tests.checkpoint.checkpoints import Saves
from tests.data.plain import ENGINES, train_windows
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import PLAN, assert_exact, full_weights, weight_error
from tests.trainer.runs import LabelledModule, make_trainer, warnings_of


class Rows(Dataset):
    """Sequences of 6 tokens, whose labels are partly ignored; each row knows its index."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.tokens = torch.randint(11, (length, 6), generator=generator)
        self.ignored = torch.rand((length, 6), generator=generator) < 0.4

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        labels = tokens.masked_fill(self.ignored[index], -100)
        return {"input_ids": tokens, "labels": labels, "index": torch.tensor(index)}


class Trains(LabelledModule):
    """Logs, updates a metric and counts in a buffer, as users do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.seen: list[list[int]] = []  # rows of each batch that is no padding
        self.register_buffer("steps", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["index"].tolist())

    predict_step = validation_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch.get("only", batch)
        loss = self(batch)
        tokens = int((batch["labels"] != -100).sum())
        self.steps += 1
        self.mean.update(1.0, 1)
        self.log("rows", float(len(batch["index"])), sync_dist=True, reduce_fx="sum", on_epoch=True)
        self.log("loss", loss.detach(), batch_size=tokens, sync_dist=True, on_step=True, on_epoch=True)
        if not self.trainer.strategy.is_filler:
            self.seen.append(batch["index"].tolist())
        return {"loss": loss, "num_label_tokens": tokens}


def plain_weights(length: int, order: list[int], batch_size: int, accumulate: int) -> dict[str, Tensor]:
    """Weights of one process that takes each window of all ranks' batches as one batch, in this order of rows."""
    rows = Rows(length)
    size = batch_size * accumulate
    model = LabelledModule().model
    train_windows(
        model,
        (
            [default_collate([rows[index] for index in order[start : start + size]])]
            for start in range(0, len(order), size)
        ),
    )
    return full_weights(model)


class Manual(Trains):
    """Accumulates two batches by hand; the last of an epoch may be alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        tokens = int((batch["labels"] != -100).sum())
        ends = batch_idx % 2 == 1 or batch_idx + 1 == self.trainer.num_training_batches
        with optimizer.toggle_model(sync_grad=ends):
            self.manual_backward(super().training_step(batch, batch_idx)["loss"], num_label_tokens=tokens)
        if ends:
            optimizer.step()
            optimizer.zero_grad()


def _fit(
    options: dict[str, Any],
    length: int,
    loader: dict[str, Any],
    settings: dict[str, Any],
    kind: str = "automatic",
) -> dict[str, Any]:
    module = Manual() if kind == "manual" else Trains()
    if kind == "tensor parallel":
        module = TensorParallel()
    if kind == "synchronised metric":
        module.mean = MeanMetric(dist_sync_on_step=True)
    trainer = make_trainer(AutomodelStrategy(**options), **{"use_distributed_sampler": True, **settings})
    rows = Rows(length)
    if kind == "own sampler":
        loader = {**loader, "sampler": DistributedSampler(rows, shuffle=False)}
    loaders: Any = DataLoader(rows, **loader)
    if kind == "dictionary":
        loaders = {"only": loaders}
    told = warnings_of("count twice", trainer.fit, module, loaders)
    return {
        "seen": module.seen,
        "weights": full_weights(module.model),
        "rows": float(trainer.callback_metrics["rows"]),
        "metric": int(module.mean.update_count),
        "buffer": float(module.steps),
        "steps": trainer.global_step,
        "batches": trainer.num_training_batches,
        "told": told,
        "reports": [each.report for each in trainer.callbacks if isinstance(each, ExactnessCheck)],
    }


def rows_of(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def order_of(results: list[dict[str, Any]]) -> list[int]:
    """Rows in the order in which the ranks share them out: one of each rank in turn."""
    shares = [rows_of(result["seen"]) for result in results]
    longest = max(map(len, shares))
    return [share[place] for place in range(longest) for share in shares if place < len(share)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("engine", "length", "batch_size", "accumulate"),
    [
        # Rank 1's last batch is a row shorter; it has none, in a whole window, in a short one, and alone.
        ("fsdp2", 23, 5, 1),
        ("fsdp2", 21, 5, 1),
        ("ddp", 21, 5, 3),
        ("fsdp2", 21, 5, 2),
        ("ddp", 1, 5, 2),
        ("ddp", 7, 1, 2),
    ],
)
def test_weights_are_those_of_one_process(
    pool2: RankPool, engine: str, length: int, batch_size: int, accumulate: int
) -> None:
    results = pool2.run(
        _fit, ENGINES[engine], length, {"batch_size": batch_size}, {"accumulate_grad_batches": accumulate}
    )
    order = order_of(results)
    assert sorted(order) == list(range(length))
    expected = plain_weights(length, order, 2 * batch_size, accumulate)
    assert_exact((result["weights"] for result in results), expected)
    for result in results:
        assert result["rows"] == length
        assert result["metric"] == len(result["seen"])
        assert result["told"] == []
    assert len({result["batches"] for result in results}) == 1


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("num_ranks", "options", "kind"),
    [
        (2, {"count_window_ahead": True}, "automatic"),
        (2, {"data_parallel": "ddp", "count_window_ahead": True}, "automatic"),
        (2, {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}, "automatic"),
        (2, {}, "manual"),
        (2, {}, "dictionary"),
        (2, {"uneven_inputs": "pad"}, "automatic"),
        (2, {"uneven_inputs": "pad"}, "own sampler"),
        (4, {"data_parallel_replicate_size": 2}, "automatic"),
        (4, {"data_parallel": "ddp"}, "manual"),
        (4, {"tensor_parallel_size": 2}, "tensor parallel"),
    ],
)
def test_other_ways_to_train(
    pool2: RankPool, pool4: RankPool, num_ranks: int, options: dict[str, Any], kind: str
) -> None:
    """Three of four ranks have no row of the last batch, or one of two."""
    peers = options.get("tensor_parallel_size", 1)  # which have the padding batch together
    num_shares = num_ranks // peers
    length = num_shares * 6 + 1
    settings = {"accumulate_grad_batches": 1 if kind == "manual" else 2}
    pool = pool2 if num_ranks == 2 else pool4
    results = pool.run(_fit, options, length, {"batch_size": 2}, settings, kind)
    order = order_of(results[::peers])
    assert sorted(order) == list(range(length))
    expected = plain_weights(length, order, 2 * num_shares, 2)
    assert_exact((result["weights"] for result in results), expected)
    for result in results:
        assert (result["rows"], result["told"]) == (length, [])
        assert result["buffer"] == len(results[0]["seen"])  # rank 0's, which all have at the end


class Reduces(LabelledModule):
    """Keeps what it reduces and logs in each step, over all ranks and over half of them."""

    def __init__(self, gathers: str = "") -> None:
        super().__init__()
        self.gathers = gathers
        self.own: list[tuple[int, bool]] = []
        self.reduced: list[dict[str, float]] = []

    def on_fit_start(self) -> None:
        halves = [dist.new_group(ranks.tolist()) for ranks in torch.arange(4).chunk(2)]
        self.half = halves[dist.get_rank() // 2]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = batch["index"][0]
        if self.gathers:
            self.all_gather(own, self.half if self.gathers == "half" else None, sync_grads=True)
        self.own.append((int(own), self.trainer.strategy.is_filler))
        reduce = self.trainer.strategy.reduce
        for name, group in (("logged", None), ("half logged", self.half)):
            self.log(name, own.double(), batch_size=1, sync_dist=True, sync_dist_group=group)
        values = {
            "mean": reduce(own, reduce_op="mean"),
            "complex": reduce(own * 1j, reduce_op="mean").imag,
            "half": reduce(own, self.half, "mean"),
            "sum": reduce(own, reduce_op="sum"),
            **{name: self.trainer.callback_metrics[name] for name in ("logged", "half logged")},
        }
        self.reduced.append({name: float(value) for name, value in values.items()})
        return {"loss": self(batch), "num_label_tokens": int((batch["labels"] != -100).sum())}


def _reduce(length: int) -> tuple[list[tuple[int, bool]], list[dict[str, float]]]:
    module = Reduces()
    trainer = make_trainer(AutomodelStrategy(data_parallel="ddp"), use_distributed_sampler=True)
    trainer.fit(module, DataLoader(Rows(length), batch_size=1))
    return module.own, module.reduced


def _mean(values: list[tuple[int, bool]]) -> float:
    own = [value for value, is_padding in values if not is_padding]
    return sum(own) / len(own) if own else 0.0


@pytest.mark.every_case
@pytest.mark.parametrize("length", [5, 7, 8])
def test_means_leave_padding_batches_out(pool4: RankPool, length: int) -> None:
    """In the last of two steps 3, 1 or none of four ranks have one: of a half all, one or none."""
    results = pool4.run(_reduce, length)
    for step in range(2):
        own = [values[step] for values, _ in results]
        assert sum(is_padding for _, is_padding in own) == (8 - length) * step
        for rank, (_, reduced) in enumerate(results):
            half = own[rank // 2 * 2 :][:2]
            expected = dict.fromkeys(("mean", "complex", "logged"), _mean(own))
            expected |= dict.fromkeys(("half", "half logged"), _mean(half))
            expected["sum"] = sum(value for value, _ in own)
            if all(is_padding for _, is_padding in half):  # a loss may be divided by it
                expected["half"] = sum(value for value, _ in half) / 2
            assert reduced[step] == pytest.approx(expected, rel=1e-6)


def noting(name: str) -> Any:
    """A hook of a module, or of a callback, that logs the rows of its batch."""

    def hook(self: Any, *args: Any) -> None:
        module = self if isinstance(self, LightningModule) else args[1]
        if "start" in name:
            module.rows = next(each for each in args if isinstance(each, dict))["index"].double()
        size = len(module.rows)
        self.log(name, module.rows.mean(), batch_size=size, sync_dist=True, on_step=True, on_epoch=True)
        self.log_dict({f"{name} sum": float(size)}, reduce_fx="sum", sync_dist=True, on_epoch=True)

    return hook


class LogsInHooks(LabelledModule):
    """Logs in its step and in the hooks around it, and so does its callback."""

    def __init__(self) -> None:
        super().__init__()
        self.has_started: list[bool] = []

    def on_train_epoch_start(self) -> None:
        self.log("epoch", 1.0, reduce_fx="sum", sync_dist=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        noting("start")(self, batch)
        self.has_started.append(self.trainer.strategy.is_filler)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noting("step")(self)
        return {"loss": self(batch), "num_label_tokens": int((batch["labels"] != -100).sum())}

    on_before_optimizer_step = noting("optimizer")
    on_train_batch_end = noting("end")

    def on_train_epoch_end(self) -> None:
        self.log("epoch end", 1.0, reduce_fx="sum", sync_dist=True)


class AlsoLogs(Callback):
    on_train_batch_start = noting("callback start")
    on_train_batch_end = noting("callback end")


def _log_in_hooks(length: int, ahead: bool) -> tuple[dict[str, float], list[bool]]:
    module = LogsInHooks()
    trainer = make_trainer(
        AutomodelStrategy(data_parallel="ddp", count_window_ahead=ahead),
        use_distributed_sampler=True,
        callbacks=[AlsoLogs()],
        max_epochs=2,
    )
    trainer.fit(module, DataLoader(Rows(length), batch_size=2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.has_started


@pytest.mark.every_case
@pytest.mark.parametrize(("length", "ahead"), [(8, False), (9, False), (9, True), (1, False)])
def test_hooks_log_no_padding_batch(pool2: RankPool, length: int, ahead: bool) -> None:
    results = pool2.run(_log_in_hooks, length, ahead)
    for logged, _ in results:
        assert logged["epoch"] == logged["epoch end"] == 2
        for name in ("start", "step", "optimizer", "end", "callback start", "callback end"):
            assert logged[f"{name} sum"] == length
            assert logged[f"{name}_epoch"] == pytest.approx((length - 1) / 2)
            if length != 8:  # its last batch is rank 0's, with the last row of an epoch in its order
                assert logged[f"{name}_step"] == logged["step_step"] == int(logged["step_step"])
    padding = [has_started for _, has_started in results]
    per_epoch = -(-length // 4)
    last = [False] * (per_epoch - 1) + [length != 8]
    assert padding == [[False] * 2 * per_epoch, last * 2]


def _gather(length: int, gathers: str, drop_last: bool) -> str:
    trainer = make_trainer(AutomodelStrategy(data_parallel="ddp"), use_distributed_sampler=True)
    try:
        trainer.fit(Reduces(gathers), DataLoader(Rows(length), batch_size=1, drop_last=drop_last))
    except ValueError as error:
        return str(error)
    return ""


def test_padding_batches_are_not_gathered(pool4: RankPool) -> None:
    """Where they were negatives of a contrastive loss; over half of the ranks too."""
    for message in pool4.run(_gather, 7, "all", False):
        assert message.startswith("self.all_gather() in training_step while the data of a rank has ended")
    assert pool4.run(_gather, 7, "all", True) == [""] * 4
    assert pool4.run(_gather, 8, "all", False) == [""] * 4
    assert all(pool4.run(_gather, 5, "half", False))  # whose halves have 1 and 2 of them


def test_dropping_the_last_batch(pool2: RankPool) -> None:
    """As one process drops what does not fill a batch of all ranks: 20 of 29 rows are used."""
    results = pool2.run(_fit, {}, 29, {"batch_size": 5, "drop_last": True}, {})
    order = order_of(results)
    assert [len(result["seen"]) for result in results] == [2, 2]
    assert len(order) == len(set(order)) == 20
    assert_exact((result["weights"] for result in results), plain_weights(29, order, 10, 1))


TOLD = (
    "1 of 21 samples of the train data count twice in each epoch, so that all ranks have equally many. They"
)


def test_repeated_samples_are_told_of(pool2: RankPool) -> None:
    """Once, on rank 0, where they count twice: weights are then not those of one process. ExactnessCheck tells too."""
    settings = {"callbacks": [ExactnessCheck(steps=3)]}
    first, second = pool2.run(_fit, {}, 21, {"batch_size": 5}, settings, "own sampler")
    assert second["told"] == []
    assert len(first["told"]) == 1
    assert first["told"][0].startswith(TOLD)
    why = "a DistributedSampler, which is not the Trainer's own, or over which an __iter__ of yours"
    assert why in first["told"][0]
    assert all(TOLD in report for report in first["reports"])
    order = order_of([first, second])
    assert len(order) == 22
    assert len(set(order)) == 21
    assert weight_error(first["weights"], plain_weights(21, order[:21], 10, 1)) > 1e-3
    for padded in pool2.run(_fit, {}, 21, {"batch_size": 5}, settings):
        [report] = padded["reports"]
        assert report.startswith("ExactnessCheck: EXACT")
        assert TOLD not in report


def test_what_padding_would_change_is_refused(pool2: RankPool) -> None:
    """With as many batches on all ranks nothing is."""
    with pytest.raises(RankError, match="a metric with dist_sync_on_step=True would gather padding batches"):
        pool2.run(_fit, {}, 21, {"batch_size": 5}, {"max_epochs": 1}, "synchronised metric")
    pool2.run(_fit, {}, 21, {"batch_size": 4}, {"max_epochs": 1}, "synchronised metric")


class TensorParallel(Trains):
    def configure_model(self) -> None:
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)


class Several(LabelledModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch
        return self(first) + self(second)


def _train_on_two_loaders(length: int) -> None:
    loaders = CombinedLoader([DataLoader(Rows(length), 5), DataLoader(Rows(20), 5)], "max_size_cycle")
    trainer = make_trainer(AutomodelStrategy(per_token_loss=False), use_distributed_sampler=True)
    trainer.fit(Several(), loaders)


def test_one_of_several_loaders_is_refused(pool2: RankPool) -> None:
    """A padding batch beside another loader's batch would take that one's weight too; without one they train."""
    with pytest.raises(RankError, match=r"padding batches .* need one training loader, not several"):
        pool2.run(_train_on_two_loaders, 21)
    pool2.run(_train_on_two_loaders, 25)


# --- Resuming ---------------------------------------------------------------------------------------------------------


def _train(folder: Path, resumes: bool) -> list[list[int]]:
    """Rows of each batch in two epochs, which are saved after two batches, or resumed from there."""
    module = Trains()
    trainer = make_trainer(
        AutomodelStrategy(),
        max_epochs=2,
        accumulate_grad_batches=2,
        use_distributed_sampler=True,
        callbacks=[] if resumes else [Saves("on_train_batch_end", 2, folder / "saved")],
    )
    loader = DataLoader(Rows(25), 2, shuffle=True)
    trainer.fit(module, loader, ckpt_path=folder / "saved" if resumes else None)
    return module.seen


def test_resuming_on_fewer_ranks(pool2: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    """Four ranks have used 16 of 25 rows. Two go on with the other nine, of which the last is one rank's alone."""
    used = [rows_of(seen[:2]) for seen in pool4.run(_train, tmp_path, False)]
    rest = [rows_of(seen) for seen in pool2.run(_train, tmp_path, True)]
    epoch = [index for rows in used for index in rows] + rest[0][:5] + rest[1][:4]
    assert sorted(epoch) == list(range(25))
    assert [len(rows) for rows in rest] == [5 + 13, 4 + 12]


def _fit_by_own_numbers(kind: str) -> list[list[int]]:
    """Rows of each epoch on a rank whose random numbers are its own, as after ``seed_everything(seed + rank)``."""
    rank = dist.get_rank()
    rows: Dataset = Rows(21)
    sampler = None
    with pytest.MonkeyPatch.context() as patched, isolate_rng():
        patched.setenv("PL_GLOBAL_SEED", str(rank))
        torch.manual_seed(rank)
        if kind == "subset":
            rows = random_split(rows, [13, 8])[0]
        if kind == "sampler":
            sampler = SubsetRandomSampler(range(0, 21, 2))
        module = SeenByEpoch()
        trainer = make_trainer(AutomodelStrategy(), max_epochs=3, use_distributed_sampler=True)
        torch.manual_seed(rank)  # the module has seeded all alike
        trainer.fit(module, DataLoader(rows, batch_size=2, shuffle=sampler is None, sampler=sampler))
    return module.epochs


class SeenByEpoch(Trains):
    def on_train_epoch_start(self) -> None:
        self.seen.clear()

    def on_train_epoch_end(self) -> None:
        self.epochs = [*getattr(self, "epochs", []), rows_of(self.seen)]


@pytest.mark.every_case
@pytest.mark.parametrize(("kind", "expected"), [("shuffle", range(21)), ("sampler", range(0, 21, 2))])
def test_ranks_draw_alike(pool2: RankPool, kind: str, expected: range) -> None:
    """Also where their seeds and random states differ; each epoch has another order."""
    results = pool2.run(_fit_by_own_numbers, kind)
    for epoch in zip(*results, strict=True):
        assert sorted(index for rows in epoch for index in rows) == list(expected)
    assert len({tuple(rows) for rows in results[0]}) == 3


def _draw_by_generators(stage: str, seed: int) -> list[int]:
    """Rows of a stage on a rank that has seeded its sampler's own generator by ``seed * rank``."""
    generator = torch.Generator().manual_seed(seed * dist.get_rank())
    loader = DataLoader(Rows(21), 2, sampler=SubsetRandomSampler(range(21), generator=generator))
    module = Trains()
    trainer = make_trainer(AutomodelStrategy(), use_distributed_sampler=True)
    getattr(trainer, stage)(module, loader)
    return rows_of(module.seen)


@pytest.mark.every_case
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_orders_that_differ_are_refused(pool2: RankPool, stage: str) -> None:
    """Each rank would take its part of another order: some rows twice, others not at all."""
    rows = pool2.run(_draw_by_generators, stage, 0)
    assert sorted(rows[0] + rows[1]) == list(range(21))
    with pytest.raises(
        RankError, match="Samplers have drawn another order of the data on each rank"
    ) as raised:
        pool2.run(_draw_by_generators, stage, 1)
    assert len(raised.value.failures) == 2


def test_subsets_that_differ_are_refused(pool2: RankPool) -> None:
    with pytest.raises(RankError, match=r"different subsets of the data.*generator="):
        pool2.run(_fit_by_own_numbers, "subset")


class Backwards(SequentialSampler):
    """Lightning takes it for one that draws in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20, -1, -1))


class OwnBatches(BatchSampler):
    """Lightning makes it anew around its own sampler, and does not look at the one that it had."""


class SomeBatches(BatchSampler):
    """Leaves the first batch of the second rank out."""

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), dist.get_rank(), None)


class Short(SubsetRandomSampler):
    def __len__(self) -> int:
        return super().__len__() + 1


def _even() -> SubsetRandomSampler:
    return SubsetRandomSampler(range(0, 21, 2))


LOADERS: dict[str, Function[[Rows], DataLoader]] = {
    "plain": lambda rows: DataLoader(rows, 2, shuffle=True),
    "few": lambda rows: DataLoader(rows, 2, sampler=RandomSampler(rows, num_samples=10)),
    "repeated": lambda rows: DataLoader(rows, 2, sampler=RandomSampler(rows, replacement=True)),
    "backwards": lambda rows: DataLoader(rows, 2, sampler=Backwards(rows)),
    "list": lambda rows: DataLoader(rows, 2, sampler=list(range(20, -1, -1))),
    "batches": lambda rows: DataLoader(rows, batch_sampler=OwnBatches(_even(), 2, drop_last=False)),
}
OTHER_LOADERS: dict[str, Function[[Rows], DataLoader]] = {
    "torch's batches": lambda rows: DataLoader(
        rows, batch_sampler=BatchSampler(_even(), 2, drop_last=False)
    ),
    "some batches": lambda rows: DataLoader(rows, batch_sampler=SomeBatches(_even(), 2, drop_last=False)),
    "short": lambda rows: DataLoader(rows, 2, sampler=Short(range(0, 21, 2))),
}


def _draw_by_own_samplers(stage: str, kind: str) -> list[int]:
    """Rows of a stage on a rank whose random numbers are its own."""
    module = Trains()
    with isolate_rng():
        torch.manual_seed(dist.get_rank())
        trainer = make_trainer(AutomodelStrategy(), use_distributed_sampler=True)
        getattr(trainer, stage)(module, (LOADERS | OTHER_LOADERS)[kind](Rows(21)))
    return rows_of(module.seen)


@pytest.mark.every_case
@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_own_samplers_are_shared_out(pool2: RankPool, stage: str) -> None:
    """Ranks take turns in what each would draw in one process. Lightning replaces them, and shuffles what they draw."""
    drawn = {}
    for kind in LOADERS:
        first, second = pool2.run(_draw_by_own_samplers, stage, kind)
        drawn[kind] = [row for rows in zip_longest(first, second) for row in rows if row is not None]
    assert sorted(drawn["plain"]) == list(range(21))
    assert len(set(drawn["few"])) == len(drawn["few"]) == 10
    assert len(set(drawn["repeated"])) < len(drawn["repeated"]) == 21
    assert drawn["backwards"] == drawn["list"] == list(range(20, -1, -1))
    assert sorted(drawn["batches"]) == list(range(0, 21, 2))


def test_batch_samplers_in_prediction(pool2: RankPool) -> None:
    """Ranks that end early join the others."""
    for kind, left_out in (("torch's batches", 0), ("some batches", 2)):
        first, second = pool2.run(_draw_by_own_samplers, "predict", kind)
        assert len(first) == 6
        assert len(second) == 5 - left_out
        assert set(first + second) <= set(range(0, 21, 2))


def test_samplers_that_lose_samples_are_refused(pool2: RankPool) -> None:
    """Of a batch size that Lightning drops, and of a length that is too large."""
    with pytest.raises(RankError, match="drops a batch_sampler of torch's own class BatchSampler"):
        pool2.run(_draw_by_own_samplers, "validate", "torch's batches")
    with pytest.raises(RankError, match=r"has drawn 11 samples, and its len\(\) is 12"):
        pool2.run(_draw_by_own_samplers, "fit", "short")
