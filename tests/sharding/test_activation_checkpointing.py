"""Activation checkpointing: the weights of one process, computed from fewer kept activations by more forwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.activation_checkpointing import checkpoint_blocks
from tests.rank_pool import RankPool
from tests.sharding import fits
from tests.sharding.fits import ACCUMULATE, Logits
from tests.trainer.exactness import WIDTH, Block, Outcome, TinyDecoder, micro_batches, weight_error
from tests.trainer.hugging_face import llama
from tests.trainer.plain import ModelModule, fill, filled_decoder, plain_weights, prefixed
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, by_default

FLOAT32_TOLERANCE = 1e-5  # a layer norm of Hugging Face's computes in float32, whatever its input
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: STRATEGIES[name] for name in ("kept", "resharded", "undeferred", "ddp")},
    "offloaded": {"cpu_offload": True},
    "prefetched": {"prefetch": 2, "reshard_during_accumulation": True},
}
TWO = by_default({name: OPTIONS[name] for name in ("kept", "ddp")}, "kept")


class Counts(Callback):
    """Forwards of one linear layer in each block, and bytes that autograd keeps from the training steps."""

    def __init__(self) -> None:
        self.forwards = self.kept_bytes = 0
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        counted = [part for name, part in module.named_modules() if name.endswith((".linear", ".up_proj"))]
        self._handles = [part.register_forward_hook(self._count) for part in counted]

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


def fit_module(module: ModelModule, options: dict[str, Any], choice: Any) -> Run:
    """Train `module` with `activation_checkpointing=choice`, whatever it has gone through before."""
    counts = Counts()
    found = fits.fit_module(module, {**options, "activation_checkpointing": choice}, callbacks=[counts])
    described = found.described["activation_checkpointing"]
    return Run(found.weights, counts.forwards, counts.kept_bytes, described, list(module.state_dict()))


def fit(options: dict[str, Any], choice: Any, make_model: Callable[[], nn.Module] = filled_decoder) -> Run:
    """Train a new module."""
    return fit_module(ModelModule(make_model()), options, choice)


BLOCKS = [f"model.blocks.{i} (Block)" for i in range(3)]


def _fit_with_each(options: dict[str, Any]) -> list[Run]:
    return [fit(options, choice) for choice in (False, True, "offload")]


@pytest.mark.parametrize("options", by_default(OPTIONS, "kept", "ddp"))
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


def _count_products(options: dict[str, Any], choice: Any) -> tuple[Outcome, int]:
    """Floating-point operations of a fit."""
    with FlopCounterMode(display=False) as counter:
        weights = fit(options, choice).weights
    return weights, counter.get_total_flops()


@pytest.mark.sweep
@pytest.mark.parametrize("options", TWO)
def test_what_is_kept_is_not_computed_again(pool2: RankPool, options: dict[str, Any]) -> None:
    """A policy that keeps every product. "selective": `tests.search`."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    operations = []
    for choice in (False, _keeps_products, True):
        runs = pool2.run(_count_products, options, choice)
        assert all(weight_error(weights, expected) <= TOLERANCE for weights, _ in runs)
        operations.append(runs[0][1])
    nothing, by_policy, everything = operations
    assert nothing == by_policy < everything


def test_chosen_classes(pool2: RankPool) -> None:
    """The outermost instances of the classes are meant, units or not, and what lies within a unit or around units."""
    expected = prefixed(plain_weights(filled_decoder(), ACCUMULATE))
    for run in pool2.run(fit, OPTIONS["resharded"], {Block, nn.LayerNorm}):
        assert weight_error(run.weights, expected) <= TOLERANCE
        assert run.described == [*BLOCKS, "model.norm (LayerNorm)"]
        assert run.forwards == 2 * 8 * 3


class Remembering(TinyDecoder):
    """Blocks that write buffers in their forward, count in Python, and draw from generators of all kinds."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        for block in self.blocks:
            block.norm = RunningNorm()
        fill(self)
        seed_everything(3)
        for block in self.blocks:
            nn.utils.parametrizations.spectral_norm(block.linear)
        self.double()


class RunningNorm(nn.Module):
    """Normalises [b, s, d] by batch, counts, and scales by what it has met before."""

    def __init__(self) -> None:
        super().__init__()
        self.by_batch = nn.BatchNorm1d(WIDTH)
        self.rounds = 0
        self.noise = torch.Generator().manual_seed(1)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", torch.ones(()), persistent=False)
        self.register_buffer("latest", None, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.rounds += 1
        scale = self.rounds + random.random() + np.random.random() + torch.rand((), generator=self.noise)
        self.largest.mul_(0.9).add_(0.1 * hidden.detach().abs().max())
        before = self.largest if self.latest is None else self.latest
        self.latest = self.largest + hidden.detach().mean().square()
        return scale * before * self.by_batch(hidden.transpose(1, 2)).transpose(1, 2)


def _weights_and_buffers(options: dict[str, Any], choice: bool) -> tuple[Outcome, dict[str, Tensor]]:
    module = ModelModule(Remembering())
    run = fit_module(module, options, choice)
    return run.weights, {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("options", TWO)
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


@pytest.mark.parametrize("choice", [True, "offload"])
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


def _fit_again_and_again(options: dict[str, Any]) -> list[int]:
    module = ModelModule(filled_decoder())
    return [
        fit_module(module, options, choice).forwards
        for choice in (True, "offload", False, {Block}, {TinyDecoder})
    ]


@pytest.mark.parametrize("options", TWO)
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


@pytest.mark.parametrize("choice", [True, {Block}, set()], ids=["units", "class", "nothing"])
def test_nothing_to_recompute_raises(choice: Any) -> None:
    """The choice and the model's class stand in the message."""
    with pytest.raises(ValueError, match="finds no blocks in ModelModule: pass auto_wrap_policy") as raised:
        checkpoint_blocks(ModelModule(nn.Linear(1, 1)), choice, None, True, PatchStack())
    assert str(raised.value).startswith(f"activation_checkpointing={choice!r}")
    recurrent = ModelModule(nn.Sequential(nn.GRU(1, 1), nn.GRU(1, 1)))
    with pytest.raises(
        ValueError, match=r"which has recurrent layers: .* Pass True, or classes of other blocks"
    ):
        checkpoint_blocks(recurrent, "selective", {nn.GRU}, True, PatchStack())


def _llama() -> Logits:
    return Logits(llama(is_tied=False))


def _fit_llama(options: dict[str, Any]) -> tuple[Run, Run, Run]:
    module = ModelModule(_llama())
    first, second = (fit_module(module, options, choice) for choice in ("offload", False))
    return fit(options, False, _llama), first, second


@pytest.mark.sweep
@pytest.mark.parametrize("options", TWO)
def test_hugging_face_layers(pool2: RankPool, options: dict[str, Any]) -> None:
    """Their own switch is used, also to offload, and turned back: the cache that they would fill twice is left out."""
    expected = prefixed(plain_weights(_llama(), ACCUMULATE))
    for without, first, second in pool2.run(_fit_llama, options):
        assert weight_error(first.weights, without.weights) <= TOLERANCE
        assert weight_error(first.weights, expected) <= FLOAT32_TOLERANCE
        assert first.described == [f"model.inner.model.layers.{i} (LlamaDecoderLayer)" for i in range(2)]
        assert (first.forwards, second.forwards) == (32, 16)


def test_hugging_face_layers_in_evaluation_mode_raise() -> None:
    """They would keep every activation without a word. Those before them are restored."""
    module = ModelModule(_llama())
    layers = module.model.inner.model.layers
    layers[1].eval()
    before = [dict(vars(layer)) for layer in layers]
    patches = PatchStack()
    with pytest.raises(ValueError, match=r"has no effect on model\.inner\.model\.layers\.1 .*Call \.train"):
        checkpoint_blocks(module, True, None, True, patches)
    patches.restore()
    assert [dict(vars(layer)) for layer in layers] == before
