"""Values for models without any: those that the constructor would have given, and a complaint about the rest.

No process group: what sharding adds stands in `tests/trainer/test_meta_init.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.sharding.meta_init import check_initialized, materialize, names_without_values
from tests.trainer.hugging_face import SIZES

CPU = torch.device("cpu")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def filled(
    make: Callable[[], nn.Module], convert: Callable[[nn.Module], Any] = lambda model: None
) -> nn.Module:
    """The model from the meta device, with values."""
    model = on_meta(make)
    convert(model)
    materialize(model, CPU, offload=False)
    assert names_without_values(tensors(model)) == []
    check_initialized(model, CPU)
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    found = tensors(model)
    wanted = tensors(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(found[name], tensor), name


class Tied(nn.Module):
    """The embedding comes first; the layer that shares its matrix would initialise it otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


class ScalesChildren(nn.Module):
    """Changes what its children have initialised, and one of them it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.first.weight.data.mul_(0.5)
        self.second[0].weight.data = torch.full_like(self.first.weight, 2.0)
        self.second[1].bias = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)


class ReadsValues(nn.Module):
    """An initialiser that draws random numbers before it comes to what a meta device cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("mask", torch.empty(2, 2, dtype=torch.bool), persistent=False)
        if not self.scale.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        self.child.weight.normal_()
        self.scale.fill_(torch.rand(()) * self.child.weight.abs().max().item())
        self.mask[:] = torch.eye(2).bool()


class Tagged(nn.Module):
    """Tells its initialiser, and others, by attributes of parameters what to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.bias.keeps_its_values = True
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if not hasattr(module.bias, "keeps_its_values"):
                nn.init.zeros_(module.bias)


class SharesBuffer(nn.Module):
    """Two parts that hold one buffer, which a conversion of the model tears apart."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.empty(3)
        self.parts = nn.ModuleList([HoldsBuffer(shared), HoldsBuffer(shared)])


class HoldsBuffer(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("angles", buffer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.linspace(0.1, 0.3, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.BatchNorm1d(4), nn.LayerNorm(4)),
    "recurrent": lambda: nn.GRU(4, 5, 2, bidirectional=True),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "tied": Tied,
    "scales-children": ScalesChildren,
    "reads-values": ReadsValues,
    "tagged": Tagged,
    "shares-buffer": SharesBuffer,
    "complex": lambda: HoldsBuffer(torch.empty(3, dtype=torch.complex64)),
    "frozen": lambda: nn.Linear(3, 2).requires_grad_(False),
    "empty": lambda: nn.Linear(3, 0, bias=False),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_same_values_as_the_constructor(make: Callable[[], nn.Module]) -> None:
    """Bit for bit, from the same random state, which is left as it was."""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = filled(make)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model, make())


def test_a_buffer_that_a_conversion_tears_apart() -> None:
    """Both halves are filled, in the dtype of the conversion."""
    first, second = filled(SharesBuffer, convert=lambda model: model.double()).parts
    expected = torch.linspace(0.1, 0.3, 3)
    assert first.angles is not second.angles
    assert all(torch.equal(part.angles, expected.double()) for part in (first, second))


def test_tags_ties_and_lists_of_parameters_stay() -> None:
    assert filled(Tagged).layer.bias.keeps_its_values
    model = filled(Tied)
    assert model.head.weight is model.embedding.weight
    recurrent = filled(lambda: nn.GRU(4, 5))  # keeps a list of them
    assert torch.isfinite(recurrent(torch.zeros(2, 1, 4))[0]).all()


class MetaHead(nn.Module):
    """A part with values, a part without, and an initialiser for both."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 3)
        self.head = on_meta(lambda: nn.Linear(3, 2))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def test_what_has_values_keeps_them() -> None:
    """Only what has none is initialised."""
    model = MetaHead()
    before = model.backbone.weight.clone()
    materialize(model, CPU, offload=False)
    check_initialized(model, CPU)
    assert torch.equal(model.backbone.weight, before)
    assert bool((model.head.weight == 1).all())


class Forgetful(nn.Module):
    """Initialises a parameter, and forgets another and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Fails(Forgetful):
    def reset_parameters(self) -> None:
        raise RuntimeError("on purpose")


def _forgetful() -> nn.Module:
    model = on_meta(
        lambda: nn.Sequential(
            nn.Linear(2, 2), Forgetful(), nn.ModuleList([nn.ParameterList([torch.ones(2)])])
        )
    )
    materialize(model, CPU, offload=False)
    return model


def test_what_nobody_initialises_is_named() -> None:
    """Parameters and buffers, and what to do; as often as it is tried."""
    model = _forgetful()
    for _ in range(2):
        with pytest.raises(ValueError, match="never initialized") as raised:
            check_initialized(model, CPU)
        assert str(raised.value) == (
            "3 parameters or buffers of Sequential were created on the meta device and never initialized:"
            " 1.scale, 2.0.0, 1.mask. Give the classes of their modules a reset_parameters() that fills them, as"
            " torch's layers have, load a checkpoint that holds them, or create them on a real device."
        )


def test_an_initialiser_that_fails_leaves_no_garbage() -> None:
    """Nor does it draw random numbers, here or anywhere; who goes on regardless is told what has no values."""
    state = torch.get_rng_state()
    model = on_meta(lambda: nn.Sequential(Fails(), nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="on purpose"):
        materialize(model, CPU, offload=False)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"^5 parameters.*0\.weight, 0\.scale, .*0\.mask"):
        check_initialized(model, CPU)


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_decoders(tied: bool) -> None:
    """The same as from their constructor, non-persistent buffers of the rotary embedding included."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model = filled(lambda: transformers.LlamaForCausalLM(config))
    assert "model.rotary_emb.inv_freq" in dict(model.named_buffers())
    assert_same(model, transformers.LlamaForCausalLM(config))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
