"""One project on this rank, under each strategy: `python -m tests.projects.harness PROJECT DIRECTORY`.

Each way trains two epochs, saves, resumes for two more, and loads what it saved. Data is as much as one
batch over all ranks, so that its order does not matter; of a project with a count each rank has two
micro-batches of unequal size. SGD stands in for each project's optimizer, since Adam hides wrong constants.
`ExactnessCheck` is told the same count. What came of it is written by rank 0, as JSON.
"""

from __future__ import annotations

# First, since darts imports that package.
import lightning_automodel.alias_pytorch_lightning  # noqa: F401  # isort: skip

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_automodel import AutomodelStrategy, ExactnessCheck
from tests.projects import projects
from tests.trainer.exactness import SILENT, full_weights

OURS: dict[str, dict[str, Any]] = {"replicated": {"data_parallel": "ddp"}, "sharded": {}}
WAYS = ("one process", "Lightning's ddp", *OURS)
COUNTING = ("per_token_loss", "count", "count_label_tokens")
"""Options of the check that tell what a loss is the mean of."""


class Recorder(Callback):
    """Trains with SGD, and keeps weights at both ends of a fit."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}
        self.num_validations = 0
        self.learning_rate = 0.02

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        type(pl_module).configure_optimizers = lambda module: self._sgd(module)
        self.before = {name: weight.detach().clone() for name, weight in pl_module.named_parameters()}

    def _sgd(self, module: LightningModule) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), self.learning_rate, momentum=0.9)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.num_validations += 1
        self.after = full_weights(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after = full_weights(pl_module)


@dataclass
class Run:
    """What a project is given for one fit, or, if it ``loads``, to load and validate alone.

    If it ``is_ragged``, each rank has its data in two micro-batches of unequal size.
    """

    way: str
    directory: Path
    max_epochs: int
    ckpt_path: str | None = None
    loads: bool = False
    is_ragged: bool = False
    is_checked: bool = False
    recorder: Recorder = field(default_factory=Recorder)
    check: ExactnessCheck | None = None

    @property
    def num_ranks(self) -> int:
        return 1 if self.way == "one process" else dist.get_world_size()

    @property
    def batch_size(self) -> int:
        num_samples = projects.NUM_SAMPLES // self.num_ranks
        return num_samples * 3 // 4 if self._accumulates else num_samples

    @property
    def _accumulates(self) -> bool:
        return self.is_ragged and self.num_ranks > 1

    def strategy(self, **options: Any) -> Any:
        """What a user passes as Trainer(strategy=...)."""
        if self.is_checked:
            told = {
                name: value for name, value in options.items() if name in COUNTING and self.way not in OURS
            }
            self.check = ExactnessCheck(**told)
        if self.way in OURS:
            return AutomodelStrategy(**OURS[self.way], **options)
        return "auto" if self.way == "one process" else "ddp"

    def callbacks(self, saving: type[ModelCheckpoint]) -> list[Callback]:
        """The Trainer's; some projects know checkpoints of their own class alone."""
        saves = saving(self.directory, filename="epoch{epoch}", save_last=True, save_top_k=-1)
        return [self.recorder, saves, *([] if self.check is None else [self.check])]

    def options(self, strategy: Any, **others: Any) -> dict[str, Any]:
        """Keywords of a Trainer."""
        return {
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": self.num_ranks,
            "max_epochs": self.max_epochs,
            "accumulate_grad_batches": 2 if self._accumulates else 1,
            "default_root_dir": self.directory,
            "callbacks": self.callbacks(ModelCheckpoint),
            **SILENT,
            "enable_checkpointing": True,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            **others,
        }

    def fit(self, module: LightningModule, *loaders: Any, strategy: Any, datamodule: Any = None) -> None:
        """Fit, or load and validate; for projects that leave the Trainer to their users."""
        trainer = Trainer(**self.options(strategy))
        # Hyper-parameters of most projects are more than plain data.
        if self.loads:
            trainer.validate(
                module, *loaders[1:], datamodule=datamodule, ckpt_path=self.ckpt_path, weights_only=False
            )
        else:
            trainer.fit(
                module, *loaders, datamodule=datamodule, ckpt_path=self.ckpt_path, weights_only=False
            )


Project = Callable[[Run], None]


def distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Euclidean, over all weights."""
    return float(
        torch.stack([(weights[name] - other).double().norm() for name, other in others.items()]).norm()
    )


def train(project: Project, way: str, directory: Path, result: dict[str, Any]) -> Recorder:
    """The last fit's recorder. In ``result``: what a project does (fit, validate, resume, load) and the verdict."""
    shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()

    def run(max_epochs: int, **options: Any) -> Recorder:
        seed_everything(0, verbose=False)
        each = Run(way, directory, max_epochs, is_ragged=project.__name__ in projects.RAGGED, **options)
        try:
            project(each)
        finally:
            if each.check is not None:
                result["verdict"] = each.check.verdict
                result["report"] = each.check.report
        return each.recorder

    last = str(directory / "last.ckpt")
    done = result["does"] = ["trains", "validates", "saves"]
    if way == WAYS[0]:
        # A project that gathers by itself must not find the other rank, which does the same.
        with mock.patch.object(dist, "is_initialized", return_value=False):
            return run(4, is_checked=True)
    if project.__name__ in projects.WITHOUT_RESUMING:
        fitted = run(4, is_checked=True)
    else:
        run(2, is_checked=True)
        fitted = run(4, ckpt_path=last)
        done.append("resumes")
    assert fitted.num_validations > 0, "never validated"
    loaded = run(4, ckpt_path=last, loads=True)
    assert distance(loaded.after, fitted.after) == 0, "loading gives other weights"
    done.append("loads")
    return fitted


def main(name: str, directory: Path) -> None:
    rank = int(os.environ["RANK"])
    meeting = {"init_method": f"file://{directory}/ranks", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(minutes=2), **meeting)
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    recorders: dict[str, Recorder] = {}
    project = getattr(projects, name)
    for way in WAYS:
        result = results[way] = {}
        try:
            # Only rank 0 needs one process' weights, but all ranks go on together.
            own = directory / (f"{way}{rank}" if way == WAYS[0] else way)
            recorders[way] = train(project, way, own, result)
            wanted = recorders[WAYS[1] if name in projects.AS_DDP and way in OURS else WAYS[0]]
            moved = distance(wanted.after, recorders[WAYS[0]].before)
            assert moved > 0, "nothing was trained"
            result["error"] = distance(recorders[way].after, wanted.after) / moved
        except BaseException:
            result["failure"] = traceback.format_exc()
            traceback.print_exc()
    if rank == 0:
        (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
