"""SIGKILL at a random moment: every checkpoint in sight afterwards is whole, and one of those that were saved."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_automodel.checkpoint.shard_directory import ShardDirectory
from lightning_automodel.checkpoint.single_file import load_file
from tests.checkpoint.checkpoints import ACCUMULATE, NUM_BATCHES, AdamModule, batches, fit, leftovers
from tests.processes import forked
from tests.trainer.runs import mean_loss

FORMS: dict[str, dict[str, Any]] = {
    "shards": {},
    "shards_in_background": {"async_checkpoint": True},
    "replicated": {"data_parallel": "ddp"},
    "replicated_in_background": {"data_parallel": "ddp", "async_checkpoint": True},
}
NUM_STEPS = 400


def _train(rank: int, options: dict[str, Any], save_last: Any, folder: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    callback = ModelCheckpoint(dirpath=f"{folder}/saved", every_n_train_steps=1, save_last=save_last)
    fit(
        {**options, "timeout": 0.1},
        callbacks=[callback],
        enable_checkpointing=True,
        max_epochs=-1,
        max_steps=NUM_STEPS,
    )


def run_and_kill(seed: int, options: dict[str, Any], folder: Path) -> None:
    """Train on two ranks until a checkpoint is complete; a random time later kill one or both, and wait for the end."""
    generator = random.Random(seed)
    save_last = generator.choice([True, "link"])
    victims = generator.choice([(0,), (1,), (0, 1)])
    delay_s = generator.uniform(0, 1.5)
    (folder / "saved").mkdir()
    ranks = [
        forked().Process(target=_train, args=(rank, options, save_last, str(folder)), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120
    while not whole_names(folder / "saved"):
        assert time.monotonic() < deadline, "no checkpoint came"
        assert all(process.is_alive() for process in ranks), "a rank ended by itself"
        time.sleep(0.005)
    time.sleep(delay_s)
    for victim in victims:
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


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Tensor]]:
    return expected_weights(NUM_STEPS)


def check(folder: Path, expected: list[dict[str, Tensor]]) -> int:
    """The newest step that was saved. Every checkpoint in sight must load and have the weights of its step."""
    steps = []
    for path in whole_names(folder):
        step, weights = weights_in(path)
        steps.append(step)
        worst = max(float((weights[name] - value).abs().max()) for name, value in expected[step].items())
        assert worst <= 1e-10, (path, step, worst)
    assert steps, "nothing to resume from"
    return max(steps)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("form", "kills"),
    [("shards_in_background", 1), *(pytest.param(form, 30, marks=pytest.mark.sweep) for form in FORMS)],
)
def test_kills(tmp_path: Path, expected: list[dict[str, Tensor]], form: str, kills: int) -> None:
    """At random moments, of random victims: some of thirty come within a save."""
    steps = set()
    within_a_save = 0
    for seed in range(kills):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_and_kill(seed, FORMS[form], folder)
        steps.add(check(folder / "saved", expected))
        within_a_save += len(leftovers(folder / "saved")) > 0
    assert max(steps) < NUM_STEPS, "the run had ended"
    if kills > 1:
        assert len(steps) > 5, "all were killed at the same few steps"
        assert within_a_save > 0, "no kill came within a save"
