"""A fresh process that names what differs on classes and modules of others, at import, in fits and after them.

It imports nothing of the package before its first look. Then it forks two ranks, which train.
"""

from __future__ import annotations

import json
import multiprocessing
import operator
import os
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any

import lightning.pytorch  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.checkpoint

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


def _looks_while_fitting(before: Snapshot, folder: str, is_automatic: bool) -> dict[str, list[str]]:
    """What differs at each moment of a sharded fit of this rank, and after it."""
    from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, WeightAveraging

    from lightning_automodel import AutomodelStrategy, ExactnessCheck
    from tests.trainer.exactness import Block
    from tests.trainer.runs import LabelledModule, loader, make_trainer

    seen: dict[str, set[str]] = {}

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
            optimizer = torch.optim.AdamW(self.parameters())
            optimizer.register_step_post_hook(lambda *_: look("optimizer_step"))
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    class Finetuning(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            pass

        def finetune_function(self, *args: Any) -> None:
            pass

    check = ExactnessCheck(steps=1)  # replays the steps that look
    trainer = make_trainer(
        AutomodelStrategy(activation_checkpointing={Block}),
        accumulate_grad_batches=2 if is_automatic else 1,
        callbacks=[Finetuning(), WeightAveraging(), ModelCheckpoint(folder), check],
        enable_checkpointing=True,
        limit_train_batches=2 if is_automatic else 1,
        limit_val_batches=1,
    )
    trainer.fit(Watched(), loader(), loader())
    look("after the fit")
    assert check.verdict == "exact", check.verdict
    return {moment: sorted(names) for moment, names in seen.items()}


def _rank(rank: int, port: int, before: Snapshot, folder: str, queue: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.update(WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS))
    torch.distributed.init_process_group("gloo")
    looks: dict[str, Any] = {}
    try:
        looks["automatic"] = _looks_while_fitting(before, folder, is_automatic=True)
        looks["manual"] = _looks_while_fitting(before, folder, is_automatic=False)
    finally:
        queue.put(looks)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Print what differs, as JSON: at import, and by rank, kind of optimization and moment of a fit."""
    import transformers.modeling_utils  # noqa: F401

    before = snapshot()
    import lightning_automodel  # noqa: F401

    at_import = differing(before)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, port, before, sys.argv[1], queue))
        for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    looks = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    print(json.dumps({"at_import": at_import, "ranks": looks}))
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
