"""A fit that is stopped and resumed with new objects and disturbed random states, beside one that is never stopped."""

from __future__ import annotations

import dataclasses
import random
from collections import UserList
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset
from torchmetrics import MeanMetric

from lightning_automodel import AutomodelStrategy
from tests.trainer import runs
from tests.trainer.exactness import PLAN, VOCABULARY, WIDTH, Block

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None

NUM_SAMPLES = 29
QUIET = "quiet "
"""Before a kind of loader: its rows are loaded without random numbers."""
SHARED_OUT = ("distributed", "single rows", "workers", "persistent workers", "wrapped stateful")
"""Kinds of loaders whose rows Lightning's sampler shares out."""
BUFFERS = ("seen", "counts", "teacher")
EPOCH_MEANS = ("loss", "loss_epoch", "largest")
"""Logged values that begin anew where a fit goes on within an epoch."""
DDP = {"data_parallel": "ddp"}
FSDP2 = {"data_parallel": "fsdp2"}
Line = tuple[int, tuple[tuple[str, float], ...]]


class Ragged(Dataset):
    """Rows of unequal lengths; what is masked is drawn anew each time a row is loaded."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 2 + index % 4
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = torch.randint(VOCABULARY, (length,), generator=generator)
        labels[random.randrange(length)] = -100
        return {"input_ids": ids, "labels": labels}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


class Recorder(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        metrics = {name: value for name, value in metrics.items() if name not in EPOCH_MEANS}
        if metrics.keys() <= {"epoch", "running"} or "val_loss_step" in metrics:
            return
        self.lines.append((step, tuple(sorted((name, float(value)) for name, value in metrics.items()))))


class Learner(LightningModule):
    """A decoder with dropout and batch statistics, which logs in every way there is."""

    def __init__(
        self, tensor_parallel: bool = False, optimizer: str = "adamw", schedule: str = "step"
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.tensor_parallel = tensor_parallel
        self.optimizer_name = optimizer
        self.schedule = schedule
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.noise = torch.Generator().manual_seed(5)
        self.running = MeanMetric()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def configure_model(self) -> None:
        if self.tensor_parallel:
            parallelize_module(self, self.device_mesh["tensor_parallel"], PLAN)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = self.dropout(block(hidden))
        hidden = self.statistics(hidden.flatten(0, 1)).view_as(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        batches = [batch] if "labels" in batch else list(batch.values())
        self.seen += sum(each["input_ids"].sum() for each in batches) + random.random() + np.random.rand()
        self.seen += torch.rand((), generator=self.noise).item()
        loss = torch.stack([self.loss(each) for each in batches]).mean()
        self.running.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("running", self.running, on_step=False, on_epoch=True)
        self.log("seen", self.seen)
        return {
            "loss": loss,
            "num_label_tokens": sum(int((each["labels"] != -100).sum()) for each in batches),
        }

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch) + torch.rand(())
        self.log("val_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        optimizer = kinds[self.optimizer_name](self.parameters(), lr=0.02)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": self.schedule}]


class Calm(Learner):
    """Draws no random numbers and has no batch statistics: of a repeated batch it learns the same."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dropout = nn.Identity()
        self.statistics = nn.Identity()


class Counts(Callback):
    """Counts batches and validations, and keeps the counts."""

    def __init__(self) -> None:
        self.counts = {"batches": 0, "validations": 0}

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts["batches"] += 1

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        self.counts["validations"] += not trainer.sanity_checking

    def state_dict(self) -> dict[str, Any]:
        return self.counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state


COUNTING = (Counts, EarlyStopping)


def counting() -> list[Callback]:
    return [Counts(), EarlyStopping("val_loss", patience=9)]


def repeats(trainer: Trainer, hook: str) -> bool:
    """Whether a run that resumes from what a hook saves now trains on batches again, or validates again."""
    if hook in ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"):
        return False
    if hook not in ("on_train_batch_end", "on_validation_end"):
        return True
    number = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return number % trainer.accumulate_grad_batches > 0 and not is_last


class Saver(Callback):
    """Saves within a hook, when it is called for the `when`-th time.

    Notes how much was logged before, and whether what was saved repeats something.
    """

    def __init__(self, hook: str, when: int, path: Path) -> None:
        self.hook = hook
        self.when = when
        self.path = path
        self.calls = 0
        self.logged = -1
        self.repeats = False
        self.is_over = False
        setattr(self, hook, self._called)

    def _called(self, trainer: Trainer, *args: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.calls == self.when:
            # The log line of a batch or an epoch follows its hooks, and is lost.
            self.logged = len(trainer.logger.lines) + 1
            self.repeats = repeats(trainer, self.hook)
            self.is_over = trainer.fit_loop.epoch_progress.current.processed >= trainer.max_epochs
            trainer.save_checkpoint(self.path)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a fit is set up: options, and what makes its parts anew for each run."""

    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    learner: dict[str, Any] = dataclasses.field(default_factory=dict)
    module: type[Learner] = Learner
    loader: str = "own generator"
    callbacks: Callable[[], list[Callback]] = list


class Still(Dataset):
    """The same rows at all times."""

    def __init__(self) -> None:
        state = random.getstate()
        random.seed(7)
        self.rows = [Ragged()[index] for index in range(NUM_SAMPLES)]
        random.setstate(state)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Stream(IterableDataset):
    """Every rank its own rows, in order, without a length."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = Still()
        return iter(
            [rows[index] for index in range(self.rank, NUM_SAMPLES - NUM_SAMPLES % self.ranks, self.ranks)]
        )


class CountingStream(Stream):
    """Has a state: how many of its rows it has brought."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.brought = 0
        self.first = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.brought = self.first
        self.first = 0
        return self._rest()

    def _rest(self) -> Iterator[dict[str, Tensor]]:
        for row in list(super().__iter__())[self.brought :]:
            self.brought += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        return {"brought": self.brought}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["brought"]


def training_loader(kind: str, rank: int, ranks: int) -> Any:
    """A loader that brings each rank other rows, tensor-parallel peers the same."""
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": collate}
    data: Dataset = Ragged()
    if kind.startswith(QUIET):
        kind = kind.removeprefix(QUIET)
        data = Still()
    rows = Subset(data, range(rank, NUM_SAMPLES - NUM_SAMPLES % ranks, ranks))
    generator = torch.Generator().manual_seed(11 + rank)
    drawn = {"shuffle": True, "generator": generator, **options}
    persistent = {"num_workers": 1, "persistent_workers": True}
    makers: dict[str, Callable[[], Any]] = {
        "own iteration": lambda: Yielding(rows, shuffle=True, **options),
        "random sampler": lambda: DataLoader(Still(), sampler=Drawing(11), **options),
        "own generator": lambda: DataLoader(rows, **drawn),
        "global generator": lambda: DataLoader(rows, shuffle=True, **options),
        "distributed": lambda: DataLoader(data, shuffle=True, **options),
        "single rows": lambda: DataLoader(Single(), shuffle=True, batch_size=None),
        "workers": lambda: DataLoader(Still(), shuffle=True, num_workers=2, **options),
        "persistent workers": lambda: DataLoader(Still(), shuffle=True, **persistent, **options),
        "as workers end": lambda: DataLoader(Still(), num_workers=2, in_order=False, **options),
        "used before": lambda: _used(DataLoader(rows, **persistent, **drawn)),
        "stateful": lambda: StatefulDataLoader(rows, **drawn),
        "wrapped stateful": lambda: StatefulDataLoader(
            data, shuffle=True, **options
        ),  # by Lightning's sampler
        "stateful stream": lambda: StatefulDataLoader(CountingStream(rank, ranks), **options),
        "stream without a state": lambda: StatefulDataLoader(Stream(rank, ranks), **options),
        "stateful sampler": lambda: DataLoader(rows, sampler=CountingSampler(len(rows)), **options),
        "own batch sampler": lambda: DataLoader(
            rows, batch_sampler=OwnBatches(len(rows)), collate_fn=collate
        ),
        "stream": lambda: DataLoader(Stream(rank, ranks), **options),
        "iterable": lambda: UserList([collate([row]) for row in Stream(rank, ranks)]),
        "short own generator": lambda: DataLoader(Subset(rows, range(4)), **drawn),
    }
    if kind in makers:
        return makers[kind]()
    return CombinedLoader(
        {"few": makers["short own generator"](), "many": makers["global generator"]()}, kind
    )


def _used(loader: DataLoader) -> DataLoader:
    """A loader from which a first batch was taken, whose workers go on."""
    next(iter(loader))
    return loader


class Yielding(DataLoader):
    """Has an ``__iter__`` of its own, as libraries have them."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class CountingSampler(Sampler):
    """Draws another order each time, and tells by its state how often it has."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(
            torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epochs)).tolist()
        )

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


class OwnBatches:
    """A batch sampler of no class of torch's: its order depends on the epoch that it is told, and on its state."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.draws = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length // 2

    def __iter__(self) -> Iterator[list[int]]:
        self.draws += 1
        generator = torch.Generator().manual_seed(100 * self.epoch + self.draws)
        order = torch.randperm(self.length, generator=generator).tolist()
        return iter([order[2 * index : 2 * index + 2] for index in range(len(self))])

    def state_dict(self) -> dict[str, int]:
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.draws = state["draws"]


class Drawing(Sampler):
    """Draws each index from the global generator of Python, as samplers of buckets do."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(NUM_SAMPLES) for _ in range(self.length))


class Single(Ragged):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return collate([super().__getitem__(index)])


def make_trainer(setting: Setting, callbacks: list[Callback]) -> Trainer:
    options = {
        "max_epochs": 2,
        "logger": Recorder(),
        "log_every_n_steps": 1,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "use_distributed_sampler": setting.loader.removeprefix(QUIET) in SHARED_OUT,
        "num_sanity_val_steps": 1,
        "callbacks": [*setting.callbacks(), *callbacks],
        **setting.trainer,
    }
    return runs.make_trainer(AutomodelStrategy(**setting.strategy), **options)


def disturb(seed: int) -> None:
    """Set all global random states to something of `seed`."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run(
    setting: Setting, *callbacks: Callback, seed: int = 1, ckpt_path: Path | None = None
) -> tuple[Trainer, Any]:
    """Fit; return the Trainer and what is to be the same."""
    peers = setting.strategy.get("tensor_parallel_size", 1)
    disturb(1000 * seed + dist.get_rank() // peers)
    trainer = make_trainer(setting, list(callbacks))
    learner = setting.module(**setting.learner)
    training = training_loader(setting.loader, dist.get_rank() // peers, dist.get_world_size() // peers)
    validation = DataLoader(Subset(Still(), range(11)), batch_size=4, collate_fn=collate)
    trainer.fit(learner, training, validation, ckpt_path=ckpt_path)
    return trainer, outcome(trainer)


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Weights, buffers, optimizer and scheduler state, counters, and the next random numbers of this rank."""
    module = trainer.lightning_module
    tensors = {
        name: _own_part(value) for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    for name, state in ((n, trainer.optimizers[0].state.get(p, {})) for n, p in module.named_parameters()):
        tensors |= {f"{name}/{key}": _own_part(value) for key, value in state.items()}
    return {
        "tensors": tensors,
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "random": [torch.rand(2).tolist(), random.random(), np.random.rand()],
        "metrics": {
            n: float(value) for n, value in sorted(trainer.callback_metrics.items()) if n not in EPOCH_MEANS
        },
        # Callbacks keep what they load on the host (EarlyStopping's best score), and what they compute on
        # the device.
        "callbacks": [
            tree_map_only(Tensor, Tensor.cpu, callback.state_dict())
            for callback in trainer.callbacks
            if isinstance(callback, COUNTING)
        ],
    }


def _own_part(value: Any) -> Tensor:
    value = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
    return value.detach().to_dense().clone()  # torch.equal takes no sparse tensors


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names of what is not the same bit for bit."""
    named = {f"{key}": (value, found[key]) for key, value in expected.items() if key != "tensors"}
    differing = [f"{key}: {a} {b}" for key, (a, b) in named.items() if repr(a) != repr(b)]
    tensors = expected["tensors"], found["tensors"]
    if tensors[0].keys() != tensors[1].keys():
        differing.append("names of tensors")
    return differing + [
        name for name, value in tensors[0].items() if not torch.equal(value, tensors[1].get(name))
    ]


def differences_of_weights(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names of weights, optimizer states and counts of steps that are not the same bit for bit."""
    kept = [
        {**{key: outcome_[key] for key in ("lr", "step", "epoch")}, "tensors": tensors}
        for outcome_ in (expected, found)
        for tensors in [{n: t for n, t in outcome_["tensors"].items() if n not in BUFFERS}]
    ]
    return differences(*kept)


def compare(setting: Setting, folder: Path, *stops: tuple[str, int]) -> list[str]:
    """Runs on every rank: what differs between a fit and ones that were resumed from where a hook had saved them.

    A stop is a hook, and which of its calls saves. Where batches are repeated, weights must be the same.
    """
    trainer, undisturbed = run(setting)
    lines = trainer.logger.lines
    savers = [Saver(hook, when, folder / f"{hook}-{when}.ckpt") for hook, when in stops]
    saving, saved = run(setting, *savers)
    disturbed = differences(undisturbed, saved) + differing_lines(lines, saving.logger.lines)
    found = [f"saving disturbs {name}" for name in disturbed]
    for saver in savers:
        name = saver.path.stem
        if saver.logged < 0:
            found.append(f"{name}: {saver.calls} calls")
            continue
        if saver.repeats:
            assert issubclass(setting.module, Calm), "weights of repeated batches depend on random numbers"
            resumed = differences_of_weights(undisturbed, run(setting, seed=2, ckpt_path=saver.path)[1])
        else:
            resumed = resume(setting, saver.path, undisturbed, lines, len(lines) - saver.logged)
        found += [f"resumed from {name}: {difference}" for difference in resumed]
    return found


def compare_stop(setting: Setting, stopped: Setting, path: Path, *callbacks: Callback) -> list[str]:
    """Runs on every rank: what differs between a fit and one that was stopped, saved to `path` and resumed."""
    trainer, undisturbed = run(setting)
    try:
        stopped_trainer, _ = run(stopped, *callbacks)
    except SystemExit:
        stopped_trainer = None
    if stopped_trainer is not None and not path.exists():
        stopped_trainer.save_checkpoint(path)
    return resume(setting, path, undisturbed, trainer.logger.lines, 1)


def resume(setting: Setting, path: Path, undisturbed: Any, lines: list[Line], least: int) -> list[str]:
    """What differs where a fit goes on from `path`; it must log what the undisturbed one did last, `least` lines."""
    resumed, outcome_ = run(setting, seed=2, ckpt_path=path)
    logged = resumed.logger.lines
    differing = differences(undisturbed, outcome_) + differing_lines(
        lines[len(lines) - len(logged) :], logged
    )
    if len(logged) < least:
        differing.append(f"{len(logged)} lines were logged, not {least}")
    return differing


class Stop(Exception):  # noqa: N818 - it is none
    """What ends a run."""


def differing_lines(expected: list[Line], found: list[Line]) -> list[str]:
    pairs = enumerate(zip(expected, found, strict=False))
    different = next((f"line {index}: {a} {b}" for index, (a, b) in pairs if a != b), None)
    if different is None and len(expected) != len(found):
        different = f"{len(found)} lines, not {len(expected)}"
    return [] if different is None else [different]
