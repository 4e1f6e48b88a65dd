"""Models from the meta device train to the weights of one process that created them with values, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy
from tests.devices import device_type
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import VOCABULARY, WIDTH, assert_exact, full_weights, weight_error
from tests.trainer.plain import ModelModule, plain_weights, prefixed
from tests.trainer.runs import CASE, TOLERANCE, by_default, first_by_default, loader, make_trainer

pytestmark = pytest.mark.skipif(
    device_type(2) != "cpu", reason="the reference draws on the host, and these models on their device"
)
ACCUMULATE = 3
SEED = 11
LAYOUTS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_during_accumulation": False},
    "resharded": {"reshard_during_accumulation": True, "activation_checkpointing": True},
    "offloaded": {"cpu_offload": True},
    "ddp": {"data_parallel": "ddp"},
}


class Layer(nn.Module):
    """A residual block with a parameter and buffers of its own, whose initialiser also scales a child.

    Notes, where a test asks for it, what is whole on this rank while its children and it are initialised.
    """

    whole: list[list[str]] | None = None
    root: nn.Module | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.scalar = nn.Parameter(torch.empty(()))
        self.register_buffer("offset", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.gain.normal_(1.0, 0.5)
        self.scalar.uniform_()
        self.offset.copy_(torch.arange(WIDTH) / 128)  # exact in every dtype
        self.linear.weight.mul_(0.5)
        if Layer.whole is not None and Layer.root is not None:
            named = [(n, p) for n, p in Layer.root.named_parameters() if p.ndim > 0 and not p.is_meta]
            Layer.whole.append([n for n, p in named if not isinstance(p, DTensor)])

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.linear(self.norm(hidden) + self.offset) * self.gain + self.scalar
        return hidden + torch.tanh(mixed).cumsum(dim=1) / hidden.shape[1]


class Decoder(nn.Module):
    """A padded embedding, tied to the head, and layers; [b, s] ids to [b, s, v] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids)


class Configured(ModelModule):
    """Creates its model in `configure_model`, on the meta device."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            with torch.device("meta"):
                self.model = Decoder()


class ShardedByHand(Configured):
    """Shards it there as well, as Lightning's `ModelParallelStrategy` demands."""

    def configure_model(self) -> None:
        super().configure_model()
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"], ignored_params={layer.scalar})
        scalars = {layer.scalar for layer in self.model.layers}
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"], ignored_params=scalars)


def expected(case: Case = CASE) -> dict[str, Tensor]:
    """What one process gets that creates the model with values, in the precision of the Trainer."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float64)
    model = Decoder()
    torch.set_default_dtype(torch.float32)
    return prefixed(plain_weights(model, ACCUMULATE, case))


def make_module(where: str, trainer: Any) -> ModelModule:
    """A module that stands on rank 0 where the reference starts, and elsewhere on the other ranks."""
    torch.manual_seed(SEED + dist.get_rank())
    if where == "configure_model":
        return Configured()
    if where == "by_hand":
        return ShardedByHand()
    with torch.device("meta") if where == "meta" else trainer.init_module(empty_init=where == "init_module"):
        return ModelModule(Decoder())


def fit(options: dict[str, Any], where: str, case: Case = CASE, **trainer_options: Any) -> dict[str, Tensor]:
    """Train; weights must be 64 bit, and shared where they were."""
    trainer_options = {"precision": "64-true", "accumulate_grad_batches": ACCUMULATE, **trainer_options}
    strategy = AutomodelStrategy(**options)
    trainer = make_trainer(strategy, **trainer_options)
    module = make_module(where, trainer)
    trainer.fit(module, loader(case))
    assert (strategy.describe()["tensors_created_without_values"] > 0) == (where != "values")
    assert module.model.head.weight is module.model.embedding.weight
    assert all(tensor.dtype == torch.float64 for tensor in (*module.parameters(), *module.buffers()))
    return full_weights(module)


@pytest.mark.parametrize("where", first_by_default(["meta", "values"]))
@pytest.mark.parametrize("options", by_default(LAYOUTS, "resharded", "offloaded", "ddp"))
def test_one_seed_gives_one_model(pool2: RankPool, options: dict[str, Any], where: str) -> None:
    """With the meta device or without, the initial weights are those of a single process under rank 0's seed."""
    reference = expected()
    torch.manual_seed(SEED + 1)
    assert weight_error(prefixed(plain_weights(Decoder().double(), ACCUMULATE)), reference) > 1e-3
    assert_exact(pool2.run(fit, options, where), reference)


@pytest.mark.parametrize(
    ("where", "layout"),
    first_by_default([("by_hand", "kept"), ("init_module", "ddp"), ("configure_model", "ddp")]),
)
def test_ways_to_create_a_model_without_values(pool2: RankPool, where: str, layout: str) -> None:
    """In a hook, sharded there or not, and in the Trainer's context, all of which know the Trainer's precision."""
    assert_exact(pool2.run(fit, LAYOUTS[layout], where), expected())


def _whole_parameters() -> list[list[str]]:
    trainer = make_trainer(AutomodelStrategy(), precision="64-true", limit_train_batches=1)
    module = make_module("meta", trainer)
    whole: list[list[str]] = []
    with mock.patch.multiple(Layer, whole=whole, root=module):
        trainer.fit(module, loader())
    return whole


def test_a_rank_holds_shards_alone(pool2: RankPool) -> None:
    """Also of the layer that is initialised: a whole tensor lives as long as the function that writes to it."""
    assert pool2.run(_whole_parameters) == [[[], []]] * 2


class Forgetful(Decoder):
    """Has a parameter and a buffer that no initialiser fills; the buffer is no part of a checkpoint."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("slope", torch.full((WIDTH,), 1.5), persistent=persistent)

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.slope + self.shift


def _two_epochs(options: dict[str, Any], module: ModelModule, path: str, resumes: bool) -> dict[str, Tensor]:
    """Weights after two epochs; the checkpoint is of the first, and read if the second alone is to be trained."""
    kwargs: dict[str, Any] = {"precision": "64-true", "accumulate_grad_batches": ACCUMULATE}
    if not resumes:
        trainer = make_trainer(AutomodelStrategy(**options), **kwargs)
        trainer.fit(module, loader())
        trainer.save_checkpoint(path)
    make_trainer(AutomodelStrategy(**options), **kwargs, max_epochs=2).fit(module, loader(), ckpt_path=path)
    return full_weights(module)


def _resume(options: dict[str, Any], folder: str, persistent: tuple[bool, bool]) -> Any:
    """Weights with and without the meta device; the error where there is one."""
    path = str(Path(folder) / "checkpoint")
    torch.manual_seed(SEED)
    straight = _two_epochs(options, ModelModule(Forgetful(persistent[0])), path, resumes=False)
    with torch.device("meta"):
        module = ModelModule(Forgetful(persistent[1]))
    module.strict_loading = persistent[0] == persistent[1]
    try:
        return straight, _two_epochs(options, module, path, resumes=True)
    except ValueError as error:
        return straight, str(error)


@pytest.mark.parametrize("options", by_default(LAYOUTS, "kept"))
def test_a_checkpoint_fills_a_model_without_values(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Also what has no initialiser, and not before the initialisers have run."""
    for straight, resumed in pool2.run(_resume, options, str(tmp_path), (True, True)):
        assert isinstance(resumed, dict)
        assert weight_error(resumed, straight) <= TOLERANCE


@pytest.mark.parametrize("is_persistent", first_by_default([True, False]))
def test_what_a_checkpoint_lacks_raises(pool2: RankPool, tmp_path: Path, is_persistent: bool) -> None:
    """A buffer that this state dict does not hold, or that none does."""
    persistent = (False, is_persistent)
    for _, message in pool2.run(_resume, LAYOUTS["ddp"], str(tmp_path), persistent):
        assert isinstance(message, str)
        assert "never initialized: model.slope. Give" in message
