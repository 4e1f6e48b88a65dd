"""One plain process that trains a case: torch alone, no Lightning, nothing of the package, no ranks.

It follows what Lightning documents: windows of `accumulate_grad_batches` batches of an epoch, the last one
short; the objective of a window is the sum of its token losses over all ranks, divided by its label tokens.
Each rank has buffers of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.search import user_code
from tests.search.block import first_block
from tests.search.cases import Case
from tests.search.data import aux_loss, count, critic_loss, cross_entropy, data
from tests.search.net import (
    Critic,
    Net,
    edit_after_backward,
    edit_before_step,
    make_optimizers,
    make_schedule,
    part_to_thaw,
    trains,
    weight_penalty,
    with_gradients,
)
from tests.trainer.exactness import full

CLIP_NORM = 0.05
CLIP_VALUE = 0.01
EMA_DECAY = 0.8
SWA_LR = 0.03


@dataclass
class Outcome:
    """What a run has left behind.

    Attributes:
        weights: Full weights by name.
        buffers: By name, of each rank in the reference, of its own on a rank.
        norms: Gradient norms that hooks have seen.
        last: Label tokens, micro-batches and loss of the last window under automatic optimization.
        foreign: Norms of gradients computed beside training, of each rank in the reference, its own on a
            rank.
        warnings: Messages, on a rank.
    """

    weights: dict[str, Tensor]
    buffers: Any
    norms: list[float]
    last: tuple[float, int, float] | None
    foreign: Any = ()
    warnings: list[str] = field(default_factory=list)


class Players(nn.Module):
    """What the LightningModule holds, under the same names."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = Net(case)
        self.critic = Critic(case.seed) if case.manual in ("gan", "gan_window") else None
        if case.thaw:
            part_to_thaw(self.net).requires_grad_(False)


class Reference:
    """A run of one process.

    Args:
        case: What to train.
        disturbance: By which part initial weights are off.
    """

    def __init__(self, case: Case, disturbance: float = 0.0) -> None:
        self.case = case
        self.module = Players(case)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(1 + disturbance)
        net = self.module.net
        self.finetunes = "finetuning" in case.callbacks
        self.aside: dict[nn.Parameter, Tensor] = {}
        if self.finetunes:
            net.embedding.requires_grad_(False)
        self.is_mean = case.tell == "equal" or case.over_ranks  # each micro-batch weighs the same
        for where in ("setup", "configure_model", "configure_optimizers"):
            user_code.changed(case, where, net)
        self.optimizers = make_optimizers(case, net, self.module.critic)
        if new := user_code.changed(case, "train_start", net):
            self.optimizers[0].add_param_group({"params": new})
        self.schedule = make_schedule(self.optimizers[0]) if case.schedule else None
        self.base_lrs = [group["lr"] for group in self.optimizers[0].param_groups]
        self.buffers = [self._own_buffers() for _ in range(case.num_ranks)]
        self.norms: list[float] = []
        self.foreign: list[list[float]] = [[] for _ in range(case.num_ranks)]
        self.num_steps = self.num_batches = 0
        self.last: tuple[float, int, float] | None = None
        ema = "ema" in case.callbacks
        self.averaged: AveragedModel | None = None
        if ema:
            average = get_ema_multi_avg_fn(EMA_DECAY)
            self.averaged = AveragedModel(self.module, multi_avg_fn=average, use_buffers=True)
        self.given = {**dict(case.strategy), **dict(case.trainer)}

    def run(self) -> Outcome:
        """Train."""
        case = self.case
        epochs = min(case.epochs, 2) if "early" in case.callbacks else case.epochs
        swa = None
        for epoch in range(epochs):
            if self.finetunes and epoch == 1:
                self._unfreeze()
            if case.thaw == "epoch":
                part_to_thaw(self.module.net).requires_grad_(trains(case, epoch, 0))
            if "swa" in case.callbacks and epoch >= 1:
                if swa is None:
                    optimizer = self.optimizers[0]
                    optimizer.param_groups[0]["initial_lr"] = SWA_LR
                    swa = SWALR(optimizer, swa_lr=SWA_LR, anneal_epochs=2, last_epoch=case.epochs)
                    self.averaged = AveragedModel(self.module)
                self.averaged.update_parameters(self.module)
            for index in range(self._length()):
                if self._is_done():
                    break
                steps_before = self.num_steps
                self._batch(epoch, index)
                if "validate" in case.callbacks and case.manual is None and self.num_steps > steps_before:
                    self.module.zero_grad()  # as Lightning before it validates, to None whatever the user does
                if "ema" in case.callbacks and self.num_steps > steps_before:
                    self.averaged.update_parameters(self.module)
                user_code.write(case, "batch_end", self.module.net)
                self._look("batch_end")
                if "validate" in case.callbacks:
                    self.module.eval()
                    self._look("validation")
                    self.module.train()
            else:
                if self.schedule is not None and case.schedule == "epoch":
                    self.schedule.step()
                if swa is not None:
                    swa.step()
        averaged = None if self.averaged is None else self.averaged.module
        if "ema" in case.callbacks and not self.num_steps:
            averaged = None
        named = (self.module if averaged is None else averaged).named_parameters()
        weights = {name: p.detach().clone() for name, p in named}
        return Outcome(weights, self.buffers, self.norms, self.last, self.foreign)

    def _is_done(self) -> bool:
        return self.num_steps >= self.given.get("max_steps", float("inf"))

    def _length(self) -> int:
        longest = max(self.case.num_batches_of(rank) for rank in range(self.case.num_ranks))
        return min(longest, self.given.get("limit_train_batches", longest))

    def _unfreeze(self) -> None:
        optimizer = self.optimizers[0]
        embedding = self.module.net.embedding
        embedding.requires_grad_(True)
        optimizer.add_param_group(
            {"params": list(embedding.parameters()), "lr": optimizer.param_groups[0]["lr"] / 10}
        )

    # --- One batch of all ranks ---------------------------------------------------------------------------------------

    def _of_ranks(self, index: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        for rank, batches in enumerate(data(self.case)):
            if index < len(batches):
                yield rank, *batches[index]

    def _look(self, where: str, index: int | None = None) -> None:
        """Compute gradients beside training, in a step (of the batch of this index) or in a hook."""
        if index is None:
            batches = [(rank, *batches[0]) for rank, batches in enumerate(data(self.case))]
        else:
            batches = list(self._of_ranks(index))
        for rank, ids, labels in batches:
            with self._buffers_of(rank):
                self.foreign[rank] += user_code.foreign_gradients(
                    self.case, where, self.module.net, ids, labels
                )

    def _batch(self, epoch: int, index: int) -> None:
        case = self.case
        if case.thaw:
            part_to_thaw(self.module.net).requires_grad_(trains(case, epoch, index))
        self.num_batches += 1
        if index not in case.skip:
            self._look("before_forward", index)
            user_code.write(case, "step", self.module.net)
        if case.manual is not None:
            self._manual(index)
            return
        accumulate = case.accumulates(epoch)
        start = index - index % accumulate
        is_last = (index + 1) % accumulate == 0 or index + 1 == self._length()
        window = range(start, min(start + accumulate, self._length()))
        if index == start:
            self._zero(self.optimizers[0])
        if "zero_in_mid_window" in case.hooks and len(window) == accumulate > 1:
            if index == window[-1]:
                self._zero(self.optimizers[0])
            window = window[-1:]
        window = [each for each in window if each not in case.skip]
        if index not in case.skip:
            self._backward(window, index)
        if is_last:
            if index not in case.skip:
                self._after_backward()
            optimizer = self.optimizers[0]
            if "warm_up" in case.hooks:
                for group, lr in zip(optimizer.param_groups, self.base_lrs, strict=False):
                    group["lr"] = lr * min(1.0, (self.num_steps + 1) / 3)
            self._step(optimizer)
            if self.schedule is not None and case.schedule == "step":
                self.schedule.step()

    def _zero(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none="zero_set_to_zero" not in self.case.hooks)

    def _backward(self, window: list[int], index: int) -> None:
        """One backward of the objective's part that this batch of all ranks is."""
        case = self.case
        net = self.module.net
        micro_batches = [labels for each in window for _, _, labels in self._of_ranks(each)]
        total = sum(float(count(case, labels)) for labels in micro_batches)
        denominator = len(micro_batches) if self.is_mean else (total or 1.0)
        objective = torch.zeros((), dtype=torch.float64)
        for rank, ids, labels in self._of_ranks(index):
            with self._buffers_of(rank):
                summed, hidden = user_code.token_loss(
                    case, net, ids, labels, "mean" if self.is_mean else "sum"
                )
            net.writes = False
            weight = 1.0 if self.is_mean else float(count(case, labels))
            if case.penalty is not None:
                summed = summed + weight * weight_penalty(first_block(net).linear.weight)
            if case.aux:
                summed = summed + aux_loss(hidden) * (denominator / len(micro_batches))
            objective = objective + summed / denominator
        net.writes = True
        user_code.write(case, "after_forward", net)
        self._look("after_forward", index)
        if objective.requires_grad:
            objective.backward()
        self._look("after_backward")
        loss = sum_of = objective.item()
        if self.last is not None and window[0] != index:
            sum_of = self.last[2] + loss
        self.last = (total, len(micro_batches), sum_of)

    def _buffers_of(self, rank: int) -> Any:
        return _Swapped(self.module, self.buffers, rank)

    def _own_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def _after_backward(self) -> None:
        edit_after_backward(self.case.hooks, self.module)
        if "norm_after_backward" in self.case.hooks:
            self.norms.append(norm(self.module))

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        case = self.case
        self._look("before_step")
        edit_before_step(case.hooks, self.module)
        user_code.edit_rows(case, self.module.net)
        self.norms += user_code.run_snippet(case, self.module.net, optimizer)
        if "norm_before_step" in case.hooks:
            self.norms.append(norm(self.module))
        if case.manual is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if case.clip == "norm" or {"own_clipping", "clip_by_own_rule"} & set(case.hooks):
                nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            elif case.clip == "value":
                nn.utils.clip_grad_value_(parameters, CLIP_VALUE)
        optimizer.step()
        self.num_steps += 1

    # --- Manual optimization ------------------------------------------------------------------------------------------

    def _manual(self, index: int) -> None:
        case = self.case
        kind = self.case.manual
        accumulate = case.accumulates(0)
        first = self.optimizers[0]
        if kind in ("each", "closure", "chunks", "two_losses", "two_optimizers"):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self._manual_backward([index], index)
            if kind == "two_losses":
                self._manual_backward([index], index, 0.3, flipped=True)
            for optimizer in self.optimizers:
                self._manual_step(optimizer)
        elif kind == "window":
            window = self._window(index, accumulate)
            self._manual_backward(window, index, ends=index == window[-1])
            if index == window[-1]:
                self._manual_step(first)
                first.zero_grad()
        elif kind == "unclosed":
            number = self.num_batches - 1  # windows go on in the next epoch
            start = number - number % accumulate
            window = [each % self._length() for each in range(start, start + accumulate)]
            self._manual_backward(window, index, ends=self.num_batches % accumulate == 0)
            if self.num_batches % accumulate == 0:
                self._manual_step(first)
                first.zero_grad()
        elif kind == "add":
            self._manual_backward([index], index, 1 / accumulate)
            if self.num_batches % accumulate == 0:
                self._manual_step(first)
                first.zero_grad()
        else:
            window = self._window(index, accumulate) if kind == "gan_window" else [index]
            for player in (1, 0):
                self._manual_backward(window, index, ends=index == window[-1], player=player)
                if index == window[-1]:
                    self._manual_step(self.optimizers[player])
                    self.optimizers[player].zero_grad()

    def _window(self, index: int, accumulate: int) -> list[int]:
        start = index - index % accumulate
        return list(range(start, min(start + accumulate, self._length())))

    def _manual_backward(
        self,
        window: list[int],
        index: int,
        scale: float = 1.0,
        flipped: bool = False,
        ends: bool = True,
        player: int | None = None,
    ) -> None:
        case, net, critic = self.case, self.module.net, self.module.critic
        micro_batches = [labels for each in window for _, _, labels in self._of_ranks(each)]
        reduction = "mean" if self.is_mean else "sum"
        total = sum(float(count(case, labels)) for labels in micro_batches) or 1.0
        denominator = len(micro_batches) if self.is_mean else total
        objective = torch.zeros((), dtype=torch.float64)
        for rank, ids, labels in self._of_ranks(index):
            with self._buffers_of(rank):
                if player is None:
                    part = user_code.token_loss(
                        case, net, ids.flip(0) if flipped else ids, labels, reduction
                    )[0]
                else:
                    logits, hidden = net(ids)
                    if player == 1:
                        part = critic_loss(case, critic, hidden.detach(), labels, 1.0, reduction)
                    else:
                        part = cross_entropy(case, logits, labels, reduction)
                        part = part + 0.1 * critic_loss(case, critic, hidden, labels, -1.0, reduction)
            net.writes = False
            objective = objective + scale * part / denominator
        net.writes = True
        user_code.write(case, "after_forward", net)
        own = [
            p
            for p in self.module.parameters()
            if p.requires_grad and (player is None or p in self._parameters_of(self.optimizers[player]))
        ]
        for parameter in own:
            # Until its window ends, nobody sees a gradient.
            if parameter in self.aside:
                parameter.grad = self.aside.pop(parameter)
        objective.backward(inputs=own)
        self._look("after_backward")
        if ends:
            self._after_backward()
        else:
            self.aside |= {parameter: parameter.grad for parameter in own if parameter.grad is not None}
            for parameter in own:
                parameter.grad = None

    @staticmethod
    def _parameters_of(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
        return {parameter for group in optimizer.param_groups for parameter in group["params"]}

    def _manual_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.case.manual_clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clipped = nn.utils.clip_grad_norm_(parameters, CLIP_NORM).item()
            if self.case.manual_clip != "self":  # which returns nothing
                self.norms.append(clipped)
        self._step(optimizer)


class _Swapped:
    """Puts a rank's buffers into the module for one forward."""

    def __init__(self, module: nn.Module, buffers: list[dict[str, Tensor]], rank: int) -> None:
        self.module = module
        self.buffers = buffers
        self.rank = rank

    def __enter__(self) -> None:
        for name, buffer in self.module.named_buffers():
            buffer.data = self.buffers[self.rank][name].clone()

    def __exit__(self, *_: Any) -> None:
        self.buffers[self.rank] = {name: buffer.clone() for name, buffer in self.module.named_buffers()}


def norm(module: nn.Module) -> float:
    """The norm of all gradients; of shards, a collective."""
    return sum(float(full(p.grad).square().sum()) for _, p in with_gradients(module)) ** 0.5
