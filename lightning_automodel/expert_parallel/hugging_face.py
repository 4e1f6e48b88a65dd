"""Hugging Face models' own plans for expert parallelism: which weights to spread, and where to send tokens."""

import re
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.mesh import EXPERT, num_expert_ranks
from lightning_automodel.expert_parallel.dispatch import dispatch_tokens
from lightning_automodel.expert_parallel.spread import spread_experts
from lightning_automodel.internals.torch import not_compiled, parameters_of
from lightning_automodel.sharding.units import class_name, is_sharded, outermost

_WEIGHTS = "grouped_gemm"  # a parameter whose first dimension counts the experts
# A module that is called with tokens, the experts of each, and their weights.
_DISPATCH = "ep_dispatch_experts"


def spread_by_plan(module: nn.Module, mesh: DeviceMesh) -> None:
    """Spread the experts of the Hugging Face models in ``module`` over the 1-D ``mesh``, by their ``ep_plan``.

    Does nothing to experts that are spread already, or to models without a plan. A collective over the mesh,
    like ``spread_experts``. Raises ValueError for a plan that cannot be carried out.
    """
    if any(num_expert_ranks(parameter) > 1 for parameter in module.parameters()) or is_sharded(module):
        return
    for model in outermost([module], _has_plan):
        _apply_plan(model, mesh)


def _has_plan(module: nn.Module) -> bool:
    # The class must have it: an adapter passes the attribute of its model on, and its names differ.
    return hasattr(type(module), "ep_plan") and bool(module.ep_plan)


def _apply_plan(model: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, str] = model.ep_plan
    unknown = sorted(set(plan.values()) - {_WEIGHTS, _DISPATCH})
    if unknown:
        raise ValueError(
            f"The ep_plan of {class_name(model)} asks for {', '.join(unknown)}, which this strategy cannot"
            f" carry out (it knows {_WEIGHTS} and {_DISPATCH}): spread the experts yourself in"
            " configure_model, by spread_experts and dispatch_tokens, or leave expert_parallel_size at 1."
        )
    for name, experts in list(model.named_modules()):
        own = [weight for weight, _ in experts.named_parameters(recurse=False)]
        planned = [weight for weight in own if plan.get(_pattern(f"{name}.{weight}")) == _WEIGHTS]
        if plan.get(_pattern(name)) == _DISPATCH:
            _check_experts(experts, name, planned)
            spread_experts(experts, mesh, planned)
            experts.forward = MethodType(_dispatched_forward, experts)
        elif planned:
            raise ValueError(
                f"The ep_plan of {class_name(model)} spreads {', '.join(planned)} of {name}, and does not"
                f" say {_DISPATCH} of it, so that no token would be sent there: spread the experts yourself"
                " in configure_model, by spread_experts and dispatch_tokens, or leave expert_parallel_size"
                " at 1."
            )


def _pattern(name: str) -> str:
    """The name as plans write it: ``layers.0.mlp`` as ``layers.*.mlp``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check_experts(experts: Any, name: str, planned: list[str]) -> None:
    """Raise ValueError unless ``experts`` can be computed on other ranks' tokens."""
    problem = None
    if not planned:
        problem = "has none of the plan's weights of its own; an adapter may have wrapped it"
    elif not isinstance(getattr(experts, "num_experts", None), int):
        problem = "does not say its num_experts"
    elif "forward" in vars(experts):
        problem = "has a forward that was replaced, which would not be called"
    if problem is not None:
        raise ValueError(
            f"{name} ({class_name(experts)}) {problem}: expert_parallel_size > 1 needs a module of"
            " transformers as it is. Change it after the strategy has spread its experts, or leave"
            " expert_parallel_size at 1."
        )


@not_compiled
def _dispatched_forward(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Replaces the forward of ``experts``: [n, d] tokens, [n, k] experts of each and [n, k] weights to [n, d].

    A copy of the module whose weights are whole computes as its class does.
    """
    spread = {name: p for name, p in experts.named_parameters(recurse=False) if isinstance(p, DTensor)}
    if not spread:
        output: Tensor = type(experts).forward(experts, tokens, chosen, weights)
        return output
    mesh = next(iter(spread.values())).device_mesh[EXPERT]
    num_experts = experts.num_experts
    own_weights = {name: parameter.to_local() for name, parameter in spread.items()}
    parameters = parameters_of(experts)

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        if not len(rows):
            # Every rank must reach its parameters in the backward, which the module does not without tokens.
            unused = sum(weight.flatten()[:0].sum() for weight in own_weights.values())
            return rows + unused
        expert_of_row = torch.arange(len(counts), device=rows.device).repeat_interleave(
            torch.tensor(counts, device=rows.device), output_size=len(rows)
        )
        routing = expert_of_row.unsqueeze(1), rows.new_ones(len(rows), 1)
        # Not its call, whose hooks run around the whole dispatch.
        parameters.update(own_weights)
        experts.num_experts = len(counts)
        try:
            computed: Tensor = type(experts).forward(experts, rows, *routing)
        finally:
            parameters.update(spread)
            experts.num_experts = num_experts
        return computed

    return dispatch_tokens(tokens, chosen, weights, num_experts, compute, mesh)
