"""What is claimed to work: every layout with every precision and every feature, each trained for real.

A cell trains the same tiny decoder on ragged data, with a short last window, and its weights are compared
with those of a plain single-process float64 loop. What a lower precision may be off by is a few of its
rounding steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from lightning_automodel import AutomodelStrategy, context_parallel_attention
from tests import devices
from tests.trainer.cases import Case
from tests.trainer.exactness import PLAN, Batch, Block, TinyDecoder, full_weights
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import loader, make_trainer

SEED = 32
ACCUMULATE = 3


@dataclass(frozen=True)
class Layout:
    """How ranks hold the model: `num_ranks` have different data, `tensor` and `context` ranks share each batch.

    `mesh` names the dimensions of a mesh that the caller builds.
    """

    options: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    tensor: int = 1
    mesh: tuple[str, ...] = ()
    context: int = 1

    @property
    def peers(self) -> int:
        """Ranks that are given the same batches."""
        return self.tensor * self.context

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.num_ranks * self.peers

    @property
    def case(self) -> Case:
        """The data."""
        return Case(
            seed=SEED, telling="labels", num_batches=5, num_ranks=self.num_ranks, gap="micro_batches"
        )


@dataclass(frozen=True)
class Feature:
    """What is switched on: of the strategy, the Trainer, the plain loop's gradients, and the model on both sides."""

    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    clip: Callable[[list[nn.Parameter]], Any] = lambda parameters: None
    prepare: Callable[[nn.Module], Any] = lambda model: None
    compile_blocks: bool = False
    manual: bool = False


@dataclass(frozen=True)
class Cell:
    """One claim, by the keys of `LAYOUTS`, `PRECISIONS` and `FEATURES`."""

    layout: str
    precision: str
    feature: str

    def __str__(self) -> str:
        return f"{self.layout}-{self.precision}-{self.feature}".replace(" ", "_")


def freeze_embedding(model: nn.Module) -> None:
    """Leave a parameter of the root untrained."""
    model.embedding.requires_grad_(False)


LAYOUTS = {
    "one process": Layout(num_ranks=1),
    "FSDP2": Layout(),
    "HSDP": Layout({"data_parallel_replicate_size": 2}, num_ranks=4),
    "TP x FSDP2": Layout({"tensor_parallel_size": 2}, tensor=2),
    "own mesh (dp, tp)": Layout(tensor=2, mesh=("dp", "tp")),
    "DDP": Layout({"data_parallel": "ddp"}),
    "CP x FSDP2": Layout({"context_parallel_size": 2}, num_ranks=1, context=2),
    "CP x HSDP": Layout({"context_parallel_size": 2, "data_parallel_replicate_size": 2}, context=2),
    "CP x TP x FSDP2": Layout(
        {"context_parallel_size": 2, "tensor_parallel_size": 2}, num_ranks=1, tensor=2, context=2
    ),
    "CP x DDP": Layout({"context_parallel_size": 2, "data_parallel": "ddp"}, num_ranks=1, context=2),
}
PRECISIONS = {
    "64-true": 1e-12,
    "32-true": 1e-5,
    "bf16-mixed": 3e-2,
    "bf16-true": 3e-2,
    "16-mixed": 4e-3,
    "16-true": 4e-3,
}
"""By how much weights may differ from the float64 loop, relative to the largest of their tensor: about 100
rounding steps of float32, or 4 of the half precision that activations or weights are rounded to."""

FEATURES = {
    "accumulation, short window": Feature(),
    "clip by norm": Feature(
        trainer={"gradient_clip_val": 0.05},
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05),
    ),
    "clip by value": Feature(
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        clip=lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    ),
    "manual optimization": Feature(trainer={"accumulate_grad_batches": 1}, manual=True),
    "parameters kept gathered": Feature({"reshard_during_accumulation": False}),
    "parameters resharded": Feature({"reshard_during_accumulation": True}),
    "reduction each micro-batch": Feature({"defer_fsdp_grad_sync": False}),
    "all-reduce once": Feature({"defer_fsdp_grad_sync": "all_reduce"}),
    "no reshard after forward": Feature(
        {"reshard_after_forward": False, "reshard_during_accumulation": True}
    ),
    "CPU offload": Feature({"cpu_offload": True}),
    "activation checkpointing": Feature({"activation_checkpointing": {Block}}),
    "activations in host memory": Feature({"activation_checkpointing": "offload"}),
    "gathers two units ahead": Feature({"prefetch": 2, "reshard_during_accumulation": True}),
    "compiled blocks": Feature(compile_blocks=True),
    "frozen parameters": Feature(prepare=freeze_embedding),
    "validation in mid-window": Feature(trainer={"val_check_interval": 1}),
    "non-finite check, norm tracked": Feature({"error_if_nonfinite": True, "track_grad_norm": True}),
    "window counted ahead": Feature({"count_window_ahead": True}),
}


class SupportModule(ModelModule):
    """Trains the decoder, as automatic or manual optimization, in the layout that the mesh asks for."""

    def __init__(self, model: nn.Module, feature: Feature, layout: Layout) -> None:
        super().__init__(model)
        self.feature = feature
        self.layout = layout
        self.automatic_optimization = not feature.manual

    def configure_model(self) -> None:
        if self.layout.tensor > 1:
            parallelize_module(
                self.model, self.device_mesh["tp" if self.layout.mesh else "tensor_parallel"], PLAN
            )
        if self.feature.compile_blocks:
            for block in self.model.blocks:
                block.compile(backend="aot_eager")

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self(batch)
        optimizer = self.optimizers()
        is_last = (batch_idx + 1) % ACCUMULATE == 0 or batch_idx + 1 == self.layout.case.num_batches
        given = {"num_label_tokens": (batch["labels"] != -100).sum()}
        if self.layout.context > 1:
            given = {}  # labels of slices are counted
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self(batch), **given)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return None


class AttendingBlock(Block):
    """Mixes positions by attention, in place of their mean."""

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        heads = normed[:, None]
        mixed = context_parallel_attention(heads, heads, heads)[:, 0]
        return hidden + torch.tanh(self.linear(normed + mixed))


def decoder(feature: Feature, layout: Layout) -> nn.Module:
    """The model as both sides start with it, in float64."""
    model = TinyDecoder(SEED).double()
    if layout.context > 1:
        for block in model.blocks:
            block.__class__ = AttendingBlock
    feature.prepare(model)
    return model


def train(cell: Cell) -> dict[str, Tensor] | str:
    """Runs on every rank: full weights in float64 after training, or the message with which the cell is refused."""
    layout = LAYOUTS[cell.layout]
    feature = FEATURES[cell.feature]
    model = decoder(feature, layout)
    if cell.precision != "64-true":
        model.float()
    module = SupportModule(model, feature, layout)
    options = {**layout.options, **feature.options}
    if layout.mesh:
        kind = devices.device_type(dist.get_world_size())
        options["device_mesh"] = init_device_mesh(
            kind, (layout.num_ranks, layout.tensor), mesh_dim_names=layout.mesh
        )
    try:
        trainer = make_trainer(
            AutomodelStrategy(**options),
            **{
                "precision": cell.precision,
                "accumulate_grad_batches": ACCUMULATE,
                "limit_val_batches": 1 if "val_check_interval" in feature.trainer else 0,
                **feature.trainer,
            },
        )
        batches = loader(layout.case, layout.peers)
        trainer.fit(module, batches, batches)
    except (ValueError, MisconfigurationException) as error:
        return str(error)
    return {name: weight.double().cpu() for name, weight in full_weights(module.model).items()}


def expected_weights(cell: Cell, accumulate: int = ACCUMULATE) -> dict[str, Tensor]:
    """The plain float64 loop's."""
    feature = FEATURES[cell.feature]
    layout = LAYOUTS[cell.layout]
    return plain_weights(decoder(feature, layout), accumulate, layout.case, clip=feature.clip)


def reason_not_to_run(cell: Cell, num_devices: int) -> str | None:
    """Why a cell cannot be run on this machine; None if it can."""
    if cell.precision == "16-mixed" and num_devices < LAYOUTS[cell.layout].world_size:
        return f"needs {LAYOUTS[cell.layout].world_size} CUDA devices; here are {num_devices}"
    return None


CELLS = [
    Cell(layout, precision, feature)
    for feature in FEATURES
    for layout in LAYOUTS
    for precision in PRECISIONS
]
