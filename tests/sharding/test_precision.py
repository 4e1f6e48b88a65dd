"""What units cast, the range of sums, and weights that are codes: a frozen quantised base, float8 layers, refusals.

torchao's float8 layers are tested where it is installed; nothing here has run on a GPU. Which dtypes come of which
precision: `tests/trainer/test_precision.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel import AutomodelStrategy
from lightning_automodel.distributed.mesh import MeshSizes
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.precision import cast_around
from lightning_automodel.sharding.quantized import check_replicable, stays_whole
from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, fit_module
from tests.trainer.exactness import VOCABULARY, Outcome, full_weights, weight_error
from tests.trainer.plain import ModelModule, prefixed, train_model_plainly
from tests.trainer.runs import CASE, STRATEGIES, TOLERANCE, by_default, loader, make_trainer

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
    weights = full_weights(module).items()
    return Outcome({name: weight for name, weight in weights if module.get_parameter(name).requires_grad})


def _fit(make_net: Callable[[], nn.Module], options: dict[str, Any]) -> tuple[Outcome, Any]:
    net = make_net()
    for block in net.blocks:
        if isinstance(block.base.weight, Codes):
            block.base.weight.codes.add_(dist.get_rank())  # rank 0's are meant
    module = ModelModule(net)
    described = fit_module(module, options).described
    return _trained(module), described.get("replicated")


def _expected(net: nn.Module) -> Outcome:
    train_model_plainly(net, ACCUMULATE, CASE)
    return prefixed(_trained(net))


@pytest.mark.parametrize("options", by_default(OPTIONS, "kept", "ddp"))
def test_adapters_beside_frozen_codes(pool2: RankPool, options: dict[str, Any]) -> None:
    """Exact; the codes stay whole, are rank 0's on every rank, and are said to be."""
    expected = _expected(coded_net())
    names = [f"model.blocks.{index}.base.weight" for index in range(3)]
    for outcome, replicated in pool2.run(_fit, coded_net, options):
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


def test_a_class_that_is_a_tag(pool2: RankPool) -> None:
    """It is sharded and trained as any parameter."""
    expected = _expected(tagged_net())
    for outcome, replicated in pool2.run(_fit, tagged_net, {}):
        assert weight_error(outcome, expected) <= TOLERANCE
        assert not replicated


def test_refused() -> None:
    """With the name, the class and what works: codes to be trained, and what could not be saved."""
    net = coded()
    net.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="weight is to be trained and is a Codes, which FSDP2 cannot shard"):
        stays_whole("weight", net.weight, MixedPrecisionPolicy())
    with pytest.raises(ValueError, match="weight is to be trained and is a Codes, which DDP cannot hold"):
        check_replicable(dict(net.named_parameters()))
    net.weight.requires_grad_(False)
    assert check_replicable(dict(net.named_parameters()))
    net.weight.SCB = torch.ones(1)  # as that of bitsandbytes' Linear8bitLt
    with pytest.raises(ValueError, match="weight is a Codes: its layer adds to the state dict what belongs"):
        stays_whole("weight", net.weight, MixedPrecisionPolicy())


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


def _float8(gathers_float8: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net = Net(lambda: nn.Linear(WIDTH, WIDTH))
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_float8)
    for block in net.blocks:
        convert_to_float8_training(block, module_filter_fn=lambda m, name: name == "base", config=config)
    return net


def _fit_float8(gathers: bool, options: dict[str, Any], path: str) -> tuple[Outcome, Outcome]:
    module = ModelModule(_float8(gathers))
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, loader())
    outcome = _trained(module)
    trainer.save_checkpoint(path)
    again = ModelModule(_float8(gathers))
    make_trainer(AutomodelStrategy(**options)).validate(again, loader(), path, verbose=False)
    return outcome, _trained(again)


@pytest.mark.sweep
@pytest.mark.parametrize("options", by_default(STRATEGIES))
@pytest.mark.parametrize("gathers", [False, True])
def test_float8_layers(pool2: RankPool, options: dict[str, Any], gathers: bool, tmp_path: Any) -> None:
    """Train to the weights of one process in float32, and load what they have saved."""
    pytest.importorskip("torchao")
    if gathers and options == STRATEGIES["ddp"]:
        pytest.skip("float8 all-gathers are FSDP2's")
    expected = _expected(_float8(gathers))
    for outcome, loaded in pool2.run(_fit_float8, gathers, options, str(tmp_path / "x.ckpt"), timeout_s=200):
        assert weight_error(outcome, expected) <= 1e-5
        assert weight_error(loaded, expected) <= 1e-5


# --- Casts, and the range of sums -------------------------------------------------------------------------------------


BF16 = torch.bfloat16
FP32 = torch.float32
FP64 = torch.float64


def test_casting_around_a_module() -> None:
    """Floating tensors in any container, going in and coming out; integers stay. Copies must not be written."""
    seen: list[torch.dtype] = []

    class Module(nn.Module):
        def forward(self, ids: torch.Tensor, *, more: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            seen.extend([ids.dtype, more["x"].dtype])
            return [more["x"] if len(more) == 1 else more.pop("x"), ids]

    module = Module()
    cast_around([module], MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP64))
    outputs = module(torch.tensor([1]), more={"x": torch.ones(1)})
    assert seen == [torch.int64, BF16]
    assert [output.dtype for output in outputs] == [FP64, torch.int64]
    with pytest.raises(RuntimeError, match="has changed a list, dict, set or dataclass that it was given"):
        module(torch.tensor([1]), more={"x": torch.ones(1), "y": torch.ones(1)})
    untouched = Module()
    cast_around([untouched], MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False))
    assert untouched(torch.tensor([1]), more={"x": torch.ones(1)})[0].dtype == FP32


def _scaling(in_float16: bool) -> LossScaling:
    alone: Any = SimpleNamespace(sizes=MeshSizes(1, 1))
    return LossScaling(None, in_float16, alone, torch.device("cpu"), PatchStack())


def test_range_of_sums() -> None:
    """Room for sixteen times what the first micro-batch lets expect, then for the largest window: powers of two."""
    scaling = _scaling(True)
    assert scaling.start_window(1000) == 2.0**-14
    for denominator, factor in (
        (1500.0, 2.0**-14),
        (0.0, 2.0**-14),
        (16_500.0, 2.0**-15),
        (1100.0, 2.0**-15),
    ):
        scaling.window_ended([], torch.tensor(denominator, dtype=FP64))
        assert scaling.start_window(1) == factor
    assert _scaling(True).start_window(2.0**-10) == 2.0**6  # denominators below one enlarge the sums
    assert _scaling(True).start_window(0) == 1
    assert _scaling(False).start_window(1) is None
