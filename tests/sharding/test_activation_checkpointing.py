"""Activation checkpointing: the weights of one process, computed from fewer kept activations by more forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from lightning_automodel import AutomodelStrategy
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.activation_checkpointing import checkpoint_blocks
from tests.rank_pool import RankPool
from tests.trainer.exactness import (
    VOCABULARY,
    WIDTH,
    Block,
    Outcome,
    TinyDecoder,
    full_weights,
    micro_batches,
    weight_error,
)
from tests.trainer.plain import ModelModule, fill, filled_decoder, plain_weights, prefixed
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, by_default, loader, make_trainer

ACCUMULATE = 3
FLOAT32_TOLERANCE = 1e-5  # a layer norm of Hugging Face's computes in float32, whatever its input
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: STRATEGIES[name] for name in ("kept", "resharded", "undeferred", "ddp")},
    "offloaded": {"cpu_offload": True},
}


class Counts(Callback):
    """Forwards of the blocks' linear layers, and bytes that autograd keeps from the training steps."""

    def __init__(self) -> None:
        self.forwards = self.kept_bytes = 0
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for block in module.model.blocks:
            self._handles.append(block.linear.register_forward_hook(self._count))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def on_train_batch_start(self, *args: Any) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)
        self._hooks.__enter__()

    def on_before_backward(self, *args: Any) -> None:
        self._hooks.__exit__()

    def _count(self, *args: Any) -> None:
        self.forwards += 1

    def _keep(self, tensor: Tensor) -> Tensor:
        self.kept_bytes += tensor.numel() * tensor.element_size()
        return tensor


class Run(NamedTuple):
    """What a fit left behind."""

    weights: Outcome
    forwards: int
    kept_bytes: int
    described: list[str]
    keys: list[str]


def fit(
    options: dict[str, Any],
    choice: Any,
    make_model: Callable[[], nn.Module] = filled_decoder,
    make_module: Callable[[nn.Module], ModelModule] = ModelModule,
) -> Run:
    """Train with `activation_checkpointing=choice`."""
    return fit_module(make_module(make_model()), options, choice)


def fit_module(module: ModelModule, options: dict[str, Any], choice: Any) -> Run:
    """Train `module`, whatever it has gone through before."""
    counts = Counts()
    strategy = AutomodelStrategy(**options, activation_checkpointing=choice)
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, callbacks=[counts]).fit(module, loader())
    described = strategy.describe()["activation_checkpointing"]
    outcome = Outcome(full_weights(module))
    return Run(outcome, counts.forwards, counts.kept_bytes, described, list(module.state_dict()))


BLOCKS = [f"model.blocks.{i} (Block)" for i in range(3)]


def _fit_with_each(options: dict[str, Any]) -> list[Run]:
    return [fit(options, choice) for choice in (False, True, "offload")]


@pytest.mark.parametrize(
    "options",
    by_default(
        {**OPTIONS, "prefetched": {"prefetch": 2, "reshard_during_accumulation": True}}, "kept", "ddp"
    ),
)
@pytest.mark.every_case
def test_blocks_are_recomputed(pool2: RankPool, options: dict[str, Any]) -> None:
    """Exact; each block's layers run twice a micro-batch, less is kept for the backward, no name changes.

    Of what recomputation keeps, autograd keeps all but the inputs of blocks where these wait in host memory: hooks of
    our own take them.
    """
    model = filled_decoder()
    keys = [f"model.{name}" for name in model.state_dict()]
    expected = prefixed(plain_weights(model, ACCUMULATE))
    for rank, (without, recomputed, offloaded) in enumerate(pool2.run(_fit_with_each, options)):
        for run in (recomputed, offloaded):
            assert weight_error(run.weights, expected) <= TOLERANCE
            assert run.forwards == 2 * without.forwards > 0
            assert run.described == BLOCKS
        assert without.described == []
        assert without.keys == recomputed.keys == keys
        assert recomputed.kept_bytes < 0.8 * without.kept_bytes
        positions = sum(batch["input_ids"].numel() for batch in micro_batches(CASE)[rank])
        assert recomputed.kept_bytes - offloaded.kept_bytes == 3 * positions * WIDTH * 8


def _keeps_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class Doubled(TinyDecoder):
    """Two matrix products a block."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        for block in self.blocks:
            block.linear = nn.Sequential(block.linear, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        fill(self)


def _count_products(options: dict[str, Any], choice: Any) -> tuple[Outcome, int]:
    """Floating-point operations of a fit."""
    with FlopCounterMode(display=False) as counter:
        weights = fit(options, choice, Doubled).weights
    return weights, counter.get_total_flops()


@pytest.mark.sweep
@pytest.mark.parametrize("options", by_default(OPTIONS, "kept"))
def test_what_is_kept_is_not_computed_again(pool2: RankPool, options: dict[str, Any]) -> None:
    """A policy keeps every product, "selective" half of them."""
    expected = prefixed(plain_weights(Doubled(), ACCUMULATE))
    operations = []
    for choice in (False, _keeps_products, "selective", True):
        runs = pool2.run(_count_products, options, choice)
        assert all(weight_error(weights, expected) <= TOLERANCE for weights, _ in runs)
        operations.append(runs[0][1])
    nothing, by_policy, selective, everything = operations
    assert nothing == by_policy
    assert 2 * (selective - nothing) == everything - nothing > 0


@pytest.mark.parametrize(
    "options", by_default({name: OPTIONS[name] for name in ("resharded", "ddp")}, "resharded")
)
@pytest.mark.parametrize(
    ("choice", "described", "factor"),
    [
        # Hooks of a recomputed module itself, the one that counts among them, run once.
        pytest.param(
            {nn.Linear},
            [*(f"model.blocks.{i}.linear (Linear)" for i in range(3)), "model.head (Linear)"],
            1,
            marks=pytest.mark.sweep,
        ),
        ({Block, nn.LayerNorm}, [*BLOCKS, "model.norm (LayerNorm)"], 2),
        ({nn.Embedding}, ["model.embedding (Embedding)"], 1),
        pytest.param({TinyDecoder}, ["model (TinyDecoder)"], 2, marks=pytest.mark.sweep),
    ],
    ids=["layers", "blocks", "embedding", "everything"],
)
def test_chosen_classes(
    pool2: RankPool, options: dict[str, Any], choice: set[type], described: list[str], factor: int
) -> None:
    """The outermost instances of the classes are meant, units or not, and what lies within a unit or around units."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    forwards = 8 * 3
    for run in pool2.run(fit, options, choice):
        assert weight_error(run.weights, expected) <= TOLERANCE
        assert run.described == described
        assert run.forwards == factor * forwards


class Sharing(TinyDecoder):
    """A block that stands in the list twice, a frozen one that is called twice, one that is tied to the root."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.blocks.append(self.blocks[0])
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.blocks[2].linear.weight = self.adapter.weight
        fill(self)
        self.blocks[1].requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.adapter(self.embedding(input_ids)))
        for block in (*self.blocks, self.blocks[1]):
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("options", by_default({name: OPTIONS[name] for name in ("kept", "ddp")}, "kept"))
def test_shared_and_frozen_blocks(pool2: RankPool, options: dict[str, Any]) -> None:
    """A block that is used several times is recomputed as often; one that is tied to the outside is no unit."""
    expected = prefixed(plain_weights(Sharing(), ACCUMULATE))
    for run in pool2.run(fit, options, True, Sharing):
        assert weight_error(run.weights, expected) <= TOLERANCE
        assert run.described == BLOCKS[:2]


class Remembering(TinyDecoder):
    """Blocks that write buffers in their forward: statistics, a counter that is replaced, what they compute with."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        for block in self.blocks:
            block.norm = RunningNorm()
        fill(self)
        torch.manual_seed(3)
        for block in self.blocks:
            nn.utils.parametrizations.spectral_norm(block.linear)
        self.double()


class RunningNorm(nn.Module):
    """Normalises [b, s, d] by batch and by position, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.by_batch = nn.BatchNorm1d(WIDTH)
        self.by_position = nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", torch.ones(()), persistent=False)
        self.register_buffer("latest", None, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.largest.mul_(0.9).add_(0.1 * hidden.detach().abs().max())
        before = 1.0 if self.latest is None else self.latest
        self.latest = 1 + hidden.detach().mean().square()
        hidden = hidden.transpose(1, 2)
        return before * (self.by_batch(hidden) + self.largest * self.by_position(hidden)).transpose(1, 2)


def _weights_and_buffers(options: dict[str, Any], choice: bool) -> tuple[Outcome, dict[str, Tensor]]:
    module = ModelModule(Remembering())
    run = fit_module(module, options, choice)
    return run.weights, {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("options", by_default({name: OPTIONS[name] for name in ("kept", "ddp")}, "kept"))
def test_buffers_are_written_once(pool2: RankPool, options: dict[str, Any]) -> None:
    """The second forward finds the buffers that the first one found, and leaves them as the first one did."""
    expected = pool2.run(_weights_and_buffers, options, False)
    for (weights, buffers), (others, wanted) in zip(
        pool2.run(_weights_and_buffers, options, True), expected, strict=True
    ):
        assert weight_error(weights, others) <= TOLERANCE
        assert wanted["model.blocks.0.norm.calls"] == 8
        assert all(torch.equal(buffer, wanted[name]) for name, buffer in buffers.items())


class Averaging(nn.Module):
    """Scales by a running mean, which it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.ones(3), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(dim=0))
        return torch.tanh(hidden * self.mean)


@pytest.mark.parametrize("choice", [True, "selective", "offload"])
def test_compiled_blocks_write_their_buffers_once(choice: Any) -> None:
    """Where the compiler could trace the block with its second forward, it would write them twice."""
    gradients = []
    for is_recomputed in (False, True):
        torch.manual_seed(1)
        module = ModelModule(nn.Sequential(Averaging(), Averaging()))
        if is_recomputed:
            checkpoint_blocks(module, choice, None, True, PatchStack())
            for block in module.model:
                block.compile(backend="eager")
        for _ in range(2):
            module.model(torch.ones(2, 3)).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=0)


class ShardedByHand(ModelModule):
    """Two of its blocks are FSDP units of its own making."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def test_sharded_by_its_user(pool2: RankPool) -> None:
    """Blocks are recomputed, whichever of them are units."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    for run in pool2.run(fit, {}, True, filled_decoder, ShardedByHand):
        assert weight_error(run.weights, expected) <= TOLERANCE
        assert run.described == BLOCKS


def _fit_again_and_again(options: dict[str, Any]) -> list[int]:
    module = ModelModule(filled_decoder())
    return [
        fit_module(module, options, choice).forwards
        for choice in (True, "offload", False, {Block}, {TinyDecoder})
    ]


@pytest.mark.parametrize("options", by_default({name: OPTIONS[name] for name in ("kept", "ddp")}, "kept"))
def test_each_fit_chooses_anew(pool2: RankPool, options: dict[str, Any]) -> None:
    """Nothing is left of an earlier fit: no block is recomputed twice, none that is not to be."""
    for forwards in pool2.run(_fit_again_and_again, options):
        assert forwards == [48, 48, 24, 48, 48]


def test_a_copy_computes_with_its_own_weights() -> None:
    """Averaging callbacks copy the module in mid-fit."""
    module = ModelModule(filled_decoder())
    patches = PatchStack()
    checkpoint_blocks(module, True, None, True, patches)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    hidden = torch.ones(1, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    assert copied.model.blocks[0](hidden).sum() == 2 * WIDTH
    assert module.model.blocks[0](hidden).sum() != 2 * WIDTH
    patches.restore()


class WithoutBlocks(nn.Module):
    """Nothing in it is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


@pytest.mark.parametrize("choice", [True, {Block}, set()], ids=["units", "class", "nothing"])
def test_nothing_to_recompute_raises(choice: Any) -> None:
    """The choice and the model's class stand in the message."""
    with pytest.raises(ValueError, match="finds no blocks in ModelModule: pass auto_wrap_policy") as raised:
        checkpoint_blocks(ModelModule(WithoutBlocks()), choice, None, True, PatchStack())
    assert str(raised.value).startswith(f"activation_checkpointing={choice!r}")


def llama() -> nn.Module:
    """A tiny decoder of Hugging Face's, that keeps a cache unless it is told otherwise."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=True)
    torch.manual_seed(0)
    return Logits(transformers.LlamaForCausalLM(config).double())


class Logits(nn.Module):
    """[b, s] ids to [b, s, v] logits; blocks stand where the callback looks for them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def blocks(self) -> list[Any]:
        return [SimpleNamespace(linear=layer.mlp.up_proj) for layer in self.inner.model.layers]

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids).logits


@pytest.mark.sweep
@pytest.mark.parametrize("options", by_default({name: OPTIONS[name] for name in ("kept", "ddp")}, "kept"))
def test_hugging_face_layers(pool2: RankPool, options: dict[str, Any]) -> None:
    """Their own switch is used, also to offload, and turned back: the cache that they would fill twice is left out."""
    expected = prefixed(plain_weights(llama(), ACCUMULATE))
    for without, first, second in pool2.run(_fit_llama, options):
        assert weight_error(first.weights, without.weights) <= TOLERANCE
        assert weight_error(first.weights, expected) <= FLOAT32_TOLERANCE
        assert first.described == [f"model.inner.model.layers.{i} (LlamaDecoderLayer)" for i in range(3)]
        assert (first.forwards, second.forwards) == (48, 24)


def _fit_llama(options: dict[str, Any]) -> tuple[Run, Run, Run]:
    module = ModelModule(llama())
    return (
        fit(options, False, llama),
        fit_module(module, options, "offload"),
        fit_module(module, options, False),
    )


def test_hugging_face_layers_in_evaluation_mode_raise() -> None:
    """They would keep every activation without a word. Those before them are restored."""
    module = ModelModule(llama())
    layers = module.model.inner.model.layers
    layers[1].eval()
    before = [dict(vars(layer)) for layer in layers]
    patches = PatchStack()
    with pytest.raises(ValueError, match=r"has no effect on model\.inner\.model\.layers\.1 .*Call \.train"):
        checkpoint_blocks(module, True, None, True, patches)
    patches.restore()
    assert [dict(vars(layer)) for layer in layers] == before
    layers[1].train()
    before[1] = dict(vars(layers[1]))
    checkpoint_blocks(module, True, None, True, patches)
    patches.restore()
    assert [dict(vars(layer)) for layer in layers] == before
