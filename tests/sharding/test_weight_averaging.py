"""Averages of weights by Lightning's callbacks: exact against torch's averages in the plain loop, on shards and copies.

Validation in mid-window swaps the average in and out: training must not notice, gathered parameters not
outlive it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    VOCABULARY,
    Outcome,
    assert_exact,
    full_weights,
    micro_batches,
    relative_error,
    weight_error,
)
from tests.trainer.plain import ModelModule, filled_decoder, sgd, windows
from tests.trainer.runs import (
    CASE,
    STRATEGIES,
    TOLERANCE,
    by_default,
    first_by_default,
    loader,
    make_trainer,
    mean_loss,
)

ACCUMULATE = 3
EPOCHS = 3
VALIDATE_EVERY = 2
DECAY = 0.7
SWA_LR = 0.05
WRONG = 1e-6
OPTIONS = {
    "kept": STRATEGIES["kept"],
    "resharded": STRATEGIES["resharded"],
    "hsdp": {"data_parallel_replicate_size": 2},
    "units-gathered": {"reshard_during_accumulation": True, "reshard_after_forward": False},
    "ddp": STRATEGIES["ddp"],
}
ENGINES = {"fsdp2": STRATEGIES["kept"], "ddp": STRATEGIES["ddp"]}


class Tempered(nn.Module):
    """A decoder with a scalar parameter, which is never sharded, and a buffer that follows the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = filled_decoder()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("newest", torch.zeros(2, dtype=torch.float64))
        self.step = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.training:
            self.newest.fill_(self.step)
        return self.decoder(input_ids) / self.temperature


class Evaluates(ModelModule):
    """Keeps the summed token loss of the first batch of each validation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.losses.append(float(mean_loss(self.model, batch, "sum")))


class AveragesEpochs(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


AVERAGES: dict[str, tuple[Callable[[], WeightAveraging], dict[str, Any]]] = {
    "ema": (lambda: EMAWeightAveraging(decay=DECAY), {"avg_fn": get_ema_avg_fn(DECAY)}),
    "fused-ema": (
        lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
        {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
    ),
    "mean-of-epochs": (AveragesEpochs, {}),
}


def state(model: nn.Module) -> dict[str, Tensor]:
    """Full weights and buffers; a collective where they are sharded."""
    return full_weights(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def window_gradient(model: nn.Module, window: list[int]) -> None:
    """The gradient of the token mean over a window of all ranks."""
    batches = [by_rank[index] for by_rank in micro_batches(CASE) for index in window]
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    model.train()
    model.step = window[-1]
    (torch.stack([mean_loss(model, batch, "sum") for batch in batches]).sum() / max(tokens, 1)).backward()


def first_losses(model: nn.Module) -> list[float]:
    """By rank: what a validation finds in its first batch."""
    model.eval()
    with torch.no_grad():
        return [float(mean_loss(model, batches[0], "sum")) for batches in micro_batches(CASE)]


def averaged_plainly(name: str, epochs: int = EPOCHS) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The average after all epochs, and what each validation finds with it."""
    model = Tempered()
    averaged = AveragedModel(model, use_buffers=True, **AVERAGES[name][1])
    optimizer = sgd(model)
    losses = []
    for _ in range(epochs):
        for window in windows(CASE, ACCUMULATE):
            optimizer.zero_grad()
            window_gradient(model, window)
            for index in window:
                if index == window[-1]:
                    optimizer.step()
                    if name != "mean-of-epochs":
                        averaged.update_parameters(model)
                if (index + 1) % VALIDATE_EVERY == 0:
                    losses.append(first_losses(averaged.module))
        if name == "mean-of-epochs":
            averaged.update_parameters(model)
    return state(averaged.module), losses


def _fit(options: dict[str, Any], callback: Callback, **kwargs: Any) -> tuple[Evaluates, Trainer]:
    module = Evaluates(Tempered())
    settings = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATE,
        "callbacks": [callback],
        **kwargs,
    }
    trainer = make_trainer(AutomodelStrategy(**options), **settings)
    trainer.fit(module, loader(), loader() if "val_check_interval" in kwargs else None)
    return module, trainer


def _average(name: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[float], int]:
    callback = AVERAGES[name][0]()
    module, _ = _fit(options, callback, val_check_interval=VALIDATE_EVERY)
    held = sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        for parameter in callback._average_model.parameters()
    )
    return state(module.model), module.losses, held


@pytest.mark.parametrize("options", by_default(OPTIONS, "kept"))
@pytest.mark.parametrize("name", first_by_default(list(AVERAGES)))
def test_average(pool2: RankPool, name: str, options: dict[str, Any]) -> None:
    """Training ends with the average, every validation sees it, and no rank holds more of it than of the weights."""
    expected, losses = averaged_plainly(name)
    current = Tempered()
    optimizer = sgd(current)
    for window in windows(CASE, ACCUMULATE) * EPOCHS:
        optimizer.zero_grad()
        window_gradient(current, window)
        optimizer.step()
    total = sum(parameter.numel() for parameter in current.parameters())
    assert weight_error(Outcome(state(current)), Outcome(expected)) > WRONG, "an average differs"
    for rank, (weights, found, held) in enumerate(pool2.run(_average, name, options)):
        assert weight_error(Outcome(weights), Outcome(expected)) <= TOLERANCE
        assert len(found) == len(losses)
        assert max(map(relative_error, found, [by_rank[rank] for by_rank in losses])) <= TOLERANCE
        is_whole = options.keys() & {"data_parallel", "data_parallel_replicate_size"}
        assert held == total if is_whole else held < 0.7 * total


class Follows(Evaluates):
    """Has running statistics that follow each rank's own data; keeps those that it validates with."""

    def __init__(self, wraps: bool) -> None:
        norm = nn.BatchNorm1d(3)
        super().__init__(
            nn.Sequential(checkpoint_wrapper(norm) if wraps else norm, nn.Linear(3, 1)).double()
        )
        self.seen: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean(), "num_label_tokens": len(batch)}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model(batch)
        self.seen = self.model[0].running_mean.clone()


def _average_statistics(engine: str, wraps: bool, folder: Path) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randn(6, 4, 3, generator=generator, dtype=torch.float64).add(dist.get_rank())
    module = Follows(wraps)
    trainer = make_trainer(
        AutomodelStrategy(data_parallel=engine, save_distributed_checkpoint=False),
        accumulate_grad_batches=2,
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[EMAWeightAveraging(decay=DECAY), ModelCheckpoint(folder, engine)],
    )
    data = DataLoader(batches, batch_size=None)
    trainer.fit(module, data, data)
    assert module.seen is not None
    return module.seen, torch.load(folder / f"{engine}.ckpt")["state_dict"]["model.0.running_mean"]


@pytest.mark.parametrize("wraps", [True, False])
def test_averages_of_running_statistics(pool2: RankPool, tmp_path: Path, wraps: bool) -> None:
    """All ranks validate with the average of the first rank's, which is the saved one, under FSDP2 as under DDP.

    Also those of a module that torch's wrapper for activation checkpointing holds, which state dicts do not
    name.
    """
    found = [pool2.run(_average_statistics, engine, wraps, tmp_path) for engine in ENGINES]
    (seen, saved), *others = (result for by_rank in found for result in by_rank)
    torch.testing.assert_close(seen, saved, rtol=TOLERANCE, atol=0)
    assert seen.abs().min() > WRONG
    for other, file in others:
        torch.testing.assert_close(other, seen, rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(file, seen, rtol=TOLERANCE, atol=0)


class SavesWithinValidation(Callback):
    """Saves in a validation, when the module holds the average, and after it; keeps the module's weights of both."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.held: dict[str, Tensor] = {}

    def _save(self, trainer: Trainer, module: Any, name: str) -> None:
        self.held[name] = module.state_dict()["model.decoder.head.weight"].detach().clone()
        trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")

    def on_validation_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step > 1 and not self.held:
            self._save(trainer, module, "average")

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if len(self.held) == 1:
            self._save(trainer, module, "trained")


def _saved_within_validation(folder: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    saves = SavesWithinValidation(folder)
    settings = {"callbacks": [EMAWeightAveraging(decay=DECAY), saves], "accumulate_grad_batches": ACCUMULATE}
    trainer = make_trainer(
        AutomodelStrategy(data_parallel="ddp"), val_check_interval=VALIDATE_EVERY, **settings
    )
    trainer.fit(Evaluates(Tempered()), loader(), loader())
    files = [torch.load(f"{folder}/{name}.ckpt", weights_only=False) for name in saves.held]
    return saves.held, [
        f[of]["model.decoder.head.weight"] for f in files for of in ("state_dict", "current_model_state")
    ]


def test_a_checkpoint_within_a_validation_holds_both(pool2: RankPool, tmp_path: Path) -> None:
    """The average as the average and the trained weights as such, though the module holds the average then."""
    for held, saved in pool2.run(_saved_within_validation, str(tmp_path)):
        assert relative_error(held["average"], held["trained"]) > WRONG
        expected = [held["average"], held["trained"]] * 2
        assert all(torch.equal(*pair) for pair in zip(saved, expected, strict=True))


def _swa(**kwargs: Any) -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=SWA_LR, swa_epoch_start=2, annealing_epochs=2, **kwargs)


def _ema() -> Callback:
    return EMAWeightAveraging(decay=DECAY)


def _resume(
    saving: str, resuming: str, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Stop after two of three epochs, go on in a new run, and load what was saved without any callback."""
    checkpoint = ModelCheckpoint(dirpath=folder, filename="two", save_on_train_epoch_end=True)
    callbacks = [_ema(), checkpoint]
    _fit(ENGINES[saving], _ema(), callbacks=callbacks, max_epochs=2, enable_checkpointing=True)
    options = ENGINES[resuming]
    path = f"{folder}/two.ckpt"
    loaded = Evaluates(Tempered())
    resumed = Evaluates(Tempered())
    make_trainer(AutomodelStrategy(**options)).validate(loaded, loader(), path, verbose=False)
    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "callbacks": [_ema()]}
    make_trainer(AutomodelStrategy(**options), **settings).fit(resumed, loader(), ckpt_path=path)
    uninterrupted, _ = _fit(options, _ema())
    return state(loaded.model), state(resumed.model), state(uninterrupted.model)


@pytest.mark.sweep
@pytest.mark.parametrize(("saving", "resuming"), [("fsdp2", "fsdp2"), ("ddp", "fsdp2"), ("ddp", "ddp")])
def test_resumed_average(pool2: RankPool, tmp_path: Path, saving: str, resuming: str) -> None:
    """Weights and average of a checkpoint both go on; the average is what others load as the weights."""
    average, _ = averaged_plainly("ema", epochs=2)
    for loaded, resumed, uninterrupted in pool2.run(_resume, saving, resuming, str(tmp_path)):
        assert weight_error(Outcome(resumed), Outcome(uninterrupted)) <= TOLERANCE
        assert weight_error(Outcome(loaded), Outcome(uninterrupted)) > WRONG
        assert weight_error(Outcome(loaded), Outcome(average)) <= TOLERANCE


class ShardedByHand(Evaluates):
    """The callback calls `configure_model` in its set-up, before the Trainer does."""

    def configure_model(self) -> None:
        if not isinstance(self.model, FSDPModule):
            mesh = self.device_mesh["data_parallel_shard"]
            fully_shard(self.model, mesh=mesh, ignored_params={self.model.temperature})


def _average_by_hand() -> dict[str, Tensor]:
    module = ShardedByHand(Tempered())
    settings = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATE,
        "val_check_interval": VALIDATE_EVERY,
    }
    trainer = make_trainer(AutomodelStrategy(), callbacks=[_ema()], **settings)
    trainer.fit(module, loader(), loader())
    return state(module.model)


@pytest.mark.sweep
def test_average_of_a_model_sharded_by_hand(pool2: RankPool) -> None:
    expected, _ = averaged_plainly("ema")
    assert_exact(pool2.run(_average_by_hand), expected)


def _average_from_meta(
    options: dict[str, Any], make_callback: Callable[[], Callback], meta: bool
) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = ModelModule(nn.Identity())
    with torch.device("meta" if meta else "cpu"):
        module.model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))
    settings = {"max_epochs": EPOCHS, "callbacks": [make_callback()]}
    make_trainer(AutomodelStrategy(**options), **settings).fit(module, loader())
    return full_weights(module)


@pytest.mark.sweep
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("make_callback", [_ema, _swa])
def test_average_of_a_model_from_the_meta_device(
    pool2: RankPool, options: dict[str, Any], make_callback: Callable[[], Callback]
) -> None:
    """It has no values yet when the callback copies it."""
    expected = pool2.run(_average_from_meta, options, make_callback, meta=False)
    for weights, wanted in zip(
        pool2.run(_average_from_meta, options, make_callback, meta=True), expected, strict=True
    ):
        assert all(torch.equal(weight, wanted[name]) for name, weight in weights.items())


class Teacher(Callback):
    """Copies the module for its own purposes, in the same hook as the averaging callbacks."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.module = copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.loss = self.module(batch)


def _copy_beside_an_average() -> tuple[bool, list[str]]:
    teacher = Teacher()
    average = _ema()
    _fit({}, average, callbacks=[teacher, average], max_steps=1)
    return teacher.loss.shape == (), [name for name in vars(average) if name in dir(Callback)]


def test_other_copies_of_the_module_are_whole(pool2: RankPool) -> None:
    """Only what averages gets a copy without a forward; nothing is left on the callback."""
    assert pool2.run(_copy_beside_an_average) == [(True, [])] * 2
