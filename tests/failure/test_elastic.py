"""`torchrun --max-restarts=1`, a rank fails at a random moment: the job ends with the weights of a calm one.

torchrun runs this file as a program: it saves each step and goes on from the newest; at first, one rank fails.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.checkpoint.checkpoints import ACCUMULATE, AdamModule, batches
from tests.checkpoint.test_saving import expected_weights
from tests.failure.faults import make_trainer
from tests.processes import run_anew
from tests.trainer.exactness import full_weights
from tests.trainer.runs import CASE

NUM_STEPS = 8


class FailsOnce(Callback):
    """SIGKILL of a random rank in a random micro-batch of the first attempt alone, or an exception there."""

    def __init__(self, seed: int, fault: str) -> None:
        generator = random.Random(seed)
        self.victim = generator.randrange(2)
        self.batch = generator.randrange(ACCUMULATE + 1, ACCUMULATE * NUM_STEPS - 1)
        self.fault = fault

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if not is_first_attempt or trainer.global_rank != self.victim or batch != self.batch:
            return
        if self.fault == "exception":
            raise ValueError("no labels here")
        os.kill(os.getpid(), signal.Signals[self.fault])


def train(folder: Path, seed: int, fault: str) -> None:
    """Train to the end, from wherever the newest checkpoint is, with other weights in memory."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    saves = ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_last="link")
    settings = {"enable_checkpointing": True, "accumulate_grad_batches": ACCUMULATE, "max_steps": NUM_STEPS}
    trainer = make_trainer(2, 30.0, callbacks=[FailsOnce(seed, fault), saves], **settings)
    module = AdamModule(CASE.seed + 2 * attempt)
    trainer.fit(module, batches(), ckpt_path="last")
    end = {
        "weights": full_weights(module.model),
        "from": str(trainer.ckpt_path),
        "attempt": attempt,
        "world_size": dist.get_world_size(),
    }
    torch.save(end, folder / f"end{trainer.global_rank}.pt")


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "fault"), [(1, "exception"), *((seed, "SIGKILL") for seed in range(1, 4))])
def test_random_moments(tmp_path: Path, seed: int, fault: str) -> None:
    """Other victims, other batches. The second attempt knows nothing of the first but its newest checkpoint.

    Without torchrun, test_faults.py asks for the cause in each default run.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    script = ["-m", "tests.failure.test_elastic", str(tmp_path), str(seed), fault]
    status, printed = run_anew([*launch, *meet, *script], tmp_path, timeout_s=280)
    assert status == 0, printed
    if fault == "exception":
        assert "failed in on_before_backward: ValueError: no labels here" in printed
    expected = expected_weights(NUM_STEPS)[-1]
    for rank in range(2):
        end = torch.load(tmp_path / f"end{rank}.pt", weights_only=True)
        assert end["attempt"] == 1, "nobody failed"
        assert end["from"].endswith("last.ckpt"), "the second attempt began anew"
        assert end["world_size"] == 2
        for name, value in end["weights"].items():
            assert float((value - expected[f"model.{name}"]).abs().max()) <= 1e-10


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
