"""A process that names what differs on classes and modules of others, at import, in fits and after them.

It is forked from a server that had its first look before it imported the package, and forks two ranks, which train.
"""

from __future__ import annotations

import json
import multiprocessing
import operator
import os
import socket
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.checkpoint
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, WeightAveraging
from torch import nn

NUM_RANKS = 2
LIBRARIES = ("torch", "lightning", "transformers")
ABSENT = object()
Snapshot = dict[str, tuple[Any, dict[str, Any]]]
"""What modules and classes have as their own, by name."""


def _is_of_a_library(name: object) -> bool:
    return str(name).partition(".")[0] in LIBRARIES


def _owners() -> Iterator[tuple[str, Any]]:
    """Every module of the libraries that is loaded, and every class that one of them defines, by its name."""
    for name, module in sorted(sys.modules.items()):
        if not _is_of_a_library(name) or not isinstance(module, types.ModuleType):
            continue
        yield name, module
        for value in list(vars(module).values()):
            # Not isinstance: it reads __class__ of proxies, some of which then warn that they are deprecated.
            if issubclass(type(value), type) and _is_of_a_library(value.__module__):
                yield f"{value.__module__}.{value.__qualname__}", value


def snapshot() -> Snapshot:
    """What each of them has as its own at this moment."""
    return {name: (owner, dict(vars(owner))) for name, owner in _owners()}


def _is_code(value: Any) -> bool:
    """Whether it decides what a call or an access does; counters and caches of the libraries do not."""
    return callable(value) or hasattr(type(value), "__get__")


def differing(before: Snapshot) -> list[str]:
    """Names of attributes that are other objects than before, that are gone, or that are new."""
    names = []
    for owner_name, (owner, own) in before.items():
        now = dict(vars(owner))
        if own.keys() == now.keys() and all(map(operator.is_, own.values(), now.values())):
            continue  # as nearly all, which this finds several times faster; another order is looked at below
        for name in {*own, *now}:
            was = own.get(name, ABSENT)
            value = now.get(name, ABSENT)
            if was is not value and (_is_code(was) or _is_code(value)):
                names.append(f"{owner_name}.{name}")
    return sorted(names)


class Finetuning(BaseFinetuning):
    """Unfreezes nothing."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, *args: Any) -> None:
        pass


def _functions(target: Any) -> dict[str, Any]:
    """What an object itself has of functions; `differing` looks at classes and modules."""
    own = vars(target).items()
    return {
        name: value for name, value in own if callable(value) and not isinstance(value, nn.Module | type)
    }


def _name(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__).removeprefix("FSDP")


class Patches:
    """What was patched on objects, and which functions objects had before."""

    def __init__(self, targets: list[Any]) -> None:
        self._before = [(target, _functions(target)) for target in targets]
        self._filters = list(warnings.filters)
        self._first: dict[tuple[int, str], tuple[Any, Any]] = {}  # what was there, by object and name

    def noted(self, set_: Callable[..., None]) -> Callable[..., None]:
        """`PatchStack.set`, which tells."""

        def noting(stack: Any, target: Any, name: str, *args: Any, **kwargs: Any) -> None:
            self._first.setdefault((id(target), name), (target, vars(target).get(name, ABSENT)))
            set_(stack, target, name, *args, **kwargs)

        return noting

    def left(self) -> dict[str, Any]:
        """What differs now: names by class, of what was patched and of all functions, and filters of warnings."""
        # Lightning gives callbacks the module's `log` in each run: another method object.
        patched = [
            (_name(target), name)
            for (_, name), (target, was) in self._first.items()
            if vars(target).get(name, ABSENT) != was
        ]
        others = set()
        for target, before in self._before:
            now = _functions(target)
            differs = {
                name for name in {*before, *now} if before.get(name, ABSENT) is not now.get(name, ABSENT)
            }
            others |= {(_name(target), name) for name in differs}
        filters = [str(entry) for entry in warnings.filters if entry not in self._filters]
        return {
            "num_patched": len(self._first),
            "patched": patched,
            "others": sorted(others),
            "filters": filters,
        }


ACCUMULATES = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "limit_train_batches": 2}
FITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "automatic": ({}, ACCUMULATES),
    "manual": ({}, {"limit_train_batches": 1}),
    "ddp": ({"data_parallel": "ddp", "uneven_inputs": "pad"}, ACCUMULATES),
}
"""Options of the strategy and the Trainer's settings."""


def _looks_while_fitting(before: Snapshot, folder: str, kind: str) -> dict[str, Any]:
    """What differs at each moment of a fit of this rank, and after it and a validation."""
    from lightning_automodel import AutomodelStrategy, ExactnessCheck
    from lightning_automodel.internals.patching import PatchStack
    from tests.trainer.exactness import Block
    from tests.trainer.runs import LabelledModule, loader, make_trainer

    seen: dict[str, set[str]] = {}
    is_automatic = kind != "manual"

    def look(moment: str) -> None:
        seen.setdefault(moment, set()).update(differing(before))

    class Watched(LabelledModule):
        automatic_optimization = is_automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            look("training_step")
            loss = self(batch)
            self.log("loss", loss, sync_dist=True)
            if is_automatic:
                return loss
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            look("on_before_optimizer_step")

        def on_train_batch_end(self, *_: Any) -> None:
            look("on_train_batch_end")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            look("validation_step")
            super().validation_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            self.made = torch.optim.AdamW(self.parameters())
            self.made.register_step_post_hook(lambda *_: look("optimizer_step"))
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.made)
            return {"optimizer": self.made, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    options, settings = FITS[kind]
    check = ExactnessCheck(steps=1)  # replays the steps that look
    trainer = make_trainer(
        AutomodelStrategy(activation_checkpointing={Block}, **options),
        callbacks=[Finetuning(), WeightAveraging(), ModelCheckpoint(folder, save_last=True), check],
        enable_checkpointing=True,
        limit_val_batches=1,
        **settings,
    )
    module = Watched()
    epoch_loop = trainer.fit_loop.epoch_loop
    targets = [*module.modules(), *trainer.callbacks, trainer, trainer.profiler, trainer.strategy]
    targets += [trainer.fit_loop, epoch_loop, epoch_loop.val_loop, trainer.validate_loop]
    patches = Patches([*targets, trainer.precision_plugin, trainer._signal_connector])
    with mock.patch.object(PatchStack, "set", patches.noted(PatchStack.set)):
        trainer.fit(module, loader(), loader())
        trainer.validate(module, loader(), verbose=False)
    look("after the fit")
    assert check.verdict == "exact", check.verdict
    hooks = [len(module.made._optimizer_step_pre_hooks), len(module.made._optimizer_step_post_hooks)]
    looks = {moment: sorted(names) for moment, names in seen.items()}
    return {"looks": looks, "hooks": hooks, **patches.left()}


def _rank(rank: int, port: int, before: Snapshot, folder: str, queue: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.update(WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS))
    torch.distributed.init_process_group("gloo")
    looks: dict[str, Any] = {}
    try:
        for kind in FITS:
            looks[kind] = _looks_while_fitting(before, f"{folder}/{kind}", kind)
    finally:
        queue.put(looks)
    torch.distributed.destroy_process_group()


def main(folder: Path) -> None:
    """Write what differs, as JSON: at import, and by rank, kind of optimization and moment of a fit."""
    from tests.internals.before import AT_IMPORT, BEFORE

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, port, BEFORE, str(folder), queue))
        for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    looks = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    (folder / "found.json").write_text(json.dumps({"at_import": AT_IMPORT, "ranks": looks}))
    sys.exit(any(process.exitcode for process in processes))
