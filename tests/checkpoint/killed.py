"""Ranks that save after every step, killed at any moment, and what they leave on disk."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_automodel.checkpoint.shard_directory import ShardDirectory
from lightning_automodel.checkpoint.single_file import load_file
from tests.checkpoint.checkpoints import ACCUMULATE, NUM_BATCHES, AdamModule, fit, leftovers
from tests.processes import forked

NUM_STEPS = 400


@dataclass(frozen=True)
class Kill:
    """One run and its end.

    Attributes:
        options: Of the strategy.
        save_last: Of ``ModelCheckpoint``.
        victims: Ranks to kill, of two.
        delay_s: How long after the first complete checkpoint.
    """

    options: dict[str, Any]
    save_last: Any
    victims: tuple[int, ...]
    delay_s: float

    @classmethod
    def draw(cls, seed: int, options: dict[str, Any]) -> Kill:
        """A random one."""
        generator = random.Random(seed)
        return cls(
            options,
            save_last=generator.choice([True, "link"]),
            victims=generator.choice([(0,), (1,), (0, 1)]),
            delay_s=generator.uniform(0, 1.5),
        )


def _train(rank: int, kill: Kill, folder: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    callback = ModelCheckpoint(dirpath=f"{folder}/saved", every_n_train_steps=1, save_last=kill.save_last)
    fit(
        {**kill.options, "timeout": 0.1},
        callbacks=[callback],
        enable_checkpointing=True,
        max_epochs=-1,
        max_steps=NUM_STEPS,
    )


def run_and_kill(kill: Kill, folder: Path) -> None:
    """Train on two ranks until a checkpoint is complete and the time has come; then kill, and wait for the end."""
    (folder / "saved").mkdir()
    ranks = [
        forked().Process(target=_train, args=(rank, kill, str(folder)), daemon=True) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120
    while not whole_names(folder / "saved"):
        assert time.monotonic() < deadline, "no checkpoint came"
        assert all(process.is_alive() for process in ranks), "a rank ended by itself"
        time.sleep(0.005)
    time.sleep(kill.delay_s)
    for victim in kill.victims:
        ranks[victim].kill()
    for process in ranks:
        process.join(60)
        assert not process.is_alive(), "the other rank hangs"


def whole_names(folder: Path) -> list[Path]:
    """What a user, or ``ckpt_path="last"``, would take for checkpoints."""
    return sorted(path for path in folder.glob("*.ckpt") if path.exists())


def weights_in(path: Path) -> tuple[int, dict[str, Tensor]]:
    """Global step and weights of a checkpoint, after all of its files were checked. In this process alone."""
    if path.is_dir():
        shards = ShardDirectory(str(path), weights_only=None)
        checkpoint = shards.read_all(shards.tree)
        return checkpoint["global_step"], checkpoint["state_dict"]
    checkpoint = load_file(str(path), None)
    return checkpoint["global_step"], checkpoint["state_dict"]


def expected_weights(num_steps: int) -> list[dict[str, Tensor]]:
    """Weights after each step of an undisturbed run of plain PyTorch on the same batches, from 0 steps on."""
    from tests.checkpoint.checkpoints import batches
    from tests.trainer.runs import mean_loss

    module = AdamModule()
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"]
    schedule = configured["lr_scheduler"]["scheduler"]
    data = list(batches())
    weights = [{name: value.clone() for name, value in module.state_dict().items()}]
    for step in range(num_steps):
        first = step * ACCUMULATE % NUM_BATCHES
        window = data[first : first + ACCUMULATE]
        num_label_tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
        optimizer.zero_grad()
        loss = torch.stack([mean_loss(module.model, batch, "sum") for batch in window]).sum()
        (loss / max(num_label_tokens, 1)).backward()
        optimizer.step()
        schedule.step()
        weights.append({name: value.clone() for name, value in module.state_dict().items()})
    return weights


def leftover_count(folder: Path) -> int:
    """How much of an unfinished save is in ``folder``."""
    return len(leftovers(folder))
