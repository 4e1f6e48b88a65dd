"""What makes the host wait for the device in the steady state of a fit, by feature, and the line that does.

A GPU computes behind the host. Whatever needs a number on the host (`.item()`, a copy that blocks) stops the
host until the device has caught up, and then the device waits for the host.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, token_loss
from tests.trainer.cases import Case
from tests.trainer.exactness import WIDTH, Batch, TinyDecoder, micro_batches
from tests.trainer.runs import make_trainer
from tests.trainer.support import FEATURES, LAYOUTS, Feature, SupportModule, decoder

ACCUMULATE = 4
FIRST = 2 * ACCUMULATE
LAST = 4 * ACCUMULATE
"""The measured micro-batches: two windows, after DDP has rebuilt its buckets."""


class UnusedLayers(TinyDecoder):
    """One layer is used by the first rank (with its `peers`) alone, and another one by none."""

    peers = 1

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits * self.extra(logits) if dist.get_rank() < self.peers else logits


class Scaled(TinyDecoder):
    """Has a parameter that FSDP2 cannot shard."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.scale


def add_unused_layers(model: nn.Module) -> None:
    """Make the decoder one of `UnusedLayers`."""
    model.__class__ = UnusedLayers
    model.extra = nn.Linear(model.head.out_features, 1).double()
    model.unused = nn.Linear(WIDTH, WIDTH).double()


def add_scale(model: nn.Module) -> None:
    """Make the decoder `Scaled`."""
    model.__class__ = Scaled
    model.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


class TokenLossModule(SupportModule):
    """Computes its loss in chunks."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        model = self.model
        hidden = model.embedding(batch["input_ids"])
        for block in model.blocks:
            hidden = block(hidden)
        loss, count = token_loss(model.norm(hidden), model.head, batch["labels"])
        return {"loss": loss / count.clamp(min=1), "num_label_tokens": count}


MORE = {
    "batches drawn ahead of unequal data": Feature({"uneven_inputs": "pad"}),
    "norm clipped and tracked": Feature({"track_grad_norm": True}, trainer={"gradient_clip_val": 0.05}),
    "non-finite check": Feature({"error_if_nonfinite": True}),
    "bf16-mixed": Feature(trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.05}),
    "16-mixed": Feature(trainer={"precision": "16-mixed", "gradient_clip_val": 0.05}),
    "bf16-true": Feature(trainer={"precision": "bf16-true", "gradient_clip_val": 0.05}),
    "token_loss": Feature(),
    "layers that ranks leave unused": Feature(prepare=add_unused_layers),
    "a scalar parameter": Feature(prepare=add_scale),
    "CPU offload, clip by norm": Feature({"cpu_offload": True}, trainer={"gradient_clip_val": 0.05}),
}
MODULES = {"token_loss": TokenLossModule}
CHOSEN = (
    "accumulation, short window",
    "clip by norm",
    "clip by value",
    "manual optimization",
    "parameters kept gathered",
    "parameters resharded",
    "reduction each micro-batch",
    "all-reduce once",
    "no reshard after forward",
    "CPU offload",
    "activation checkpointing",
    "activations in host memory",
    "gathers two units ahead",
    "frozen parameters",
    "window counted ahead",
)
STEADY = {**{name: FEATURES[name] for name in CHOSEN}, **MORE}
STEADY_LAYOUTS = {
    "FSDP2": LAYOUTS["FSDP2"],
    "DDP": LAYOUTS["DDP"],
    "TP": dataclasses.replace(LAYOUTS["TP x FSDP2"], num_ranks=1),
    "CP x FSDP2": LAYOUTS["CP x FSDP2"],
    "HSDP": LAYOUTS["HSDP"],
}


@dataclass(frozen=True)
class Waits:
    """Of one rank, in the measured micro-batches: how often, by what it was and the line that asked for it.

    `launched` has kernels by launcher, line and operator, see `kernels.py`.
    """

    waits: dict[tuple[str, str], int]
    pageable: dict[tuple[str, str], int]
    launched: dict[tuple[str, str, str], int]


class Recorder(Callback):
    """Records from the start of micro-batch `FIRST` to the end of micro-batch `LAST - 1`."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.launched: Counter[tuple[str, str, str]] = Counter()
        self._recording = ExitStack()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        from tests.second_device import device, kernels

        if batch_idx == FIRST:
            self.found = self._recording.enter_context(device.recorded_waits())
            self.launched = self._recording.enter_context(kernels.recorded_kernels())

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == LAST - 1:
            self._recording.close()


def measure(layout_name: str, feature: str) -> Waits | str:
    """Runs on every rank: what was recorded, or the message with which the layout refuses the feature."""
    from tests.second_device import device

    layout = STEADY_LAYOUTS[layout_name]
    switched_on = STEADY[feature]
    case = Case(seed=7, telling="labels", num_batches=LAST + 1, num_ranks=layout.num_ranks, gap="none")
    make_module = MODULES.get(feature, SupportModule)
    module = make_module(decoder(switched_on, layout).float(), switched_on, layout)
    recorder = Recorder()
    module.model.peers = layout.peers
    kwargs = dict(layout.options)
    if feature == "layers that ranks leave unused" and kwargs.get("data_parallel") == "ddp":
        kwargs["ddp_kwargs"] = {"find_unused_parameters": True}
    options = {"accumulate_grad_batches": ACCUMULATE, "callbacks": [recorder]}
    try:
        trainer = make_trainer(
            AutomodelStrategy(**kwargs, **switched_on.options), **options | switched_on.trainer
        )
        trainer.fit(
            module, DataLoader(micro_batches(case)[dist.get_rank() // layout.peers], batch_size=None)
        )
    except ValueError as error:
        return str(error)
    found = recorder.found.items()
    return Waits(
        {key: count for key, count in found if key[0] != device.PAGEABLE},
        {key: count for key, count in found if key[0] == device.PAGEABLE},
        dict(recorder.launched),
    )
