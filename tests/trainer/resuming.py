"""A fit that is stopped and resumed with new objects and disturbed random states, beside one that is never stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_automodel import AutomodelStrategy
from tests.trainer.exactness import PLAN, VOCABULARY, WIDTH, Block

NUM_SAMPLES = 29
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
    """Pad."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


class Recorder(Logger):
    """Keeps what is logged, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.lines.append((step, tuple(sorted((name, float(value)) for name, value in metrics.items()))))


class Learner(LightningModule):
    """A decoder with dropout and batch statistics, which logs in every way there is."""

    def __init__(self, tensor_parallel: bool = False, optimizer: str = "adamw", schedule: str = "step") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.tensor_parallel, self.optimizer_name, self.schedule = tensor_parallel, optimizer, schedule
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
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

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen += batch["input_ids"].numel() + random.random() + np.random.rand()
        loss = self.loss(batch)
        self.running.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("running", self.running, on_step=False, on_epoch=True)
        self.log("seen", self.seen)
        return loss

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


class Saver(Callback):
    """Saves within a hook, when it is called for the `when`-th time, and notes how much was logged before."""

    def __init__(self, hook: str, when: int, path: Path) -> None:
        self.hook, self.when, self.path = hook, when, path
        self.calls, self.logged = 0, -1
        setattr(self, hook, self._called)

    def _called(self, trainer: Trainer, *args: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.calls == self.when:
            self.logged = len(trainer.logger.lines)
            trainer.save_checkpoint(self.path)


class Setting:
    """How a fit is set up; everything is made anew for each run.

    Args:
        strategy: Options of the strategy.
        trainer: Options of the Trainer.
        learner: Options of the module.
        loader: Options of the training loader.
        callbacks: Makes callbacks.
    """

    def __init__(
        self,
        strategy: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        learner: dict[str, Any] | None = None,
        loader: str = "own generator",
        callbacks: Callable[[], list[Callback]] = list,
        module: type[Learner] = Learner,
    ) -> None:
        self.strategy, self.trainer = strategy or {}, trainer or {}
        self.learner, self.loader, self.callbacks, self.module = learner or {}, loader, callbacks, module


def training_loader(kind: str) -> Any:
    """A shuffled loader that brings each rank other rows."""
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": collate}
    data = torch.utils.data.Subset(Ragged(), range(dist.get_rank() // _ranks_alike(), NUM_SAMPLES, 2))
    if kind == "own generator":
        generator = torch.Generator().manual_seed(11 + dist.get_rank() // _ranks_alike())
        return DataLoader(data, shuffle=True, generator=generator, drop_last=True, **options)
    if kind == "global generator":
        return DataLoader(data, shuffle=True, drop_last=True, **options)
    if kind == "distributed":
        return DataLoader(Ragged(), shuffle=True, **options)
    if kind == "workers":
        return DataLoader(Quiet(), shuffle=True, num_workers=2, **options)
    if kind == "persistent workers":
        return DataLoader(Quiet(), shuffle=True, num_workers=1, persistent_workers=True, **options)
    raise ValueError(kind)


class Quiet(Ragged):
    """Rows that are the same each time."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        state = random.getstate()
        random.seed(index)
        row = super().__getitem__(index)
        random.setstate(state)
        return row


def _ranks_alike() -> int:
    return 1


def make_trainer(setting: Setting, callbacks: list[Callback]) -> Trainer:
    return Trainer(
        **{
            "strategy": AutomodelStrategy(**setting.strategy),
            "accelerator": "cpu",
            "devices": dist.get_world_size(),
            "plugins": [LightningEnvironment()],
            "max_epochs": 3,
            "logger": Recorder(),
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": setting.loader not in ("own generator", "global generator"),
            "num_sanity_val_steps": 1,
            "callbacks": [*setting.callbacks(), *callbacks],
            **setting.trainer,
        }
    )


def disturb(seed: int) -> None:
    """Set all global random states to something of this rank and `seed`."""
    seed = 1000 * seed + dist.get_rank()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run(setting: Setting, *callbacks: Callback, seed: int = 1, ckpt_path: Path | None = None) -> tuple[Trainer, Any]:
    """Fit; return the Trainer and what is to be the same."""
    disturb(seed)
    trainer = make_trainer(setting, list(callbacks))
    learner = setting.module(**setting.learner)
    if trainer.precision in ("32-true", "bf16-mixed", "bf16-true"):
        learner.float()
    validation = DataLoader(Quiet(), batch_size=8, collate_fn=collate)
    trainer.fit(learner, training_loader(setting.loader), validation, ckpt_path=ckpt_path)
    return trainer, outcome(trainer)


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Weights, buffers, optimizer and scheduler state, counters, and the next random numbers of this rank."""
    module = trainer.lightning_module
    tensors = {name: _whole(value) for name, value in (*module.named_parameters(), *module.named_buffers())}
    for name, state in ((n, trainer.optimizers[0].state.get(p, {})) for n, p in module.named_parameters()):
        tensors |= {f"{name}/{key}": _whole(value) for key, value in state.items()}
    return {
        "tensors": tensors,
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "random": [torch.rand(2).tolist(), random.random(), np.random.rand()],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def _whole(value: Any) -> Tensor:
    value = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
    return value.detach().clone()


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names of what is not the same bit for bit."""
    named = {f"{key}": (value, found[key]) for key, value in expected.items() if key != "tensors"}
    differing = [f"{key}: {a} {b}" for key, (a, b) in named.items() if repr(a) != repr(b)]
    tensors = expected["tensors"], found["tensors"]
    if tensors[0].keys() != tensors[1].keys():
        differing.append("names of tensors")
    return differing + [name for name, value in tensors[0].items() if not torch.equal(value, tensors[1].get(name))]


def compare(setting: Setting, folder: Path, *stops: tuple[str, int]) -> list[str]:
    """Runs on every rank: what differs between a fit and ones that were resumed from where a hook had saved them.

    Args:
        setting: Of all the fits.
        folder: For checkpoints.
        stops: Hooks, and which of their calls saves.
    """
    trainer, undisturbed = run(setting)
    lines = trainer.logger.lines
    found = []
    for hook, when in stops:
        path = folder / f"{hook}-{when}.ckpt"
        saver = Saver(hook, when, path)
        saving, saved = run(setting, saver)
        if saver.logged < 0:
            found.append(f"{hook} was called {saver.calls} times")
            continue
        disturbed = differences(undisturbed, saved) + differing_lines(lines, saving.logger.lines)
        resumed, outcome_ = run(setting, seed=2, ckpt_path=path)
        differing = differences(undisturbed, outcome_)
        differing += differing_lines(lines[len(lines) - len(resumed.logger.lines) :], resumed.logger.lines)
        if len(resumed.logger.lines) < len(lines) - saver.logged:
            differing.append(f"{len(resumed.logger.lines)} of {len(lines) - saver.logged} lines were logged")
        found += [f"saving in {hook} {when} disturbs {name}" for name in disturbed]
        found += [f"resumed from {hook} {when}: {name}" for name in differing]
    return found


def differing_lines(expected: list[Line], found: list[Line]) -> list[str]:
    """The first line that differs."""
    pairs = enumerate(zip(expected, found, strict=False))
    different = next((f"line {index}: {a} {b}" for index, (a, b) in pairs if a != b), None)
    if different is None and len(expected) != len(found):
        different = f"{len(found)} lines, not {len(expected)}"
    return [] if different is None else [different]
