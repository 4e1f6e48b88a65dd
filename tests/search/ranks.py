"""A case on ranks: what a user of Lightning would write, trained by the strategy."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.data.plain import Stream
from tests.free_memory import pretended
from tests.resume.resuming import Recorder
from tests.search.block import first_block, spread
from tests.search.callbacks import Stops, make_callbacks
from tests.search.cases import Case
from tests.search.data import aux_loss, count, cross_entropy, data, packed, unpacked
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
)
from tests.search.reference import CLIP_NORM, CLIP_VALUE, Outcome, critic_loss, norm
from tests.search.user_code import (
    changed,
    edit_rows,
    foreign_gradients,
    run_snippet,
    token_loss,
    write,
)
from tests.trainer.exactness import full, full_weights
from tests.trainer.runs import make_trainer


class Searched(LightningModule):
    """Trains a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.net = Net(case)
        self.critic = Critic(case.seed) if case.manual in ("gan", "gan_window") else None
        self.automatic_optimization = case.manual is None
        self.norms: list[float] = []
        self.foreign: list[float] = []
        self.num_batches = 0
        if case.thaw:
            part_to_thaw(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        case = self.case
        if "early" in case.callbacks:
            self.log("constant", 1.0, on_step=False, on_epoch=True)
        if batch_idx in case.skip:
            return None
        ids, labels = unpacked(case, batch)
        self._look("before_forward", ids, labels)
        write(case, "step", self.net)
        if case.manual is not None:
            self._manual(ids, labels, batch_idx)
            return None
        loss, hidden = token_loss(case, self.net, ids, labels, case.loss_reduction)
        write(case, "after_forward", self.net)
        self._look("after_forward", ids, labels)
        if case.penalty is not None:
            weight = first_block(self.net).linear.weight
            scale = count(case, labels) if case.loss_reduction == "sum" else 1.0
            loss = loss + scale * weight_penalty(full(weight))
        aux = aux_loss(hidden) if case.aux else None
        returned = {} if aux is None or case.tell == "equal" else {"aux_loss": aux}
        loss = loss if aux is None else loss + aux
        if case.over_ranks:
            loss = self.all_gather(loss, sync_grads=True).mean()
        if case.tell.startswith("returned"):
            returned["num_label_tokens"] = self._count(labels)
        return {"loss": loss, **returned} if returned else loss

    def _count(self, labels: Tensor) -> Any:
        counted = count(self.case, labels)
        if self.case.negative and self.global_rank == 1:
            counted = -counted
        return counted if self.case.tell == "returned_tensor" else counted.item()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, labels = unpacked(self.case, batch)
        cross_entropy(self.case, self.net(ids)[0], labels, "mean")
        if not self.trainer.sanity_checking:
            self._look("validation", ids, labels)

    def _look(self, where: str, *batch: Tensor) -> None:
        """Compute a gradient beside training; in hooks, of the first batch."""
        batch = batch or data(self.case)[self.global_rank][0]
        self.foreign += foreign_gradients(self.case, where, self.net, *batch)

    def setup(self, stage: str) -> None:
        changed(self.case, "setup", self.net)

    def configure_model(self) -> None:
        changed(self.case, "configure_model", self.net)
        if self.case.experts:
            spread(self.net, self.device_mesh)

    def on_train_start(self) -> None:
        if new := changed(self.case, "train_start", self.net):
            found = self.optimizers()
            (found[0] if isinstance(found, list) else found).add_param_group({"params": new})

    def configure_optimizers(self) -> Any:
        changed(self.case, "configure_optimizers", self.net)
        made = make_optimizers(self.case, self.net, self.critic)
        if self.case.schedule is None:
            return made
        return made, [{"scheduler": make_schedule(made[0]), "interval": self.case.schedule}]

    # --- Hooks --------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        case = self.case
        epoch = self.current_epoch
        if case.thaw:
            part_to_thaw(self.net).requires_grad_(trains(case, epoch, batch_idx))
        accumulate = case.accumulates(epoch)
        if "zero_in_mid_window" in case.hooks and accumulate > 1 and (batch_idx + 1) % accumulate == 0:
            self.optimizers().zero_grad(set_to_none="zero_set_to_zero" not in case.hooks)

    def on_train_batch_end(self, *_: Any) -> None:
        if "swap_in_mid_window" in self.case.hooks:
            backup = [parameter.detach().clone() for parameter in self.parameters()]
            for parameter in self.parameters():
                parameter.data.mul_(1.5)
            self.eval()
            with torch.no_grad():
                self.net(data(self.case)[0][0][0])
            self.train()
            with torch.no_grad():
                for parameter, weight in zip(self.parameters(), backup, strict=True):
                    parameter.copy_(weight)
        write(self.case, "batch_end", self.net)
        self._look("batch_end")

    def on_after_backward(self) -> None:
        self._look("after_backward")
        edit_after_backward(self.case.hooks, self)
        if "norm_after_backward" in self.case.hooks and any(p.grad is not None for p in self.parameters()):
            self.norms.append(norm(self))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._look("before_step")
        edit_before_step(self.case.hooks, self)
        edit_rows(self.case, self.net)
        self.norms += run_snippet(self.case, self.net, optimizer)
        if "norm_before_step" in self.case.hooks:
            self.norms.append(norm(self))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if "own_clipping" in self.case.hooks:
            self.clip_gradients(optimizer, gradient_clip_val=CLIP_NORM, gradient_clip_algorithm="norm")
        elif "clip_by_own_rule" in self.case.hooks:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)
        else:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if "warm_up" in self.case.hooks:
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])
                group["lr"] = group["base_lr"] * min(1.0, (self.trainer.global_step + 1) / 3)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none="zero_set_to_zero" not in self.case.hooks)

    # --- Manual optimization ------------------------------------------------------------------------------------------

    def _manual(self, ids: Tensor, labels: Tensor, index: int) -> None:
        case, kind = self.case, self.case.manual
        accumulate = case.accumulates(0)
        self.num_batches += 1
        found = self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        first = optimizers[0]
        closes = (index + 1) % accumulate == 0 or self.trainer.is_last_batch
        nth = self.num_batches % accumulate == 0
        if kind in ("each", "two_losses", "two_optimizers", "chunks"):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if kind == "chunks":
                for chunk in (slice(0, 1), slice(1, None)):
                    self.manual_backward(self._loss(ids[chunk], labels[chunk]))
            else:
                self._backward(self._loss(ids, labels), labels)
            if kind == "two_losses":
                self._backward(0.3 * self._loss(ids.flip(0), labels), labels, told=True)
            for optimizer in optimizers:
                self._step(optimizer)
        elif kind == "closure":

            def closure() -> Tensor:
                first.zero_grad()
                loss = self._loss(ids, labels)
                self._backward(loss, labels)
                if case.manual_clip is not None:
                    self._clip(first)
                return loss

            first.step(closure=closure)
        elif kind in ("window", "unclosed"):
            last = closes if kind == "window" else nth
            with first.toggle_model(sync_grad=last):
                self._backward(self._loss(ids, labels), labels)
            if last:
                self._step(first)
                first.zero_grad()
        elif kind == "add":
            self._backward(self._loss(ids, labels) / accumulate, labels)
            if nth:
                self._step(first)
                first.zero_grad()
        else:
            last = closes if kind == "gan_window" else True
            for player in (1, 0):
                with optimizers[player].toggle_model(sync_grad=last):
                    logits, hidden = self.net(ids)
                    if player == 1:
                        loss = critic_loss(
                            case, self.critic, hidden.detach(), labels, 1.0, case.loss_reduction
                        )
                    else:
                        loss = cross_entropy(case, logits, labels, case.loss_reduction)
                        loss = loss + 0.1 * critic_loss(
                            case, self.critic, hidden, labels, -1.0, case.loss_reduction
                        )
                    self._backward(loss, labels)
                if last:
                    self._step(optimizers[player])
                    optimizers[player].zero_grad()

    def _loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        return token_loss(self.case, self.net, ids, labels, self.case.loss_reduction)[0]

    def _backward(self, loss: Tensor, labels: Tensor, told: bool = False) -> None:
        if self.case.over_ranks:
            loss = self.all_gather(loss, sync_grads=True).mean()
        write(self.case, "after_forward", self.net)
        given = self.case.tell.startswith("returned") or (told and self.case.tell != "equal")
        self.manual_backward(loss, **({"num_label_tokens": self._count(labels)} if given else {}))

    def _clip(self, optimizer: Any) -> None:
        kind = self.case.manual_clip
        if kind == "strategy":
            self.norms.append(float(self.trainer.strategy.clip_gradients(optimizer, CLIP_NORM)))
        elif kind == "self":
            self.clip_gradients(optimizer, gradient_clip_val=CLIP_NORM, gradient_clip_algorithm="norm")
        elif kind == "torch":
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.norms.append(float(full(nn.utils.clip_grad_norm_(parameters, CLIP_NORM))))

    def _step(self, optimizer: Any) -> None:
        self._clip(optimizer)
        optimizer.step()


def make_strategy(case: Case) -> AutomodelStrategy:
    """The strategy that the case asks for."""
    options: dict[str, Any] = dict(case.strategy)
    if "ddp_kwargs" in options:
        options["ddp_kwargs"] = dict(options["ddp_kwargs"])
    if case.experts:
        options["expert_parallel_size"] = case.experts
    if case.engine == "hsdp":
        options["data_parallel_replicate_size"] = 2
    if case.tell == "key":
        options["label_key"] = "targets"
    if case.tell in ("labels", "key"):
        options["label_shift"] = case.label_shift
    if case.tell.startswith("callable"):
        as_tensor = case.tell == "callable_tensor"

        def counted(batch: Any) -> Any:
            found = count(case, unpacked(case, batch)[1])
            return found if as_tensor else found.item()

        options["count_label_tokens"] = counted
    if case.tell == "samples":
        options["count"] = "samples"
    if case.tell == "equal":
        options["per_token_loss"] = False
    elif case.loss_reduction == "sum":
        options["loss_reduction"] = "sum"
    return AutomodelStrategy(data_parallel="ddp" if case.engine == "ddp" else "fsdp2", **options)


def train(case: Case, folder: str) -> Outcome:
    """Runs on every rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = None
        for number, stop in enumerate((*case.stops, None)):
            with _memory_for(case.fits, number):
                module, trainer = _fit(case, Path(folder), number, stop, path)
            path = Path(folder) / f"stop{number}.ckpt"
    report = trainer.strategy.last_step
    last = None
    if report is not None and case.manual is None:
        last = (float(report.num_label_tokens), int(report.num_micro_batches), float(report.loss))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    told = [str(each.message) for each in caught]
    return Outcome(full_weights(module), buffers, module.norms, last, module.foreign, told)


def _memory_for(fits: tuple[str, ...], number: int) -> AbstractContextManager[None]:
    """What a fit may keep unsharded."""
    if not fits:
        return nullcontext()
    names = {
        "nothing": [],
        "gradients": ["deferred_gradients"],
        "all": ["deferred_gradients", "unsharded_parameters"],
    }
    chosen = names[fits[number % len(fits)]]
    state = ["sharded_state"] if chosen else []
    # A little more: the figures of ranks with small shards and those with large ones are compared.
    return pretended(lambda needed: 1.15 * sum(needed[name] for name in (*chosen, *state)))


def _fit(
    case: Case, folder: Path, number: int, stop: int | None, path: Path | None
) -> tuple[Searched, Trainer]:
    module = Searched(case)
    callbacks = make_callbacks(case, folder / str(number))
    if stop is not None:
        callbacks.append(Stops(stop, folder / f"stop{number}.ckpt"))
    validates = "validate" in case.callbacks
    scheduled = len(case.accumulation) > 1
    trainer = make_trainer(
        make_strategy(case),
        **{
            "accelerator": "cpu",
            "precision": "64-true",
            "max_epochs": case.epochs,
            "accumulate_grad_batches": 1 if scheduled or case.manual is not None else case.accumulation[0],
            "gradient_clip_val": {None: None, "norm": CLIP_NORM, "value": CLIP_VALUE}[case.clip],
            "gradient_clip_algorithm": case.clip,
            "enable_checkpointing": "checkpoint" in case.callbacks or stop is not None,
            "callbacks": callbacks,
            "default_root_dir": folder,
            "val_check_interval": 1 if validates else None,
            "limit_val_batches": 1 if validates else 0,
            "logger": Recorder() if "monitor" in case.callbacks else False,
            **dict(case.trainer),
        },
    )
    batches = [packed(case, *each) for each in data(case)[dist.get_rank()]]
    loader = DataLoader(Stream(batches) if case.stream else batches, batch_size=None)
    trainer.fit(module, loader, DataLoader(batches, batch_size=None), ckpt_path=path)
    return module, trainer


def in_folder() -> tempfile.TemporaryDirectory[str]:
    """Where a case may write."""
    return tempfile.TemporaryDirectory(prefix="search_")
