"""Weights that are codes: a frozen quantised base below adapters, float8 layers, and what is refused.

The classes of torchao and bitsandbytes are tested where they are installed; nothing here has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding.quantized import stays_whole
from tests.rank_pool import RankPool
from tests.trainer.exactness import VOCABULARY, Outcome, weight_error
from tests.trainer.plain import ModelModule, train_model_plainly
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, by_default, loader, make_trainer

ACCUMULATE = 3
WIDTH = 64
OPTIONS = {**STRATEGIES, "recomputed": {"activation_checkpointing": "offload", "prefetch": 2}}


class Codes(Tensor):
    """A matrix [o, i] as int8 codes with a scale for each row, which can be multiplied with and little else."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes = codes
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Codes:
        return Codes(**parts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes.to(x.dtype) * weight.scale.to(x.dtype), *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            torch.ops.aten.detach.default,
            torch.ops.aten.clone.default,
            torch.ops.aten._to_copy.default,
        ):
            parts = (args[0].codes, args[0].scale)
            return cls(*(func(part) for part in parts))
        raise NotImplementedError(f"{func} of {cls.__name__}")


def coded(num_in: int = WIDTH, num_out: int = WIDTH) -> nn.Module:
    """A frozen linear layer of codes."""
    layer = nn.Linear(num_in, num_out, bias=False)
    codes = torch.randint(-9, 10, (num_out, num_in), dtype=torch.int8)
    weight = Codes(codes, torch.full((num_out, 1), 0.02, dtype=torch.float64))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class Adapted(nn.Module):
    """A base and a low-rank product beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(nn.Module):
    """[b, s] ids to [b, s, v] logits through three adapted layers."""

    def __init__(self, make_base: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Adapted(make_base()) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def coded_net() -> nn.Module:
    """In float64."""
    net = Net(coded)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.double()
    return net


def _trained(module: nn.Module) -> Outcome:
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in named.items()}
    return Outcome(whole)


def _fit_codes(options: dict[str, Any]) -> tuple[Outcome, Any]:
    net = coded_net()
    for block in net.blocks:
        block.base.weight.codes.add_(dist.get_rank())  # rank 0's are meant
    module = ModelModule(net)
    strategy = AutomodelStrategy(**options)
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return _trained(module), strategy.describe().get("replicated")


def _expected(net: nn.Module) -> Outcome:
    train_model_plainly(net, ACCUMULATE, CASE)
    return Outcome({f"model.{name}": weight for name, weight in _trained(net).weights.items()})


@pytest.mark.parametrize("options", by_default(OPTIONS, "kept", "ddp"))
def test_adapters_beside_frozen_codes(pool2: RankPool, options: dict[str, Any]) -> None:
    """Exact; the codes stay whole, are rank 0's on every rank, and are said to be."""
    expected = _expected(coded_net())
    names = [f"model.blocks.{index}.base.weight" for index in range(3)]
    for outcome, replicated in pool2.run(_fit_codes, options):
        assert weight_error(outcome, expected) <= TOLERANCE
        assert replicated == (None if options == STRATEGIES["ddp"] else names)


class Tagged(nn.Parameter):
    """Plain numbers of a class of its own, as some libraries mark theirs."""


def tagged_net() -> nn.Module:
    net = coded_net()
    for block in net.blocks:
        block.base = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        block.base.weight = Tagged(torch.eye(WIDTH, dtype=torch.float64))
    return net


def _fit_tagged() -> tuple[Outcome, Any]:
    module = ModelModule(tagged_net())
    strategy = AutomodelStrategy()
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE).fit(module, loader())
    return _trained(module), strategy.describe().get("replicated")


def test_a_class_that_is_a_tag(pool2: RankPool) -> None:
    """It is sharded and trained as any parameter."""
    expected = _expected(tagged_net())
    for outcome, replicated in pool2.run(_fit_tagged):
        assert weight_error(outcome, expected) <= TOLERANCE
        assert not replicated


def _refused(options: dict[str, Any]) -> str:
    net = coded_net()
    net.blocks[0].base.weight.requires_grad_(True)
    trainer = make_trainer(AutomodelStrategy(**options))
    with pytest.raises(ValueError, match="is to be trained") as raised:
        trainer.fit(ModelModule(net), loader())
    return str(raised.value)


def test_codes_to_be_trained_are_refused(pool1: RankPool) -> None:
    """At set-up, with the name, the class and what works."""
    assert pool1.run(_refused, {}) == [
        "model.blocks.0.base.weight is to be trained and is a Codes, which FSDP2 cannot shard: its class has"
        " no fsdp_pre_all_gather. Freeze it and train an adapter beside it (LoRA), quantise after training,"
        " or choose a class that has one, such as those of torchao for float8 training."
    ]
    assert pool1.run(_refused, {"data_parallel": "ddp"}) == [
        "model.blocks.0.base.weight is to be trained and is a Codes, which DDP cannot hold: pass"
        " data_parallel='fsdp2' (for float8 also enable_fsdp_float8_all_gather=False), or freeze it."
    ]


@pytest.mark.parametrize(
    ("param_dtype", "whole"), [(None, []), (torch.float8_e4m3fn, []), (torch.bfloat16, ["weight", "other"])]
)
def test_float8_weights_are_not_converted(param_dtype: torch.dtype | None, whole: list[str]) -> None:
    """FSDP2 would hand layers bfloat16 weights, which they would take for unscaled ones."""
    net = nn.Linear(2, 2)
    for name in ("weight", "other"):
        codes = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
        setattr(net, name, nn.Parameter(codes, requires_grad=False))
    net.packed = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    assert [name for name, p in net.named_parameters() if stays_whole(name, p, policy)] == whole


# --- torchao and bitsandbytes -----------------------------------------------------------------------------------------


def _float8(gathers_float8: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net = Net(lambda: nn.Linear(WIDTH, WIDTH))
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_float8)
    for block in net.blocks:
        convert_to_float8_training(block, module_filter_fn=lambda m, name: name == "base", config=config)
    return net


def _int8_base() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def make() -> nn.Module:
        base = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
        quantize_(base, Int8WeightOnlyConfig())
        return base[0]

    return Net(make)


def _four_bit() -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    def make() -> nn.Module:
        base = Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        return base.requires_grad_(False).to("cpu")

    return Net(make)


def _eight_bit() -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    return Net(lambda: Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False).to("cpu"))


def _fit_installed(
    make: Callable[..., nn.Module], args: tuple[Any, ...], options: dict[str, Any], path: str
) -> Any:
    module = ModelModule(make(*args))
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, loader())
    outcome = _trained(module)
    trainer.save_checkpoint(path)
    dist.barrier()
    again = ModelModule(make(*args))
    make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE).fit(
        again, loader(), ckpt_path=path
    )
    return outcome, _trained(again)


@pytest.mark.sweep
@pytest.mark.parametrize("options", by_default(STRATEGIES))
@pytest.mark.parametrize(
    ("package", "make", "args"),
    [
        ("torchao", _float8, (False,)),
        ("torchao", _float8, (True,)),
        ("torchao", _int8_base, ()),
        ("bitsandbytes", _four_bit, ()),
    ],
    ids=["float8", "float8-gathered", "int8-base", "4-bit-base"],
)
def test_installed_classes(
    pool2: RankPool, options: dict[str, Any], package: str, make: Any, args: Any, tmp_path: Any
) -> None:
    """Train to the weights of one process in float32, and load what they have saved."""
    pytest.importorskip(package)
    is_ddp = options == STRATEGIES["ddp"]
    if is_ddp and (args == (True,) or make is _four_bit):
        pytest.skip("float8 all-gathers are FSDP2's; what Linear4bit saves, it does not load")
    expected = _expected(make(*args))
    for outcome, loaded in pool2.run(
        _fit_installed, make, args, options, str(tmp_path / "x.ckpt"), timeout_s=200
    ):
        assert weight_error(outcome, expected) <= 1e-5
        assert weight_error(loaded, expected) <= 1e-5


def _message(make: Callable[[], nn.Module]) -> str:
    with pytest.raises(ValueError, match="is a") as raised:
        make_trainer(AutomodelStrategy()).fit(ModelModule(make()), loader())
    return str(raised.value)


@pytest.mark.sweep
def test_eight_bit_layers_of_bitsandbytes_are_refused(pool1: RankPool) -> None:
    """What they save could not be told apart from the unknown."""
    pytest.importorskip("bitsandbytes")
    assert pool1.run(_message, _eight_bit) == [
        "model.blocks.0.base.weight is a Int8Params: its layer adds to the state dict what belongs to no"
        " parameter or buffer, so a sharded model could not be saved. Load the model in 4 bit (Linear4bit),"
        " or pass data_parallel='ddp'."
    ]
