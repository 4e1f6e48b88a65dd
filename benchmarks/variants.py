"""The ways to train the workload that are compared: plain PyTorch loops, and Lightning with several strategies."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override
from workload import Batch, Decoder, DecoderModule, Workload, mean_loss, whole_weights

from lightning_automodel import AutomodelStrategy

OnStep = Callable[[], None]
Train = Callable[[Workload, OnStep], Tensor]
Sync = Callable[[bool], AbstractContextManager[None]]


@dataclass(frozen=True)
class Variant:
    """One way to train the workload.

    Attributes:
        key: Short name, for the command line.
        title: Name in reports.
        train: Builds the model, trains it, calling back at the end of each optimizer step, and returns the
            weights.
        is_exact: Whether its gradients are those of one big batch, so that its weights must equal those of
            the loop.
    """

    key: str
    title: str
    train: Train
    is_exact: bool = True


def shard(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard the units that AutomodelStrategy finds by itself: each block, and the rest with the root."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train_fsdp2_loop(workload: Workload, on_step: OnStep) -> Tensor:
    """FSDP2 by hand: gradients reduced once a window, parameters gathered once a window."""
    model = workload.build_model()
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False)

    def sync(is_last: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        return nullcontext()

    return _train_loop(model, model, sync, workload, on_step)


def train_ddp_loop(workload: Workload, on_step: OnStep) -> Tensor:
    """DDP by hand, with ``no_sync``."""
    model = workload.build_model()
    ddp = DistributedDataParallel(model)
    return _train_loop(
        model, ddp, lambda is_last: nullcontext() if is_last else ddp.no_sync(), workload, on_step
    )


def _train_loop(
    model: nn.Module, parallel: nn.Module, sync: Sync, workload: Workload, on_step: OnStep
) -> Tensor:
    """Train with the mean over all label tokens of the window and the ranks: sum, then scale by ranks / tokens."""
    optimizer = workload.build_optimizer(model)
    batches = iter(workload.build_loader(dist.get_rank()))
    for _ in range(workload.steps):
        tokens = torch.zeros(1, dtype=torch.float64)
        for index in range(workload.accumulate):
            with sync(index == workload.accumulate - 1):
                loss, count = mean_loss(parallel, next(batches))
                (loss * count).backward()
            tokens += count
        dist.all_reduce(tokens)
        gradients = [
            p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
        ]
        torch._foreach_mul_(gradients, dist.get_world_size() / tokens[0])
        optimizer.step()
        optimizer.zero_grad()
        on_step()
    return whole_weights(list(model.parameters()))


class HandShardedModule(DecoderModule):
    """Shards in ``configure_model``, as ModelParallelStrategy leaves it to its users."""

    @override
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        if not isinstance(self.model, FSDPModule):
            shard(self.model, self.device_mesh["data_parallel"])


class CallAfterStep(pl.Callback):
    """Calls ``on_step`` at the end of the last micro-batch of each window."""

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._on_step()


class Stream:
    """The batches of a loader, without a length."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def train_with_lightning(
    make_strategy: Callable[[], Strategy],
    module_class: type[DecoderModule],
    is_stream: bool,
    workload: Workload,
    on_step: OnStep,
) -> Tensor:
    """Train in ``Trainer.fit``, in the process group that exists."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # tells Lightning that the ranks have been started
    module = module_class(workload)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=make_strategy(),
        max_epochs=1,
        accumulate_grad_batches=workload.accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CallAfterStep(on_step)],
    )
    loader = workload.build_loader(dist.get_rank())
    trainer.fit(module, Stream(loader) if is_stream else loader)
    return whole_weights(list(module.model.parameters()))


def make_model_parallel_strategy() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


def _lightning(
    make_strategy: Callable[[], Strategy],
    module_class: type[DecoderModule] = DecoderModule,
    is_stream: bool = False,
) -> Train:
    return partial(train_with_lightning, make_strategy, module_class, is_stream)


VARIANTS = (
    Variant("loop", "plain FSDP2 loop, deferred and kept gathered", train_fsdp2_loop),
    Variant("automodel", "`AutomodelStrategy()`", _lightning(AutomodelStrategy)),
    Variant(
        "automodel-reshard",
        "`AutomodelStrategy(reshard_during_accumulation=True)`",
        _lightning(partial(AutomodelStrategy, reshard_during_accumulation=True)),
    ),
    *(
        Variant(
            f"automodel-{'' if reshard else 'kept-'}prefetch-{ahead}",
            f"`AutomodelStrategy(reshard_during_accumulation={reshard}, prefetch={ahead})`",
            _lightning(partial(AutomodelStrategy, reshard_during_accumulation=reshard, prefetch=ahead)),
        )
        for reshard, ahead in ((True, 0), (True, 1), (True, 2), (False, 0), (False, 1))
    ),
    Variant(
        "automodel-ahead",
        "`AutomodelStrategy(count_window_ahead=True)`",
        _lightning(partial(AutomodelStrategy, count_window_ahead=True)),
    ),
    Variant(
        "automodel-pad",
        '`AutomodelStrategy(uneven_inputs="pad")`, streams',
        _lightning(partial(AutomodelStrategy, uneven_inputs="pad"), is_stream=True),
    ),
    Variant(
        "model-parallel",
        "Lightning `ModelParallelStrategy`",
        _lightning(make_model_parallel_strategy, HandShardedModule),
        is_exact=False,
    ),
    Variant("ddp-loop", "plain DDP loop, `no_sync`", train_ddp_loop),
    Variant(
        "automodel-ddp",
        '`AutomodelStrategy(data_parallel="ddp")`',
        _lightning(partial(AutomodelStrategy, data_parallel="ddp")),
    ),
    Variant("ddp", "Lightning `DDPStrategy`", _lightning(DDPStrategy), is_exact=False),
)

RATIOS = (
    ("automodel", "loop", "at most 1.05"),
    ("model-parallel", "automodel", "at least 2.5"),
    ("model-parallel", "automodel-reshard", ""),
    ("automodel-prefetch-1", "automodel-prefetch-0", ""),
    ("automodel-prefetch-2", "automodel-prefetch-0", ""),
    ("automodel-kept-prefetch-1", "automodel-kept-prefetch-0", ""),
    ("automodel-ahead", "automodel", "at most 1.02"),
    ("automodel-pad", "automodel", "at most 1.02"),
    ("automodel-ddp", "ddp-loop", ""),
    ("automodel-ddp", "ddp", ""),
    ("automodel", "ddp", ""),
)
