"""Hugging Face models spread their experts by their own plan, and train as without expert parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_automodel import AutomodelStrategy, ModelExport
from lightning_automodel.distributed.mesh import num_expert_ranks
from lightning_automodel.expert_parallel.hugging_face import spread_by_plan
from lightning_automodel.sharding import tensor_parallel
from tests.expert_parallel.mixtures import ACCUMULATE
from tests.rank_pool import RankError, RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import VOCABULARY, full_weights, weight_error
from tests.trainer.hugging_face import OwnLoss, filled
from tests.trainer.plain import fill
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import by_default, loader, make_trainer

pytest.importorskip("transformers")

ROUNDING = 1e-15
"""Sums over the tokens of an expert in another order. What is float32 in these models is the same on each rank."""
WRONG = 1e-4
CASE = Case(seed=37, telling="labels", num_batches=4, num_ranks=4, gap="micro_batches", label_shift=1)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "router_aux_loss_coef": 0.3,
}


def make_model(kind: str, implementation: str = "eager") -> nn.Module:
    """A tiny model of random weights."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES)
    # Experts are computed in float64 by "eager" alone.
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    model.config.use_cache = False
    fill(model)
    return model


class Mixture(OwnLoss):
    """Trains on the model's own loss."""

    def __init__(self, kind: str) -> None:
        super().__init__(make_model(kind))


class Grouped(Mixture):
    """In float32 or less, with one matrix product for all experts: transformers' default."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.model = make_model(kind, "grouped_mm").float()


def fit(
    kind: str, options: dict[str, Any], make: Callable[[str], Any] = Mixture, **kwargs: Any
) -> tuple[dict[str, Tensor], list[str]]:
    """Train on every rank; return full weights, and which of them are spread over ranks."""
    module = make(kind)
    strategy = AutomodelStrategy(label_shift=1, **options)
    make_trainer(strategy, accumulate_grad_batches=ACCUMULATE, **kwargs).fit(module, loader(CASE))
    spread = [name for name, parameter in module.model.named_parameters() if num_expert_ranks(parameter) > 1]
    return full_weights(module.model), spread


OPTIONS: dict[str, dict[str, Any]] = {
    "two ranks": {"expert_parallel_size": 2},
    "four ranks": {"expert_parallel_size": 4},
    "recomputed": {"expert_parallel_size": 4, "activation_checkpointing": True},
}


@pytest.mark.every_case
@pytest.mark.parametrize("options", by_default(OPTIONS, "two ranks"))
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_as_without_expert_parallelism(pool4: RankPool, kind: str, options: dict[str, Any]) -> None:
    (expected, whole), *_ = pool4.run(fit, kind, {})
    assert whole == []
    for weights, spread in pool4.run(fit, kind, options):
        assert weight_error(weights, expected) <= ROUNDING
        assert weight_error(weights, full_weights(make_model(kind))) > WRONG
        assert sorted({name.rpartition(".")[2] for name in spread}) == ["down_proj", "gate_up_proj"]
        assert len(spread) == 2 * SIZES["num_hidden_layers"]


PRECISIONS = {"32-true": 1e-6, "bf16-mixed": 1e-2, "bf16-true": 5e-2}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_product_for_all_experts(pool4: RankPool, precision: str) -> None:
    """A rank computes experts that no token has chosen, and rows of other ranks, in the dtype of the run."""
    (expected, _), *_ = pool4.run(fit, "Qwen3Moe", {}, Grouped, precision=precision)
    for weights, spread in pool4.run(
        fit, "Qwen3Moe", {"expert_parallel_size": 4}, Grouped, precision=precision
    ):
        assert spread
        assert weight_error(weights, expected) <= PRECISIONS[precision]


class Edited(Mixture):
    """Changes the model in ``configure_model``, before the strategy spreads its experts."""

    def __init__(self, edit: Callable[[Any], None]) -> None:
        super().__init__("Qwen3Moe")
        self.edit = edit

    def configure_model(self) -> None:
        self.edit(self.model)


def another_style(model: Any) -> None:
    """What Gemma 4 asks for beside the experts."""
    model.ep_plan = {**model.ep_plan, "model.layers.*.mlp.gate_proj": "colwise"}


def not_dispatched(model: Any) -> None:
    """A plan that spreads weights of a module which it sends no tokens to."""
    model.ep_plan = {name: style for name, style in model.ep_plan.items() if style == "grouped_gemm"}


def replaced_forward(model: Any) -> None:
    """Some library's own forward of the experts."""
    experts = model.model.layers[0].mlp.experts
    experts.forward = experts.forward


def refused(edit: Callable[[Any], None], sentence: str) -> Refused:
    options = {"label_shift": 1, "expert_parallel_size": 2}
    return Refused(lambda: Edited(edit), (sentence,), lambda: loader(CASE), options)


REFUSED = {
    "another style": refused(
        another_style, "asks for colwise, which this strategy cannot carry out (it knows grouped_gemm and"
    ),
    "not dispatched": refused(
        not_dispatched,
        "spreads gate_up_proj, down_proj of model.layers.0.mlp.experts, and does not say ep_dispatch",
    ),
    "replaced forward": refused(
        replaced_forward, "model.layers.0.mlp.experts (Qwen3MoeExperts) has a forward that was replaced"
    ),
}


def test_refused(pool2: RankPool) -> None:
    check_refused(pool2, __name__)


def outputs_of_copies() -> tuple[Tensor, Tensor, int]:
    """Runs on every rank: what whole copies of spread experts compute, what the module did before; and its weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert_parallel",))
    model = make_model("Qwen3Moe")
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(ids).logits
    spread_by_plan(model, mesh)
    copied = copy.deepcopy(model)
    weights = {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for name, whole in weights.items():
        owner, _, attribute = name.rpartition(".")
        setattr(copied.get_submodule(owner), attribute, nn.Parameter(whole))
    return before, copied(ids).logits, len(weights)


def test_a_copy_with_whole_weights_computes_as_its_class(pool2: RankPool) -> None:
    """What EMA and ExactnessCheck do with copies: they use their own weights, on one rank."""
    for before, of_copy, num_weights in pool2.run(outputs_of_copies):
        assert torch.equal(before, of_copy)
        assert num_weights == 2 * SIZES["num_hidden_layers"]


def test_tensor_parallelism_of_experts_names_the_option_for_experts() -> None:
    """Before the mesh is used."""
    mesh: Any = None
    with pytest.raises(
        ValueError, match="asks for moe_tp_experts, packed_colwise, which this strategy cannot carry out"
    ):
        tensor_parallel._apply_plan(make_model("Qwen3Moe"), mesh)


# --- Adapters, and exports --------------------------------------------------------------------------------------------


def adapted(**where: Any) -> nn.Module:
    """A frozen mixture of experts with adapters of rank 2."""
    model = get_peft_model(make_model("Qwen3Moe"), LoraConfig(r=2, lora_alpha=4, **where))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return filled(model, only=trainable)


class Adapted(Mixture):
    """Trains adapters alone."""

    def __init__(self, kind: str, **where: Any) -> None:
        super().__init__(kind)
        self.model = adapted(**where)


def test_adapters_of_attention(pool4: RankPool) -> None:
    """The frozen experts are spread, and pass gradients on."""
    where = {"target_modules": ["q_proj", "v_proj"]}
    make = partial(Adapted, **where)
    (expected, _), *_ = pool4.run(fit, "Qwen3Moe", {}, make)
    for weights, _ in pool4.run(fit, "Qwen3Moe", OPTIONS["four ranks"], make):
        assert weight_error(weights, expected) <= ROUNDING
    start = full_weights(adapted(**where))
    assert {name.rsplit(".", 3)[1] for name in expected if not expected[name].equal(start[name])} == {
        "lora_A",
        "lora_B",
    }


def test_adapters_of_experts(pool4: RankPool) -> None:
    """PEFT wraps the experts, whose weights then have other names than the plan's."""
    make = partial(Adapted, target_modules=[], target_parameters=["experts.gate_up_proj"])
    with pytest.raises(RankError, match="an adapter may have wrapped it"):
        pool4.run(fit, "Qwen3Moe", OPTIONS["four ranks"], make)


def test_exports(pool4: RankPool, tmp_path: Path) -> None:
    """Files with whole experts, under the names of the hub, which `from_pretrained` reads."""
    from transformers import AutoModelForCausalLM

    callbacks = [ModelExport(str(tmp_path / "live"))]
    weights, _ = pool4.run(fit, "Qwen3Moe", OPTIONS["four ranks"], callbacks=callbacks)[0]
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "live").named_parameters())
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weight) for name, weight in weights.items())
