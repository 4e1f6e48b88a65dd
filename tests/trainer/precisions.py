"""One training run in each precision: by the strategy, and by a single-process loop that rounds where it must.

The loop is what a person would write for one device: master weights, a copy in the dtype of the computation
for each micro-batch, gradients summed in float32, one division by the label tokens of the window. It shares
with the strategy the roundings that the precision itself asks for, and knows nothing of ranks, shards and
scales.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests import devices
from tests.trainer.cases import Case
from tests.trainer.exactness import Batch, TinyDecoder, full_weights, micro_batches
from tests.trainer.plain import ModelModule, prefixed, sgd, windows
from tests.trainer.runs import CASE, loader, make_trainer

ACCUMULATE = 3
DTYPES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}
INIT_SCALE = 2.0**14


def wide_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The mean over the label tokens, computed in float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class WideLossModule(ModelModule):
    """Trains on a float32 loss, also where the model answers in half precision."""

    def forward(self, batch: Batch) -> Tensor:
        return wide_loss(self.model(batch["input_ids"]), batch)


def decoder(seed: int = CASE.seed) -> nn.Module:
    return TinyDecoder(seed)


def precision_options(precision: str, **scaler: Any) -> dict[str, Any]:
    """What a Trainer needs: on a CPU, Lightning turns the name 16-mixed into bf16-mixed, so that takes a plugin."""
    if precision != "16-mixed":
        return {"precision": precision}
    device = devices.accelerator(dist.get_world_size())
    plugin = MixedPrecision(
        "16-mixed", device, scaler=torch.amp.GradScaler(device, **{"init_scale": INIT_SCALE, **scaler})
    )
    return {"plugins": [LightningEnvironment(), plugin]}


def fit(
    precision: str,
    options: dict[str, Any],
    make_module: Callable[[nn.Module], ModelModule] = WideLossModule,
    make_model: Callable[[], nn.Module] = decoder,
    case: Case = CASE,
    **trainer_options: Any,
) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    """Runs on every rank: the full weights, the description, and the loss of the last step."""
    module = make_module(make_model())
    strategy = AutomodelStrategy(**options)
    settings = {"accumulate_grad_batches": ACCUMULATE, **precision_options(precision), **trainer_options}
    trainer = make_trainer(strategy, **settings)
    trainer.fit(module, loader(case))
    return full_weights(module), strategy.describe(), float(strategy.last_step.loss)


def _autocast(precision: str) -> AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=DTYPES[precision], cache_enabled=False)


def loop(
    precision: str,
    engine: str,
    model: nn.Module | None = None,
    case: Case = CASE,
    clip: Callable[[list[nn.Parameter]], Any] = lambda parameters: None,
    skipped: tuple[int, ...] = (),
    kept: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Train in this process on whole windows of all ranks, with the roundings that the precision asks for.

    The engine "fsdp2" casts parameters but for those ``kept``, "ddp" runs mixed precisions under autocast. The
    model is in float32. After windows that are ``skipped``, the optimizer does not step.
    """
    model, dtype = model or decoder(case.seed), DTYPES[precision]
    casts = precision.endswith("-mixed") and engine == "fsdp2"
    model = model if precision.endswith("-mixed") else model.to(dtype)
    optimizer = sgd(model)
    names = dict(model.named_parameters())
    for number, window in enumerate(windows(case, ACCUMULATE)):
        wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in names.items()}
        sums = {name: torch.zeros_like(p, dtype=wide[name]) for name, p in names.items()}
        tokens = 0
        for batches in micro_batches(case):
            for index in window:
                batch = batches[index]
                count = int((batch["labels"] != -100).sum())
                model.step = index
                cast = {name: p.to(dtype) if casts and name not in kept else p for name, p in names.items()}
                working = {name: parameter.detach().requires_grad_() for name, parameter in cast.items()}
                uses_autocast = precision.endswith("-mixed") and engine == "ddp"
                with _autocast(precision) if uses_autocast else nullcontext():
                    logits = torch.func.functional_call(model, working, (batch["input_ids"],))
                    loss = wide_loss(logits, batch) * count
                gradients = torch.autograd.grad(loss, list(working.values()), allow_unused=True)
                for name, gradient in zip(names, gradients, strict=True):
                    sums[name] += 0.0 if gradient is None else gradient.to(wide[name])
                tokens += count
        for name, parameter in names.items():
            parameter.grad = (sums[name] / max(tokens, 1)).to(parameter.dtype)
        clip(list(model.parameters()))
        if number not in skipped:
            optimizer.step()
    return prefixed(full_weights(model))
