"""Random combinations of options beside expert parallelism, on the ranks of a pool and in one process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.expert_parallel.mixtures import (
    ACCUMULATE,
    CASE,
    Fit,
    MixtureDecoder,
    SpreadModule,
    data_of_rank,
)
from tests.trainer.exactness import Batch, full_weights, micro_batches
from tests.trainer.plain import sgd, windows
from tests.trainer.runs import make_trainer, mean_loss

CLIP = 0.3
BALANCE = 0.3


@dataclass(frozen=True)
class Combination:
    """Options of the strategy, and what user code does.

    Attributes:
        number: It was drawn with this seed.
        options: Keywords of the strategy.
        is_manual: Under manual optimization, windows accumulate in a toggle.
        has_balance: An auxiliary loss, which is not a token loss.
        clips: Gradients are clipped by their norm.
        optimizer: Makes it.
    """

    number: int
    options: dict[str, Any] = field(default_factory=dict)
    is_manual: bool = False
    has_balance: bool = False
    clips: bool = False
    optimizer: str = "sgd"

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.options.items()]
        words += ["manual"] * self.is_manual + ["balance"] * self.has_balance + ["clipped"] * self.clips
        return " ".join([f"{self.number}:", *words, self.optimizer])


def draw(number: int) -> Combination:
    """Draw for four ranks."""
    rng = random.Random(number)
    size = rng.choice([2, 4])
    replicas = rng.choice([1, 2]) if size == 2 else 1
    is_manual = rng.random() < 0.3
    is_ahead = not is_manual and rng.random() < 0.5
    options: dict[str, Any] = {
        "expert_parallel_size": size,
        "data_parallel_replicate_size": replicas,
        "defer_fsdp_grad_sync": rng.choice([True, False, "all_reduce"] if replicas > 1 else [True, False]),
        "reshard_during_accumulation": rng.choice([True, False]),
        "activation_checkpointing": rng.choice([False, True, "selective"]),
        "prefetch": rng.choice([0, 1, 2]),
        "cpu_offload": rng.random() < 0.25,
        "count_window_ahead": is_ahead,
    }
    return Combination(
        number,
        options,
        is_manual,
        has_balance=is_ahead and rng.random() < 0.7,
        clips=rng.random() < 0.5,
        optimizer=rng.choice(["sgd", "adamw"]),
    )


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Adam with a large epsilon: it would enlarge the rounding noise of gradients that are zero."""
    return sgd(model) if name == "sgd" else torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2)


def balance_of(model: MixtureDecoder) -> Tensor:
    """[] the auxiliary loss of the last forward."""
    return BALANCE * sum(block.balance for block in model.blocks)


class CombinedModule(SpreadModule):
    """Trains as a combination says."""

    def __init__(self, combination: Combination) -> None:
        super().__init__(MixtureDecoder())
        self.combination = combination
        self.automatic_optimization = not combination.is_manual

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self(batch)
        if self.combination.is_manual:
            self._step(loss, is_last=(batch_idx + 1) % ACCUMULATE == 0 or batch_idx == CASE.num_batches - 1)
            return None
        if not self.combination.has_balance:
            return loss
        balance = balance_of(self.model)
        return {"loss": loss + balance, "aux_loss": balance}

    def _step(self, loss: Tensor, is_last: bool) -> None:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(loss)
        if is_last:
            if self.combination.clips:
                self.trainer.strategy.clip_gradients(optimizer, CLIP)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self, self.combination.optimizer)


def fit_combination(combination: Combination) -> Fit:
    """Runs on every rank."""
    module = CombinedModule(combination)
    strategy = AutomodelStrategy(**combination.options)
    trained_by = {} if combination.is_manual else {"accumulate_grad_batches": ACCUMULATE}
    if combination.clips and not combination.is_manual:
        trained_by["gradient_clip_val"] = CLIP
    make_trainer(strategy, **trained_by).fit(
        module, data_of_rank(CASE, dist.get_world_size() // CASE.num_ranks)
    )
    return Fit(full_weights(module.model), None, strategy.describe())


def expected_weights(combination: Combination) -> dict[str, Tensor]:
    """Weights of one process that has all data of all ranks in each window."""
    model = MixtureDecoder()
    optimizer = make_optimizer(model, combination.optimizer)
    for window in windows(CASE, ACCUMULATE):
        optimizer.zero_grad()
        batches = [by_rank[index] for by_rank in micro_batches(CASE) for index in window]
        losses: list[Tensor] = []
        balances: list[Tensor] = []
        for batch in batches:
            losses.append(mean_loss(model, batch, "sum"))
            balances.append(balance_of(model))
        num_label_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        loss = torch.stack(losses).sum() / max(num_label_tokens, 1)
        if combination.has_balance:
            loss = loss + torch.stack(balances).mean()
        loss.backward()
        if combination.clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return full_weights(model)
