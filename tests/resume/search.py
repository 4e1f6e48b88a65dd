"""`python -m tests.resume.search --seconds 300 --seed 7`: fits saved and resumed at random points, again and again.

Each case draws a kind of loader, a schedule, callbacks, a data module that counts, the length of windows,
the engine, experts that are spread over the ranks, whether windows are counted ahead, and the form of
checkpoints. It prints what differs from the fit that was never stopped.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_automodel import spread_experts
from tests import searching
from tests.expert_parallel.mixtures import NUM_EXPERTS, Mixture
from tests.rank_pool import RankError, RankPool
from tests.resume import resuming
from tests.trainer.plain import fill

LOADERS = (
    "own generator",
    "global generator",
    "random sampler",
    "stateful sampler",
    "min_size",
    "distributed",
    "stateful stream",
)
ENGINES: tuple[dict[str, Any], ...] = (
    {"data_parallel": "ddp"},
    {"data_parallel": "ddp", "save_distributed_checkpoint": True},
    {"data_parallel": "fsdp2"},
    {"data_parallel": "fsdp2", "save_distributed_checkpoint": False},
    {"data_parallel": "fsdp2", "expert_parallel_size": 2},
    {"data_parallel": "fsdp2", "expert_parallel_size": 2, "save_distributed_checkpoint": False},
)
SCHEDULES = ("step", "epoch", "plateau", "by hand")
HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "counts": resuming.Counts,
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "windows": lambda: GradientAccumulationScheduler({0: 2, 1: 3}),
}


class Searched(resuming.Learner):
    """May step its schedule with every batch, and have a layer of experts that are spread over the ranks.

    If it is calm, repeated batches have the same gradients. If it switches, it trains less of itself from
    the second epoch on.
    """

    def __init__(self, schedule: str, has_experts: bool, is_calm: bool, switches: bool) -> None:
        super().__init__(schedule=schedule)
        self.switches = switches
        if is_calm:
            self.dropout = nn.Identity()
            self.statistics = nn.Identity()
        self.has_experts = has_experts
        if has_experts:
            experts = Mixture(NUM_EXPERTS, self.embedding.embedding_dim)
            fill(experts)
            self.blocks.append(experts)

    def configure_model(self) -> None:
        if self.has_experts:
            spread_experts(self.blocks[-1].experts, self.device_mesh["expert_parallel"])

    def configure_optimizers(self) -> Any:
        if self.schedule != "by hand":
            return super().configure_optimizers()
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=99)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch", "frequency": 1000}]

    def on_train_epoch_start(self) -> None:
        if self.switches and self.current_epoch == 1:
            self.statistics.eval()
            self.embedding.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.schedule == "by hand":
            self.lr_schedulers().step()


class CountingData(LightningDataModule):
    """Counts its training batches, and keeps the count."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.count = 0

    def train_dataloader(self) -> Any:
        return resuming.training_loader(self.kind, dist.get_rank(), dist.get_world_size())

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(resuming.Still(), range(11)), batch_size=4, collate_fn=resuming.collate)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += bool(self.trainer.training)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def draw(seed: int, number: int) -> dict[str, Any]:
    rng = random.Random(f"{seed}-{number}")
    return {
        "loader": rng.choice(LOADERS),
        "engine": rng.choice(ENGINES),
        "schedule": rng.choice(SCHEDULES),
        "callbacks": tuple(sorted(rng.sample(sorted(CALLBACKS), rng.randrange(len(CALLBACKS) + 1)))),
        "accumulate": rng.randint(1, 3),
        "calm": rng.random() < 0.5,
        "validate_every": rng.choice([1.0, 1, 2, 3]),
        # Apart, so that a number has the same other draws without it.
        "switches": random.Random(f"{seed}-{number} switches").random() < 0.3,
        "ahead": random.Random(f"{seed}-{number} ahead").random() < 0.3,
        "stops": tuple((rng.choice(HOOKS), rng.randint(1, 5)) for _ in range(rng.randint(1, 2))),
    }


def fit(
    case: dict[str, Any], seed: int, savers: list[Callback], ckpt_path: Path | None = None
) -> dict[str, Any]:
    """Runs on every rank: what must be the same of a fit."""
    options = {
        "precision": "64-true",
        "limit_train_batches": 2 if case["loader"] == "min_size" else 4,
        "val_check_interval": min(case["validate_every"], 2)
        if case["loader"] == "min_size"
        else case["validate_every"],
        "accumulate_grad_batches": 1 if "windows" in case["callbacks"] else case["accumulate"],
    }
    resuming.disturb(1000 * seed + dist.get_rank())
    is_counted_ahead = case["ahead"] and case["loader"] != "min_size"  # of several loaders it is refused
    strategy = {**case["engine"], "count_window_ahead": is_counted_ahead}
    setting = resuming.Setting(strategy, options, loader=case["loader"])
    trainer: Trainer = resuming.make_trainer(
        setting, [*(CALLBACKS[name]() for name in case["callbacks"]), *savers]
    )
    data = CountingData(f"{resuming.QUIET if case['calm'] else ''}{case['loader']}")
    has_experts = "expert_parallel_size" in case["engine"]
    switches = case["switches"] and case["engine"]["data_parallel"] == "fsdp2"  # DDP waits for all gradients
    module = Searched(case["schedule"], has_experts, case["calm"], switches)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return {**resuming.outcome(trainer), "count": data.count}


def compared(case: dict[str, Any], folder: Path) -> list[str]:
    """Runs on every rank: what differs where a fit goes on that was stopped again and again.

    Where batches were repeated, weights of a calm fit are the same; of another one as many steps.
    """
    expected = fit(case, 1, [])
    path = None
    has_repeated = False
    for index, (hook, when) in enumerate(case["stops"]):
        saver = resuming.Saver(hook, when, folder / f"{index}.ckpt")
        fit(case, 1 if path is None else index + 3, [saver], path)
        if saver.logged < 0:
            break
        path = saver.path
        has_repeated |= saver.repeats
        if saver.is_over:  # a fit without a step left does nothing
            return []
    if path is None:
        return []
    found = fit(case, 2, [], path)
    if not has_repeated:
        return resuming.differences(expected, found)
    if can_repeat(case):
        return resuming.differences_of_weights(expected, found)
    return resuming.differences_of_weights(
        {**expected, "tensors": {}, "lr": 0}, {**found, "tensors": {}, "lr": 0}
    )


def can_repeat(case: dict[str, Any]) -> bool:
    """Whether weights do not depend on random numbers, or on counts of batches."""
    ordered = case["loader"] in ("own generator", "stateful sampler", "distributed")
    return case["calm"] and ordered and case["schedule"] in ("step", "epoch")


def judge(pool: RankPool, case: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = pool.run(compared, case, Path(folder), timeout_s=120)
        except (RankError, TimeoutError) as error:
            return str(error)[-1500:]
    return "" if not any(found) else f"{[differing[:4] for differing in found]}"


if __name__ == "__main__":
    searching.main(draw, judge)
